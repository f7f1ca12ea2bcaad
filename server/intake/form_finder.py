"""The form of a chat's answer: calls of tools, thinking and structured output, found and compiled in one visit."""

from engine.errors import InvalidRequestError
from engine.sampling_params import SamplingParams
from engine.text.tokenizer import Tokenizer
from engine.thinking import BEGIN, END, FIELD
from server.context import Served
from server.errors import invalid
from server.intake.answer_form import AnswerForm
from server.intake.constraints import check_output, compile_output, resolve_banned_tokens, structured_output_field
from server.protocol import ChatCompletionRequest
from server.tools import harmony
from server.tools.formats import find_tool_use
from server.tools.grammar import call_grammar, callable_tools
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
    tokenizer = served.driver.tokenizer
    if harmony.speaks_harmony(tokenizer.template(), tokenizer):
        return _harmony_form(served, request, prompt_ids)
    if not tools and not thinking:
        return None
    opened = None
    if thinking:
        goes_on = request.continue_final_message and goes_on_thinking(request.messages[-1].content or "")
        opened = goes_on or tokenizer.opens_thinking(prompt_ids)
    at_once = opened is None or has_thought(tokenizer, prompt_ids)
    before = ["start: main"] if at_once else rules_before_main(tokenizer, bool(opened))
    form = find_tool_use(tokenizer.template(), tokenizer, served.config.tool_call_format).form if tools else None
    if form is not None:
        grammar = call_grammar(request, form, tokenizer, before)
    else:
        output = request.structured_output
        grammar = None if output is None or opened is None else after_thinking(output, before)
    markers = [*([] if form is None else form.markers), *([BEGIN, END] if thinking else [])]
    special = {marker: token_id for marker in markers if (token_id := _special_id(tokenizer, marker)) is not None}
    return AnswerForm(
        tool_format=form,
        tools=callable_tools(request),
        grammar=grammar,
        opened=opened,
        tags=tokenizer.thinking_tags if thinking else None,
        thinking_budget=request.thinking_budget,
        visible_token_ids=tuple(special.values()),
        hidden=tuple(special) if request.skip_special_tokens else (),
        only_calls=form is not None and request.choice.mode == "required",
    )


def _harmony_form(served: Served, request: ChatCompletionRequest, prompt_ids: list[int]) -> AnswerForm:
    """The form of an answer in harmony messages, which are read even if the client asks for nothing but text."""
    tokenizer = served.driver.tokenizer
    header = harmony.open_header(tokenizer, prompt_ids)
    form, grammar = None, None
    if request.offered_tools:
        form = find_tool_use(tokenizer.template(), tokenizer, served.config.tool_call_format).form
        grammar = call_grammar(request, form, tokenizer, harmony.rules_before_main(tokenizer, header))
    elif (output := request.structured_output) is not None:
        grammar = after_thinking(output, harmony.rules_before_main(tokenizer, header, harmony.FINAL))
    ids = harmony.marker_ids(tokenizer)
    return AnswerForm(
        tool_format=form,
        tools=callable_tools(request),
        grammar=grammar,
        visible_token_ids=tuple(ids.values()),
        hidden=tuple(ids),
        only_calls=form is not None and request.choice.mode == "required",
        harmony=harmony.HarmonyAnswer(tokenizer, header, served.config.reasoning_split),
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
        message = f"{name}: the server cannot tell this model's thinking from its answer: leave the field out."
        raise invalid(message, name, "unsupported_value")
    output = request.structured_outputs
    if output is not None and output.kind == "grammar":
        message = f"{name} may not be combined with structured_outputs.grammar, which holds from the first token on."
        raise invalid(message, name, "unsupported_value")


def _special_id(tokenizer: Tokenizer, marker: str) -> int | None:
    token_id = tokenizer.added_token_id(marker) if marker else None
    return token_id if token_id in tokenizer.special_token_ids else None


async def _compile(served: Served, request: ChatCompletionRequest, form: AnswerForm | None, tenant: str) -> None:
    """Compile the form of the text; errors name response_format, or the wrong tool."""
    driver, asked, asked_by = served.driver, request.structured_output, structured_output_field(request)
    if form is None or form.grammar is None:
        return await compile_output(driver, asked, asked_by, tenant)
    if asked is not None:
        await check_output(driver, asked, asked_by, tenant)
    try:
        await compile_output(driver, form.grammar, "tools" if form.tool_format else asked_by, tenant)
    except InvalidRequestError:
        for i, tool in enumerate(request.tools):
            output, path = tool.form
            await check_output(driver, output, f"tools[{i}].{path}", tenant)
        raise
