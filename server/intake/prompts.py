"""Token ids of prompts: the chat template, encoding and truncation.

The model's context bounds the work, and all work waits for its tenant's turn. A text with too many characters is
refused unread. A text that may have too many tokens is encoded until it has too many; a text that is to be cut is
encoded as far as it is kept.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from engine.errors import ContextLengthError, InvalidRequestError, PromptSize
from engine.replicas.engine import Engine
from engine.text.chat_template import ChatTemplate, Helper, TemplateLimitError
from engine.text.text_threads import QUICK_CHARS
from engine.text.tokenizer import EncodedPart, RenderedChat, Tokenizer
from server.config import ServerConfig
from server.context import Served
from server.errors import invalid
from server.protocol import ChatCompletionRequest, GenerationRequest, Message
from server.tools.formats import ToolUse, find_tool_use
from server.tools.rendering import SYSTEM, Rendered, mended, shows_first, with_tools

MAX_TRUNCATED_CHARS = 1 << 22  # characters of a text that is cut to fit
MAX_TRUNCATED_IDS = 1 << 18
PORTION_CHARS = QUICK_CHARS  # characters of the texts that are encoded in one turn of a tenant
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


def reading_of(driver: Engine, counts: bool = False, may_be_long: bool = False) -> Reading:
    """The reading of a prompt without truncation. `counts`: prompts that are too long for the model count too."""
    context = driver.model.max_model_len
    # The last tokens before the cut might be fewer together with the text after the cut.
    slack = driver.tokenizer.max_chars_per_token
    num_tokens = max(COUNTED_CONTEXTS * context, MIN_COUNTED) if counts else context
    return Reading(num_tokens + slack, may_be_long=may_be_long)


@dataclass(frozen=True)
class Truncation:
    """`truncate_prompt_tokens` as a number of tokens. The first `num_kept` tokens, which the tokenizer adds, stay."""

    limit: int
    side: str
    num_kept: int = 0

    @property
    def reading(self) -> Reading:
        return Reading(self.limit, self.side == "left", may_be_cut=True, may_be_long=True)

    def cut(self, driver: Engine, part: EncodedPart) -> tuple[list[int], int]:
        """(the tokens that are left, the number of tokens cut off; a lower bound where the text was read in part)."""
        ids = part.token_ids
        num_cut = max(0, len(ids) - self.limit)
        total = num_cut + fewest_tokens(driver, part.num_unread)
        if not num_cut:
            return ids, total
        if self.side == "right":
            return ids[: self.limit], total
        num_kept = min(self.num_kept, self.limit)
        return ids[:num_kept] + ids[num_kept + num_cut :], total


def truncation_of(
    driver: Engine, request: GenerationRequest, max_tokens: int | None, num_kept: int = 0
) -> Truncation | None:
    """The truncation that a request asks for, or None. -1 keeps the tokens that fit beside max_tokens."""
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


def check_text_length(driver: Engine, num_chars: int, param: str, may_be_long: bool) -> None:
    """Refuse a text that cannot fit, before any work for it. A text that will be cut may be longer."""
    if not may_be_long:
        check_length(driver, num_chars, param)
    elif num_chars > MAX_TRUNCATED_CHARS:
        message = f"The prompt has {num_chars} characters; truncation accepts at most {MAX_TRUNCATED_CHARS}."
        raise ContextLengthError(message, param, prompt_size(driver, fewest_tokens(driver, num_chars)))


def check_length(driver: Engine, num_chars: int, param: str) -> None:
    """Refuse a text that cannot fit by its number of characters, before any work for it."""
    at_least = fewest_tokens(driver, num_chars)
    if at_least >= driver.model.max_model_len:
        raise _too_long(driver, f"{num_chars} characters, so at least {at_least} tokens", param, at_least)


def check_num_messages(driver: Engine, num_messages: int, reading: Reading) -> None:
    """Refuse a conversation that cannot fit by its number of messages, before any message is read: a chat template
    writes at least one token for each message, also for one without content."""
    limit = max(driver.model.max_model_len, MAX_TRUNCATED_IDS) if reading.may_be_cut else reading.num_tokens
    if num_messages > limit:
        cut = f"; truncation accepts at most {limit}" if reading.may_be_cut else ", so at least as many tokens"
        raise _too_long(driver, f"{num_messages} messages{cut}", "messages", num_messages)


def check_num_ids(driver: Engine, num_ids: int, param: str, may_be_cut: bool) -> None:
    """Refuse a prompt of token ids that cannot fit, before any id is read."""
    context = driver.model.max_model_len
    limit = max(context, MAX_TRUNCATED_IDS) if may_be_cut else context
    if num_ids > limit:
        cut = f"; truncation accepts at most {limit}" if may_be_cut else ""
        raise _too_long(driver, f"{num_ids} tokens{cut}", param, num_ids)


def check_read(driver: Engine, part: EncodedPart, reading: Reading, param: str) -> None:
    """Refuse a text whose encoded part has too many tokens already."""
    if part.num_unread and not reading.may_be_cut:
        at_least = reading.num_tokens - driver.tokenizer.max_chars_per_token + 1
        raise _too_long(driver, f"at least {at_least} tokens", param, at_least)


def _too_long(driver: Engine, what: str, param: str, at_least: int) -> ContextLengthError:
    """The error for a prompt of `what`, which are `at_least` tokens."""
    message = f"This model's maximum context length is {driver.model.max_model_len} tokens; the prompt has {what}."
    return ContextLengthError(f"{message} Shorten it.", param, prompt_size(driver, at_least))


def fewest_tokens(driver: Engine, num_chars: int) -> int:
    """A lower bound on the tokens of a text with `num_chars` characters."""
    return -(-num_chars // driver.tokenizer.max_chars_per_token)


def prompt_size(driver: Engine, at_least: int) -> PromptSize:
    """The size of a prompt with at least `at_least` tokens, for errors."""
    context = driver.model.max_model_len
    return PromptSize(at_least, context - 1, context)


def check_chat_size(driver: Engine, request: ChatCompletionRequest, may_be_long: bool) -> None:
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
                prompt_size(driver, fewest_tokens(driver, limit)),
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


async def encode_texts(
    driver: Engine,
    texts: Sequence[str],
    names: Sequence[str],
    add_special_tokens: bool,
    tenant: str,
    reading: Reading | None = None,
) -> list[EncodedPart]:
    """The token ids of each text. The tokenizer's threads encode the texts, a portion at a time.

    Errors name the fields in `names`. `reading` says how much of each text is encoded; default: the whole context.
    """
    reading = reading or reading_of(driver)
    for text, name in zip(texts, names, strict=True):
        check_text_length(driver, len(text), name, reading.may_be_long)
    parts: list[EncodedPart] = []
    for portion in portions(texts):
        size = sum(map(len, portion))
        encode = partial(_encode, driver, portion, add_special_tokens, reading)
        parts += await driver.tokenizer.run(tenant, size, encode)
    for part, name in zip(parts, names, strict=True):
        check_read(driver, part, reading, name)
    return parts


def _encode(driver: Engine, texts: Sequence[str], add_special_tokens: bool, reading: Reading) -> list[EncodedPart]:
    encode = driver.tokenizer.encode_part
    return [encode(text, add_special_tokens, reading.num_tokens, reading.from_end) for text in texts]


def portions(texts: Sequence[str]) -> Iterator[list[str]]:
    """The texts in order, in groups of at most PORTION_CHARS characters; a longer text alone."""
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
    """The token ids of a conversation's prompt, which the chat template renders."""
    ids, _ = await tokenize_and_cut_chat(served, request, tenant, None, counts)
    return ids


