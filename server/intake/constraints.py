"""Constraints on the generated tokens: banned and allowed tokens, and the form that the text must have."""

from engine.errors import InvalidRequestError
from engine.replicas.engine import Engine
from engine.sampling_params import SamplingParams
from engine.structured_output import StructuredOutput
from engine.text.bad_words import resolve_bans
from server.errors import invalid
from server.protocol import GenerationRequest

SCHEMAS = {"response_format": "response_format.json_schema.schema", "structured_outputs": "structured_outputs.json"}


def structured_output_field(request: GenerationRequest) -> str | None:
    """The field that says what form the text must have, or None. Raises InvalidRequestError where both fields do."""
    if request.structured_outputs is None:
        return None if request.response_format is None else "response_format"
    if request.response_format is not None:
        message = "structured_outputs may not be combined with response_format: give one of them."
        raise invalid(message, "structured_outputs", "unsupported_value")
    return "structured_outputs"


async def compile_output(driver: Engine, output: StructuredOutput | None, param: str | None, tenant: str) -> None:
    """Compile the form that a request asks for, off the event loop. An error says what is wrong and names `param`."""
    if output is None or driver.model.embeds_only:  # admission refuses to generate
        return
    try:
        await driver.grammars.prepare(output, tenant)
    except InvalidRequestError as error:
        raise _naming(param, error) from None


async def check_output(driver: Engine, output: StructuredOutput, param: str | None, tenant: str) -> None:
    """Raise InvalidRequestError naming `param` where the form cannot be compiled."""
    try:
        await driver.grammars.checker.check(output, tenant)
    except InvalidRequestError as error:
        raise _naming(param, error) from None


def _naming(param: str | None, error: InvalidRequestError) -> InvalidRequestError:
    """The error of a form that `param` holds. It names the place in the schema, if the error has one."""
    if param is not None and (place := (error.param or "").removeprefix("structured_output")):
        param = SCHEMAS.get(param, param) + place
    return invalid(f"{param}: {error}", param)


async def resolve_banned_tokens(driver: Engine, params: SamplingParams, tenant: str) -> SamplingParams:
    """`params` with bad words as token ids, which the Worker needs. Raises InvalidRequestError naming the field."""
    if params.structured_output is not None:  # together they could leave no token to choose
        name = "bad_words" if params.bad_words else "allowed_token_ids"
        message = f"{name} may not be combined with response_format, structured_outputs or forced calls of tools."
        raise invalid(message, name, "unsupported_value")
    size = 3 * sum(len(word) for word in params.bad_words)
    return await driver.tokenizer.run(tenant, size, resolve_bans, params, driver.tokenizer, driver.eos_token_ids)
