"""From a request to the token ids of its prompt: the chat template, truncation, and bans that need the tokenizer.

Whatever costs time here is bounded by what the model's context could hold, and waits for its tenant's turn: a text that
is too long by its characters is refused unread; of one that may be too long by its tokens, or is to be cut, no more is
encoded than shows that, or than is kept.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from engine.driver import Driver
from engine.errors import ContextLengthError, InvalidRequestError, PromptSize
from engine.sampling_params import SamplingParams
from engine.text.bad_words import resolve_bans
from engine.text.chat_template import ChatTemplate, Helper, TemplateLimitError
from engine.text.text_threads import QUICK_CHARS
from engine.text.tokenizer import EncodedPart, RenderedChat, Tokenizer
from server.config import ServerConfig
from server.context import Served
from server.errors import invalid
from server.protocol import ChatCompletionRequest, GenerationRequest, Message
from server.tools.formats import ToolUse, find_tool_use
from server.tools.rendering import Rendered, mended, with_tools

MAX_TRUNCATED_CHARS = 1 << 22  # of a text that is cut to fit
MAX_TRUNCATED_IDS = 1 << 18
PORTION_CHARS = QUICK_CHARS  # of texts that are encoded together, before other tenants have their turn
# Requests that count tokens are told of more than the context holds, but not of any number.
COUNTED_CONTEXTS, MIN_COUNTED = 8, 1 << 16


@dataclass(frozen=True)
class Reading:
    """How much of a text is encoded: so many tokens of it, from its beginning or its end. One that has more is cut
    where it `may_be_cut`, else refused. `may_be_long`: in characters it may be more than the context holds."""

    num_tokens: int
    from_end: bool = False
    may_be_cut: bool = False
    may_be_long: bool = False


def reading_of(driver: Driver, counts: bool = False, may_be_long: bool = False) -> Reading:
    """Of a prompt that is not to be cut. `counts`: one that is too long for the model is of interest, too."""
    context = driver.model.max_model_len
    # What the cut ends in may have become fewer tokens together with what follows.
    slack = driver.tokenizer.max_chars_per_token
    num_tokens = max(COUNTED_CONTEXTS * context, MIN_COUNTED) if counts else context
    return Reading(num_tokens + slack, may_be_long=may_be_long)


@dataclass(frozen=True)
class Truncation:
    """`truncate_prompt_tokens` as a number of tokens; the first `num_kept`, put there by the tokenizer, stay."""

    limit: int
    side: str
    num_kept: int = 0

    @property
    def reading(self) -> Reading:
        return Reading(self.limit, self.side == "left", may_be_cut=True, may_be_long=True)

    def cut(self, driver: Driver, part: EncodedPart) -> tuple[list[int], int]:
        """(the tokens that are left, how many it took: at least so many, where not all of the text was read)."""
        ids = part.token_ids
        num_cut = max(0, len(ids) - self.limit)
        total = num_cut + -(-part.num_unread // driver.tokenizer.max_chars_per_token)
        if not num_cut:
            return ids, total
        if self.side == "right":
            return ids[: self.limit], total
        num_kept = min(self.num_kept, self.limit)
        return ids[:num_kept] + ids[num_kept + num_cut :], total


def truncation_of(
    driver: Driver, request: GenerationRequest, max_tokens: int | None, num_kept: int = 0
) -> Truncation | None:
    """What a request says about it; -1 leaves as much as fits beside max_tokens."""
    limit = request.truncate_prompt_tokens
    if limit is None:
        return None
    context = driver.model.max_model_len
    if limit == -1:
        limit = max(1, context - (max_tokens or 1))
    elif limit >= context:
        message = (
            f"truncate_prompt_tokens must be -1 or from 1 to {context - 1}, below the context of {context} tokens."
        )
        raise invalid(message, "truncate_prompt_tokens")
    return Truncation(limit, request.truncation_side, num_kept)


def check_text_length(driver: Driver, num_chars: int, param: str, may_be_long: bool) -> None:
    """Refuse what cannot fit before any work is done for it; what will be cut may be longer."""
    if not may_be_long:
        check_length(driver, num_chars, param)
    elif num_chars > MAX_TRUNCATED_CHARS:
        message = f"The prompt has {num_chars} characters; to be truncated it may have {MAX_TRUNCATED_CHARS}."
        at_least = -(-num_chars // driver.tokenizer.max_chars_per_token)
        raise ContextLengthError(message, param, prompt_size(driver, at_least))


def check_num_ids(driver: Driver, num_ids: int, param: str, may_be_cut: bool) -> None:
    """The same of a prompt of token ids, before each of them is looked at."""
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
    """Refuse a text of which a part alone has too many tokens."""
    if part.num_unread and not reading.may_be_cut:
        at_least = reading.num_tokens - driver.tokenizer.max_chars_per_token + 1
        raise ContextLengthError(
            f"This model's maximum context length is {driver.model.max_model_len} tokens; the prompt has at least "
            f"{at_least} tokens. Shorten it.",
            param,
            prompt_size(driver, at_least),
        )


def prompt_size(driver: Driver, at_least: int) -> PromptSize:
    context = driver.model.max_model_len
    return PromptSize(at_least, context - 1, context)


async def encode_texts(
    driver: Driver,
    texts: Sequence[str],
    names: Sequence[str],
    add_special_tokens: bool,
    tenant: str,
    reading: Reading | None = None,
) -> list[EncodedPart]:
    """Each text as token ids, made in the tokenizer's threads, a portion at a time. `names` are the fields of the
    texts, for errors; `reading` says how much of them is read, by default what the context holds."""
    reading = reading or reading_of(driver)
    for text, name in zip(texts, names, strict=True):
        check_text_length(driver, len(text), name, reading.may_be_long)
    parts: list[EncodedPart] = []
    for portion in portions(texts):
        size = sum(map(len, portion))
        parts += await driver.tokenizer.run(tenant, size, _encode, driver, portion, add_special_tokens, reading)
    for part, name in zip(parts, names, strict=True):
        check_read(driver, part, reading, name)
    return parts


def _encode(driver: Driver, texts: Sequence[str], add_special_tokens: bool, reading: Reading) -> list[EncodedPart]:
    encode = driver.tokenizer.encode_part
    return [encode(text, add_special_tokens, reading.num_tokens, reading.from_end) for text in texts]


def portions(texts: Sequence[str]) -> Iterator[list[str]]:
    """The texts in order, as many at a time as have PORTION_CHARS together; a longer one alone."""
    portion: list[str] = []
    size = 0
    for text in texts:
        if portion and size + len(text) > PORTION_CHARS:
            yield portion
            portion, size = [], 0
        portion.append(text)
        size += len(text)
    if portion:
        yield portion


async def tokenize_chat(served: Served, request: ChatCompletionRequest, tenant: str, counts: bool = False) -> list[int]:
    """The prompt of a conversation: what the chat template makes of it, as token ids."""
    ids, _ = await tokenize_and_cut_chat(served, request, tenant, None, counts)
    return ids


async def tokenize_long_chat(served: Served, request: ChatCompletionRequest, tenant: str) -> list[int]:
    """The prompt of a conversation that will be shorter before it has to fit into the context."""
    reading = reading_of(served.driver, counts=True, may_be_long=True)
    return (await _encode_chat(served, request, tenant, reading)).token_ids


async def tokenize_and_cut_chat(
    served: Served, request: ChatCompletionRequest, tenant: str, max_tokens: int | None, counts: bool = False
) -> tuple[list[int], int]:
    """(the prompt of a conversation, how many tokens truncate_prompt_tokens cut off: see Truncation.cut).

    It is rendered by a process that can be killed, and encoded in the same thread where it is short.
    """
    driver = served.driver
    truncation = truncation_of(driver, request, max_tokens)
    reading = reading_of(driver, counts) if truncation is None else truncation.reading
    part = await _encode_chat(served, request, tenant, reading)
    return (part.token_ids, 0) if truncation is None else truncation.cut(driver, part)


async def _encode_chat(served: Served, request: ChatCompletionRequest, tenant: str, reading: Reading) -> EncodedPart:
    driver = served.driver
    tokenizer = driver.tokenizer
    num_chars = sum(message.num_chars for message in request.messages)
    check_text_length(driver, num_chars, "messages", reading.may_be_long)
    options = (request.add_special_tokens, reading.num_tokens, reading.from_end)
    found = await tokenizer.renderer.run(tenant, _render, driver, request, served.config, reading, options)
    if isinstance(found, RenderedChat):
        found = await tokenizer.run(tenant, len(found.text), tokenizer.encode_chat, found, *options)
    check_read(driver, found, reading, "messages")
    return found


def _render(
    helper: Helper,
    driver: Driver,
    request: ChatCompletionRequest,
    config: ServerConfig,
    reading: Reading,
    options: tuple[bool, int, bool],
) -> RenderedChat | EncodedPart:
    """The token ids, or the text alone where that is long: then it has to wait for its turn among long ones."""
    check_chat_size(driver, request, reading.may_be_long)
    rendered = render_chat(driver.tokenizer, request, config, helper)
    check_text_length(driver, len(rendered.plain_text), "messages", reading.may_be_long)
    return rendered if len(rendered.text) > QUICK_CHARS else driver.tokenizer.encode_chat(rendered, *options)


def check_chat_size(driver: Driver, request: ChatCompletionRequest, may_be_long: bool) -> None:
    """Refuse a conversation that cannot fit, with its tools and documents, before a template renders it."""
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
    # Templates leave thoughts of earlier turns out, and write arguments anew: these may be longer than the context.
    limit = max(context, MAX_TRUNCATED_CHARS)
    for i, message in enumerate(request.messages):
        calls = [call.function.arguments for call in message.tool_calls]
        limit -= count_chars([message.reasoning, message.reasoning_content, calls], limit)
        if limit < 0:
            text = "The reasoning and the tool_calls of the messages have too many characters for this model: shorten"
            size = prompt_size(driver, 0)  # as a prompt it may have been short enough
            raise ContextLengthError(f"{text} them.", f"messages[{i}]", size)


def count_chars(value: Any, limit: int) -> int:
    """Characters that a prompt with all of `value` in it has, at least; counting ends beyond the limit."""
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


def render_chat(
    tokenizer: Tokenizer, request: ChatCompletionRequest, config: ServerConfig, helper: Helper | None = None
) -> RenderedChat:
    """What the chat template makes of a request; without a helper in this thread, without limits."""
    template = tokenizer.template(helper=helper)
    own = template_variables(request, template.variables)
    refused: InvalidRequestError | None = None
    for messages, variables in _renditions(template, tokenizer, request, config):
        try:
            return tokenizer.render_chat(
                messages,
                add_generation_prompt=request.adds_generation_prompt,
                continue_final_message=request.continue_final_message,
                helper=helper,
                special_tokens_in_content=config.special_tokens_in_content,
                **{**own, **variables},
            )
        except TemplateLimitError:
            raise  # other forms would take as long
        except InvalidRequestError as error:
            refused = refused or error
    assert refused is not None
    raise refused


def _renditions(
    template: ChatTemplate, tokenizer: Tokenizer, request: ChatCompletionRequest, config: ServerConfig
) -> Iterator[Rendered]:
    """Messages and variables of the template: the conversation as it is, and where calls and answers do not fit each
    other, turns are empty or several of one role follow each other, in forms for a template that refuses that: mended,
    and last without its own tools."""
    has_developer = "developer" in template.source
    if not request.has_tools:
        yield [message.for_template(has_developer) for message in request.messages], {}
        for history in _mended_histories(request.messages):
            yield [message.for_template(has_developer) for message in history], {}
        return
    use = find_tool_use(template, tokenizer, config.tool_call_format)
    tools = request.offered_tools
    yield with_tools(template, use, request.messages, tools, has_developer)
    for history in _mended_histories(request.messages):
        yield with_tools(template, use, history, tools, has_developer)
        yield with_tools(template, ToolUse(use.form, in_template=False), history, tools, has_developer)


def _mended_histories(messages: list[Message]) -> Iterator[list[Message]]:
    """For a template that refuses the order of a conversation, and then for one that takes no system message."""
    histories = [mended(messages), mended(messages, has_system=False)]
    for i, history in enumerate(histories):
        if history not in [messages, *histories[:i]]:
            yield history


def template_variables(request: ChatCompletionRequest, known: frozenset[str]) -> Mapping[str, Any]:
    """What the template gets beside the messages; `known` are the names that it asks for.

    chat_template_kwargs win over the fields with a meaning of their own. Whether and how much to think and how much to
    say are wishes: a template that has no place for them leaves them out. Documents are not.
    """
    variables = dict(request.chat_template_kwargs)
    for name, value in (("reasoning_effort", request.effort), ("verbosity", request.verbosity)):
        if name in known and value is not None:
            variables.setdefault(name, value)
    says_no_effort = request.effort == "none" and "reasoning_effort" in known
    if request.thinks is not None and "enable_thinking" in known and not says_no_effort:
        variables.setdefault("enable_thinking", request.thinks)  # how Qwen3 and others spell it
    if request.thinks is False and "reasoning_effort" in known and "enable_thinking" not in known:
        variables.setdefault("reasoning_effort", "none")
    if request.documents:
        if "documents" not in known:
            message = "documents are not supported by this model's chat template: put them into a message."
            raise invalid(message, "documents", "unsupported_value")
        variables["documents"] = request.documents
    return variables


async def resolve_params(driver: Driver, params: SamplingParams, tenant: str) -> SamplingParams:
    """With bad words as the Worker takes them; the same object where there is nothing to do."""
    if not params.bad_words and params.allowed_token_ids is None:
        return params
    if params.structured_output is not None:  # together they could leave no token to choose
        name = "bad_words" if params.bad_words else "allowed_token_ids"
        message = f"{name} may not be combined with response_format, structured_outputs or forced calls of tools."
        raise invalid(message, name, "unsupported_value")
    size = 3 * sum(len(word) for word in params.bad_words)
    return await driver.tokenizer.run(tenant, size, resolve_bans, params, driver.tokenizer, driver.eos_token_ids)


def check_length(driver: Driver, num_chars: int, param: str) -> None:
    """Refuse a text that cannot fit by its characters alone, before any work is done for it."""
    limit = driver.model.max_model_len
    at_least = -(-num_chars // driver.tokenizer.max_chars_per_token)
    if at_least >= limit:
        raise ContextLengthError(
            f"This model's maximum context length is {limit} tokens; the prompt has {num_chars} characters, so at "
            f"least {at_least} tokens. Shorten it.",
            param,
            PromptSize(at_least, limit - 1, limit),
        )


def check_vocabulary(ids: Sequence[int], vocab_size: int, name: str) -> None:
    """The Driver checks this, too; here the entry of the field `name` can be named."""
    if ids and (min(ids) < 0 or max(ids) >= vocab_size):
        at = next(i for i, token_id in enumerate(ids) if not 0 <= token_id < vocab_size)
        raise invalid(f"{name}[{at}] must be a token id of this model: 0 to {vocab_size - 1}.", f"{name}[{at}]")