async def tokenize_long_chat(served: Served, request: ChatCompletionRequest, tenant: str) -> list[int]:
    """The token ids of a conversation that will be edited, so it may be longer than the context."""
    reading = reading_of(served.driver, counts=True, may_be_long=True)
    return (await _encode_chat(served, request, tenant, reading)).token_ids


async def tokenize_and_cut_chat(
    served: Served, request: ChatCompletionRequest, tenant: str, max_tokens: int | None, counts: bool = False
) -> tuple[list[int], int]:
    """(token ids of a conversation's prompt, the number of tokens that truncate_prompt_tokens cut off).

    A process that can be killed renders the prompt. The thread that waits for it encodes a short prompt.
    """
    driver = served.driver
    truncation = truncation_of(driver, request, max_tokens)
    reading = reading_of(driver, counts) if truncation is None else truncation.reading
    part = await _encode_chat(served, request, tenant, reading)
    return (part.token_ids, 0) if truncation is None else truncation.cut(driver, part)


async def tokenize_prediction(served: Served, request: ChatCompletionRequest, tenant: str) -> tuple[int, ...]:
    """The tokens of the predicted output; those beyond the context cannot be generated and are left out."""
    if request.prediction is None or not request.prediction.content:
        return ()
    driver = served.driver
    text = request.prediction.content[: driver.model.max_model_len * driver.tokenizer.max_chars_per_token]
    reading = Reading(driver.model.max_model_len, may_be_cut=True)
    (part,) = await driver.tokenizer.run(tenant, len(text), partial(_encode, driver, [text], False, reading))
    return tuple(part.token_ids[: reading.num_tokens])


