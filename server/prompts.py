"""From a request to the token ids of its prompt: the chat template, truncation, and bans that need the tokenizer."""

from collections.abc import Iterator, Mapping
from typing import Any

from engine.bad_words import resolve_bans
from engine.chat_template import ChatTemplate
from engine.driver import Driver
from engine.errors import ContextLengthError, InvalidRequestError, PromptSize
from engine.sampling_params import SamplingParams
from engine.tokenizer import Tokenizer
from server.config import ServerConfig
from server.errors import invalid
from server.generation import check_length
from server.protocol import ChatCompletionRequest, GenerationRequest
from server.served import Served
from server.tools.formats import ToolUse, find_tool_use
from server.tools.rendering import Rendered, mended, with_tools

MAX_TRUNCATED_CHARS = 1 << 22  # of a text that is cut to fit: all of it is encoded first


def check_text_length(
    driver: Driver, request: GenerationRequest, num_chars: int, param: str, will_be_cut: bool = False
) -> None:
    """Refuse what cannot fit before any work is done for it; what will be cut may be longer."""
    if request.truncate_prompt_tokens is None and not will_be_cut:
        check_length(driver, num_chars, param)
    elif num_chars > MAX_TRUNCATED_CHARS:
        message = f"The prompt has {num_chars} characters; to be truncated it may have {MAX_TRUNCATED_CHARS}."
        context = driver.model.max_model_len
        at_least = -(-num_chars // driver.tokenizer.max_chars_per_token)
        raise ContextLengthError(message, param, PromptSize(at_least, context - 1, context))


async def tokenize_chat(served: Served, request: ChatCompletionRequest, will_be_cut: bool = False) -> list[int]:
    """The prompt of a conversation: what the chat template makes of it, as token ids. One that `will_be_cut` may be
    longer than the context."""
    driver = served.driver
    num_chars = sum(message.num_chars for message in request.messages)
    check_text_length(driver, request, num_chars, "messages", will_be_cut)
    return await driver.tokenizer.run(_tokenize_chat, driver.tokenizer, request, served.config)


def _tokenize_chat(tokenizer: Tokenizer, request: ChatCompletionRequest, config: ServerConfig) -> list[int]:
    template = tokenizer.template()
    own = template_variables(request, template.variables)
    refused: InvalidRequestError | None = None
    for messages, variables in _renditions(template, tokenizer, request, config):
        try:
            return tokenizer.chat_prompt(
                messages,
                add_generation_prompt=request.adds_generation_prompt,
                continue_final_message=request.continue_final_message,
                add_special_tokens=request.add_special_tokens,
                special_tokens_in_content=config.special_tokens_in_content,
                **{**own, **variables},
            ).token_ids
        except InvalidRequestError as error:
            refused = refused or error
    assert refused is not None
    raise refused


def _renditions(
    template: ChatTemplate, tokenizer: Tokenizer, request: ChatCompletionRequest, config: ServerConfig
) -> Iterator[Rendered]:
    """Messages and variables of the template: the conversation as it is, and where calls and answers do not fit each
    other, or turns are empty, in forms for a template that refuses that: mended, and last without its own tools."""
    has_developer = "developer" in template.source
    if not request.has_tools:
        yield [message.for_template(has_developer) for message in request.messages], {}
        history = mended(request.messages)
        if history != request.messages:
            yield [message.for_template(has_developer) for message in history], {}
        return
    use = find_tool_use(template, tokenizer, config.tool_call_format)
    tools = request.offered_tools
    yield with_tools(template, use, request.messages, tools, has_developer)
    history = mended(request.messages)
    if history != request.messages:
        yield with_tools(template, use, history, tools, has_developer)
        yield with_tools(template, ToolUse(use.form, in_template=False), history, tools, has_developer)


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


def truncate(
    served: Served, request: GenerationRequest, ids: list[int], max_tokens: int | None, num_kept: int = 0
) -> tuple[list[int], int]:
    """(what truncate_prompt_tokens leaves of a prompt, how many tokens it cuts). -1 leaves as much as fits beside
    max_tokens. The first `num_kept` tokens, put there by the tokenizer, stay."""
    limit = request.truncate_prompt_tokens
    if limit is None:
        return ids, 0
    context = served.driver.model.max_model_len
    if limit == -1:
        limit = max(1, context - (max_tokens or 1))
    elif limit >= context:
        message = (
            f"truncate_prompt_tokens must be -1 or from 1 to {context - 1}, below the context of {context} tokens."
        )
        raise invalid(message, "truncate_prompt_tokens")
    num_cut = max(0, len(ids) - limit)
    if not num_cut:
        return ids, 0
    if request.truncation_side == "right":
        return ids[:limit], num_cut
    num_kept = min(num_kept, limit)
    return ids[:num_kept] + ids[num_kept + num_cut :], num_cut


async def resolve_params(driver: Driver, params: SamplingParams) -> SamplingParams:
    """With bad words as the Worker takes them; the same object where there is nothing to do."""
    if not params.bad_words and params.allowed_token_ids is None:
        return params
    if params.structured_output is not None:  # together they could leave no token to choose
        name = "bad_words" if params.bad_words else "allowed_token_ids"
        message = f"{name} may not be combined with response_format, structured_outputs or forced calls of tools."
        raise invalid(message, name, "unsupported_value")
    return await driver.tokenizer.run(resolve_bans, params, driver.tokenizer, driver.eos_token_ids)
