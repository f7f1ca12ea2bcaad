"""Structured outputs over HTTP: which field asked, and what it cannot be combined with."""

from engine.driver import Driver
from engine.errors import InvalidRequestError
from engine.structured_output import StructuredOutput
from server.errors import invalid
from server.protocol import GenerationRequest


def structured_output_field(request: GenerationRequest) -> str | None:
    """The field that says what form the text must have, or None. InvalidRequestError where both do."""
    if request.structured_outputs is None:
        return None if request.response_format is None else "response_format"
    if request.response_format is not None:
        message = "structured_outputs may not be combined with response_format: give one of them."
        raise invalid(message, "structured_outputs", "unsupported_value")
    return "structured_outputs"


async def prepare(driver: Driver, output: StructuredOutput | None, param: str | None, tenant: str) -> None:
    """Compile what a request asks for, off the event loop; an error says what is wrong with it and names `param`."""
    if output is None or driver.model.encoder:  # which generates nothing: admission refuses it, and says so
        return
    try:
        await driver.grammars.prepare(output, tenant)
    except InvalidRequestError as error:
        raise invalid(f"{param}: {error}", param) from None