async def _encode_chat(served: Served, request: ChatCompletionRequest, tenant: str, reading: Reading) -> EncodedPart:
    driver = served.driver
    tokenizer = driver.tokenizer
    check_num_messages(driver, len(request.messages), reading)
    num_chars = sum(message.num_chars for message in request.messages)
    check_text_length(driver, num_chars, "messages", reading.may_be_long)
    options = (request.add_special_tokens, reading.num_tokens, reading.from_end)
    render = partial(_render, driver=driver, request=request, config=served.config, reading=reading, options=options)
    found = await tokenizer.renderer.run(tenant, render)
    if isinstance(found, RenderedChat):
        found = await tokenizer.run(tenant, len(found.text), tokenizer.encode_chat, found, *options)
    check_read(driver, found, reading, "messages")
    return found


def _render(
    helper: Helper,
    driver: Engine,
    request: ChatCompletionRequest,
    config: ServerConfig,
    reading: Reading,
    options: tuple[bool, int, bool],
) -> RenderedChat | EncodedPart:
    """The token ids of a short prompt; the rendered text of a long prompt, which waits for its turn to be encoded."""
    check_chat_size(driver, request, reading.may_be_long)
    rendered = render_chat(driver.tokenizer, request, config, helper)
    check_text_length(driver, len(rendered.plain_text), "messages", reading.may_be_long)
    return rendered if len(rendered.text) > QUICK_CHARS else driver.tokenizer.encode_chat(rendered, *options)


def render_chat(
    tokenizer: Tokenizer, request: ChatCompletionRequest, config: ServerConfig, helper: Helper | None = None
) -> RenderedChat:
    """The prompt that the chat template renders. `helper` renders it; None: this thread does, without time limit.

    A template that refuses the conversation, or leaves a system message out, gets other forms of it: see
    `_renditions`. Raises InvalidRequestError.
    """
    template = tokenizer.template(helper=helper)
    render = partial(tokenizer.render_chat, helper=helper, special_tokens_in_content=config.special_tokens_in_content)
    own = template_variables(request, template.variables)
    refused: InvalidRequestError | None = None
    shortened: RenderedChat | None = None
    texts, tools = _texts_to_show(request)
    for messages, variables in _renditions(template, tokenizer, request, config):
        try:
            rendered = render(
                messages,
                add_generation_prompt=request.adds_generation_prompt,
                continue_final_message=request.continue_final_message,
                **{**own, **variables},
            )
        except TemplateLimitError:
            raise  # other forms would run into the same limit
        except InvalidRequestError as error:
            refused = refused or error
            continue
        prompt = rendered.plain_text
        if shortened is None and request.messages[0].role in SYSTEM and texts[0] not in prompt:
            texts = texts if _shows(render, texts[0], own) else texts[1:]
        if holds(prompt, texts) and holds(prompt, tools):
            return rendered
        shortened = shortened or rendered
    if shortened is not None:
        return shortened
    assert refused is not None
    raise refused


