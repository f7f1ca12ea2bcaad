"""The form of a chat's answer: calls of tools, thinking and structured output, found and compiled in one visit."""

import json
from collections.abc import Sequence
from typing import Any

from engine.errors import InvalidRequestError
from engine.sampling_params import SamplingParams
from engine.structured_output import StructuredOutput
from engine.text.tokenizer import Tokenizer
from engine.thinking import BEGIN, END, FIELD
from server.context import Served
from server.errors import invalid
from server.intake.answer_form import AnswerForm
from server.intake.constraints import check_output, compile_output, resolve_banned_tokens, structured_output_field
from server.protocol import ChatCompletionRequest
from server.protocol.tools import CustomTool, Tool
from server.tools.calls.call_body import SchemaError
from server.tools.formats import ToolFormat, find_tool_use
from server.tools.grammar import CallGrammar
from server.tools.reasoning import after_thinking, goes_on_thinking, has_thought, rules_before_main, thinks


async def prepare_answer_form(
    served: Served, request: ChatCompletionRequest, params: SamplingParams, prompt_ids: list[int], tenant: str
) -> tuple[AnswerForm | None, SamplingParams]:
    """(the form of the answer, the sampling parameters that hold the generated text to it).

    None: the answer is plain text. The grammar is compiled. Raises InvalidRequestError naming the field.
    """
    form = find_answer_form(served, request, prompt_ids)
    params = params if form is None else form.apply(params)
    if params.bad_words or params.allowed_token_ids is not None:
        params = await resolve_banned_tokens(served.driver, params, tenant)
    if params.structured_output is not None:
        await _compile(served, request, form, tenant)
    return form, params


def find_answer_form(served: Served, request: ChatCompletionRequest, prompt_ids: list[int]) -> AnswerForm | None:
    """The form of the answer; None: plain text. Raises InvalidRequestError for fields that cannot be combined."""
    thinking = splits_thinking(served)
    _check_thinking_budget(request, thinking)
    tools = request.offered_tools
    if not tools and not thinking:
        return None
    tokenizer = served.driver.tokenizer
    opened = None
    if thinking:
        goes_on = request.continue_final_message and goes_on_thinking(request.messages[-1].content or "")
        opened = goes_on or tokenizer.opens_thinking(prompt_ids)
    at_once = opened is None or has_thought(tokenizer, prompt_ids)
    before = ["start: main"] if at_once else rules_before_main(tokenizer, bool(opened))
    form = find_tool_use(tokenizer.template(), tokenizer, served.config.tool_call_format).form if tools else None
    if form is not None:
        grammar = _named_call_grammar(request, form, tokenizer, before)
    else:
        output = request.structured_output
        grammar = None if output is None or opened is None else after_thinking(output, before)
    markers = [*([] if form is None else form.markers), *([BEGIN, END] if thinking else [])]
    special = {marker: token_id for marker in markers if (token_id := _special_id(tokenizer, marker)) is not None}
    return AnswerForm(
        tool_format=form,
        tools=_callable(request),
        grammar=grammar,
        opened=opened,
        tags=tokenizer.thinking_tags if thinking else None,
        thinking_budget=request.thinking_budget,
        visible_token_ids=tuple(special.values()),
        hidden=tuple(special) if request.skip_special_tokens else (),
        only_calls=form is not None and request.choice.mode == "required",
    )


def splits_thinking(served: Served) -> bool:
    """True if the server tells the model's thinking from its answer: only then can it limit the thinking."""
    tokenizer = served.driver.tokenizer
    return served.config.reasoning_split and thinks(tokenizer.template(), tokenizer)


def _check_thinking_budget(request: ChatCompletionRequest, thinking: bool) -> None:
    """Raise InvalidRequestError for a limit on the thinking that this server cannot keep."""
    if request.thinking_budget is None:
        return
    name = "reasoning.max_tokens" if request.thinking_token_budget is None else FIELD
    if not thinking:
        message = (
            f"{name}: this server cannot limit the thinking of this model, which it does not tell from the answer."
        )
        raise invalid(message, name, "unsupported_value")
    output = request.structured_outputs
    if output is not None and output.kind == "grammar":
        message = f"{name} may not be combined with structured_outputs.grammar, which holds from the first token on."
        raise invalid(message, name, "unsupported_value")


def _callable(request: ChatCompletionRequest) -> list[Tool | CustomTool]:
    names = request.choice.names
    return [tool for tool in request.offered_tools if names is None or tool.function.name in names]


def _named_call_grammar(
    request: ChatCompletionRequest, form: ToolFormat, tokenizer: Tokenizer, before: Sequence[str]
) -> StructuredOutput | None:
    """The result of `_call_grammar`; errors name the wrong tool."""
    try:
        return _call_grammar(request, form, tokenizer, before)
    except SchemaError as error:
        names = [tool.function.name for tool in request.tools]
        param = f"tools[{names.index(error.function)}].function.parameters{'.' * bool(error.path)}{error.path}"
        raise invalid(f"{param}: {error}.", param) from None


def _call_grammar(
    request: ChatCompletionRequest, form: ToolFormat, tokenizer: Tokenizer, before: Sequence[str]
) -> StructuredOutput | None:
    """The grammar of an answer that may hold calls; None where the model is free.

    The model is free with "auto", unless a tool is strict, at most one call is allowed, or other text must be JSON.
    """
    if request.structured_outputs is not None:
        message = "structured_outputs may not be combined with tools; response_format may."
        raise invalid(message, "structured_outputs", "unsupported_value")
    tools, choice = _callable(request), request.choice
    calls = CallGrammar(form, tools, request.parallel_tool_calls and not choice.one, tokenizer, before)
    if choice.mode == "required":
        return calls.required()
    if (output := request.response_format) is not None:
        schema: Any = json.loads(output.text) if output.kind == "json_schema" else {"type": "object"}
        return calls.or_json(schema, strict=not output.lenient)
    if not request.parallel_tool_calls or any(tool.function.strict for tool in tools):
        return calls.after_text()
    return None


def _special_id(tokenizer: Tokenizer, marker: str) -> int | None:
    token_id = tokenizer.added_token_id(marker) if marker else None
    return token_id if token_id in tokenizer.special_token_ids else None


async def _compile(served: Served, request: ChatCompletionRequest, form: AnswerForm | None, tenant: str) -> None:
    """Compile the form of the text; errors name response_format, or the wrong tool."""
    driver, asked, asked_by = served.driver, request.structured_output, structured_output_field(request)
    if form is None or form.grammar is None:
        return await compile_output(driver, asked, asked_by, tenant)
    if asked is not None:
        await check_output(driver, asked, f"{asked_by}", tenant)
    try:
        await compile_output(driver, form.grammar, "tools" if form.tool_format else asked_by, tenant)
    except InvalidRequestError:
        for i, tool in enumerate(request.tools):
            output, path = tool.form
            await check_output(driver, output, f"tools[{i}].{path}", tenant)
        raise
