"""Limits on prompts: errors name the field, and a prompt that cannot fit is refused before any work for it."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from engine.driver import Driver
from engine.errors import ContextLengthError, PromptSize
from engine.text.tokenizer import EncodedPart
from server.errors import invalid
from server.protocol import ChatCompletionRequest

MAX_TRUNCATED_CHARS = 1 << 22  # characters of a text that is cut to fit
MAX_TRUNCATED_IDS = 1 << 18
# Requests that count tokens may count more than the context holds, up to this limit.
COUNTED_CONTEXTS, MIN_COUNTED = 8, 1 << 16


@dataclass(frozen=True)
class Reading:
    """The part of a text that is encoded: `num_tokens` from its beginning or its end. A longer text is cut where it
    `may_be_cut`, else refused. `may_be_long`: the text may have more characters than fit into the context."""

    num_tokens: int
    from_end: bool = False
    may_be_cut: bool = False
    may_be_long: bool = False


def reading_of(driver: Driver, counts: bool = False, may_be_long: bool = False) -> Reading:
    """The reading of a prompt without truncation. `counts`: prompts that are too long for the model count too."""
    context = driver.model.max_model_len
    # The last tokens before the cut might be fewer together with the text after the cut.
    slack = driver.tokenizer.max_chars_per_token
    num_tokens = max(COUNTED_CONTEXTS * context, MIN_COUNTED) if counts else context
    return Reading(num_tokens + slack, may_be_long=may_be_long)


def check_text_length(driver: Driver, num_chars: int, param: str, may_be_long: bool) -> None:
    """Refuse a text that cannot fit, before any work for it. A text that will be cut may be longer."""
    if not may_be_long:
        check_length(driver, num_chars, param)
    elif num_chars > MAX_TRUNCATED_CHARS:
        message = f"The prompt has {num_chars} characters; to be truncated it may have {MAX_TRUNCATED_CHARS}."
        at_least = -(-num_chars // driver.tokenizer.max_chars_per_token)
        raise ContextLengthError(message, param, prompt_size(driver, at_least))


def check_length(driver: Driver, num_chars: int, param: str) -> None:
    """Refuse a text that cannot fit by its number of characters, before any work for it."""
    limit = driver.model.max_model_len
    at_least = -(-num_chars // driver.tokenizer.max_chars_per_token)
    if at_least >= limit:
        raise ContextLengthError(
            f"This model's maximum context length is {limit} tokens; the prompt has {num_chars} characters, so at "
            f"least {at_least} tokens. Shorten it.",
            param,
            PromptSize(at_least, limit - 1, limit),
        )


def check_num_ids(driver: Driver, num_ids: int, param: str, may_be_cut: bool) -> None:
    """Refuse a prompt of token ids that cannot fit, before any id is read."""
    context = driver.model.max_model_len
    limit = max(context, MAX_TRUNCATED_IDS) if may_be_cut else context
    if num_ids > limit:
        cut = f"; to be truncated it may have {limit}" if may_be_cut else ""
        raise ContextLengthError(
            f"This model's maximum context length is {context} tokens; the prompt has {num_ids} tokens{cut}. "
            "Shorten it.",
            param,
        )


def check_read(driver: Driver, part: EncodedPart, reading: Reading, param: str) -> None:
    """Refuse a text whose encoded part has too many tokens already."""
    if part.num_unread and not reading.may_be_cut:
        at_least = reading.num_tokens - driver.tokenizer.max_chars_per_token + 1
        raise ContextLengthError(
            f"This model's maximum context length is {driver.model.max_model_len} tokens; the prompt has at least "
            f"{at_least} tokens. Shorten it.",
            param,
            prompt_size(driver, at_least),
        )


def prompt_size(driver: Driver, at_least: int) -> PromptSize:
    """The size of a prompt with at least `at_least` tokens, for errors."""
    context = driver.model.max_model_len
    return PromptSize(at_least, context - 1, context)


def check_chat_size(driver: Driver, request: ChatCompletionRequest, may_be_long: bool) -> None:
    """Refuse a conversation, with its tools and documents, that cannot fit, before the template renders it."""
    context = driver.model.max_model_len * driver.tokenizer.max_chars_per_token
    room = limit = MAX_TRUNCATED_CHARS if may_be_long else context
    schemas = [
        [tool.function.name, tool.function.description, tool.function.parameters] for tool in request.offered_tools
    ]
    contents = [message.content for message in request.messages]
    for name, value in (("messages", contents), ("tools", schemas), ("documents", request.documents)):
        room -= count_chars(value, room)
        if room < 0:
            raise ContextLengthError(
                f"This model's maximum context length is {driver.model.max_model_len} tokens. The prompt may have at "
                f"most {limit} characters; with {name} it has more. Shorten them.",
                name,
                prompt_size(driver, -(-limit // driver.tokenizer.max_chars_per_token)),
            )
    # Templates leave out thoughts of earlier turns and format arguments anew: both may be longer than the context.
    limit = max(context, MAX_TRUNCATED_CHARS)
    for i, message in enumerate(request.messages):
        calls = [call.function.arguments for call in message.tool_calls]
        limit -= count_chars([message.reasoning, message.reasoning_content, calls], limit)
        if limit < 0:
            text = "The reasoning and the tool_calls of the messages have too many characters for this model: shorten"
            size = prompt_size(driver, 0)  # the prompt itself may be short enough
            raise ContextLengthError(f"{text} them.", f"messages[{i}]", size)


def count_chars(value: Any, limit: int) -> int:
    """A lower bound on the characters of a prompt that holds all of `value`; counting stops beyond the limit."""
    total, rest = 0, [value]
    while rest and total <= limit:
        part = rest.pop()
        if isinstance(part, str):
            total += len(part)
        elif isinstance(part, dict):
            rest += part.keys()
            rest += part.values()
        elif isinstance(part, (list, tuple)):
            rest += part
        else:
            total += part is not None
    return total


def check_vocabulary(ids: Sequence[int], vocab_size: int, name: str) -> None:
    """Raise InvalidRequestError naming the wrong entry of the field `name`. The Driver's check names no entry."""
    if ids and (min(ids) < 0 or max(ids) >= vocab_size):
        at = next(i for i, token_id in enumerate(ids) if not 0 <= token_id < vocab_size)
        raise invalid(f"{name}[{at}] must be a token id of this model: 0 to {vocab_size - 1}.", f"{name}[{at}]")