def _texts_to_show(request: ChatCompletionRequest) -> tuple[list[str], list[str]]:
    """(the text of each system message, the names of the tools if there are system messages behind the first message).

    Some templates skip system messages behind the first message (gpt-oss) or show them in place of the first, with the
    tools that are in it (DeepSeek R1); Mistral Nemo's shows the first one only if the user has the last word.
    """
    is_later = any(message.role in SYSTEM for message in request.messages[1:])
    names = [tool.function.name for tool in request.offered_tools] if is_later else []
    return [message.content.strip() for message in request.messages if message.role in SYSTEM], names


def _shows(render: Callable[..., RenderedChat], system: str, variables: Mapping[str, Any]) -> bool:
    """True if the template shows this system message in a short conversation. Some take words like /no_think out."""
    trial = [{"role": "system", "content": system}, {"role": "user", "content": "trial"}]
    try:
        rendered = render(trial, add_generation_prompt=True, continue_final_message=False, **variables)
    except InvalidRequestError:
        return False
    return system in rendered.plain_text


def holds(prompt: str, texts: list[str]) -> bool:
    """True if the prompt has the texts in their order; a number of the last ones may stand before the others. The time
    is linear in the prompt, however many texts there are."""
    at, is_back = 0, False
    for text in dict.fromkeys(texts):
        found = prompt.find(text, at)
        if found < 0 and not is_back:
            is_back, found = True, prompt.find(text)
        if found < 0:
            return False
        at = found + len(text)
    return True


def _renditions(
    template: ChatTemplate, tokenizer: Tokenizer, request: ChatCompletionRequest, config: ServerConfig
) -> Iterator[Rendered]:
    """(messages, template variables) to try in turn, for templates that refuse some conversations.

    First the conversation unchanged. Then mended histories: calls and answers that fit each other, no empty turns, no
    two turns of one role in a row. Last with tools, calls and answers written into turns of user and assistant.
    """
    # Some templates have the word, but no place for the role (Command R7B).
    has_developer = (
        "developer" in template.source
        and any(message.role == "developer" for message in request.messages)
        and shows_first(template, "developer")
    )
    if not request.has_tools:
        yield [message.for_template(has_developer) for message in request.messages], {}
        for history in _mended_histories(request.messages):
            yield [message.for_template(has_developer) for message in history], {}
        return
    use = find_tool_use(template, tokenizer, config.tool_call_format)
    tools = request.offered_tools
    yield with_tools(template, use, request.messages, tools, has_developer)
    histories = list(_mended_histories(request.messages))
    for history in histories:
        yield with_tools(template, use, history, tools, has_developer)
    for history in histories or [request.messages]:
        as_text = ToolUse(use.form, in_template=False)
        yield with_tools(template, as_text, history, tools, has_developer, alternate=True)


def _mended_histories(messages: list[Message]) -> Iterator[list[Message]]:
    """Histories for a template that refuses the order of the turns, then for a template without system messages."""
    histories = [mended(messages), mended(messages, has_system=False)]
    for i, history in enumerate(histories):
        if history not in [messages, *histories[:i]]:
            yield history


def template_variables(request: ChatCompletionRequest, known: frozenset[str]) -> Mapping[str, Any]:
    """The template variables beside the messages; `known` are the names that the template reads.

    chat_template_kwargs win over the request's own fields. Fields about thinking and verbosity are wishes: a template
    without such a variable ignores the wish. Documents are no wish: a template without documents refuses the request.
    """
    variables = dict(request.chat_template_kwargs)
    for name, value in (("reasoning_effort", request.effort), ("verbosity", request.verbosity)):
        if name in known and value is not None:
            variables.setdefault(name, value)
    says_no_effort = request.effort == "none" and "reasoning_effort" in known
    if request.thinks is not None and "enable_thinking" in known and not says_no_effort:
        variables.setdefault("enable_thinking", request.thinks)  # the name in Qwen3's template and others
    if request.thinks is False and "reasoning_effort" in known and "enable_thinking" not in known:
        variables.setdefault("reasoning_effort", "none")
    if request.documents:
        if "documents" not in known:
            message = "documents are not supported by this model's chat template: put them into a message."
            raise invalid(message, "documents", "unsupported_value")
        variables["documents"] = request.documents
    return variables
