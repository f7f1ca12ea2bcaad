"""AnswerForm: how the answer to one chat request is held to a form, and how it is read."""

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from engine.driver import Driver
from engine.errors import InvalidRequestError
from engine.sampling_params import SamplingParams
from engine.structured_output import StructuredOutput
from engine.text.tokenizer import Tokenizer
from engine.thinking import BEGIN, END, FIELD, ThinkingTags
from server.context import Served
from server.errors import invalid
from server.intake.structured_output import prepare, structured_output_field
from server.protocol import ChatCompletionRequest
from server.protocol.tools import CustomTool, LarkFunction, Tool
from server.tools.call_reader import CallReader
from server.tools.calls.call_body import SchemaError
from server.tools.custom_input import InputEvents
from server.tools.formats import ToolFormat, find_tool_use
from server.tools.grammar import CallGrammar
from server.tools.message_reader import MessageReader
from server.tools.reasoning import (
    ReasoningSplitter,
    after_thinking,
    goes_on_thinking,
    has_thought,
    rules_before_main,
    thinks,
)


@dataclass(frozen=True)
class AnswerForm:
    """`tool_format`: of the calls, None where no tool may be called; `only_calls`: whether there is no other text;
    `grammar`: what the whole text must be; `opened`: whether the answer begins inside the thinking, None where it is
    not told from the rest; `tags`: how it is marked in tokens; `thinking_budget`: the most tokens that it may have."""

    tool_format: ToolFormat | None = None
    tools: Sequence[Tool | CustomTool] = ()
    grammar: StructuredOutput | None = None
    opened: bool | None = None
    tags: ThinkingTags | None = None
    thinking_budget: int | None = None
    visible_token_ids: tuple[int, ...] = ()
    hidden: Sequence[str] = field(default=())
    only_calls: bool = False

    @property
    def splits_reasoning(self) -> bool:
        return self.opened is not None

    def reader(self) -> MessageReader:
        """For one sample."""
        splitter = None if self.opened is None else ReasoningSplitter(self.opened, self.tags)
        if self.tool_format is None:
            return MessageReader(splitter, None)
        schemas = {tool.function.name: tool.function.schema for tool in self.tools}
        certain = self.grammar is not None
        calls = CallReader(self.tool_format, schemas, certain, self.hidden, self.only_calls)
        bare = self.tool_format.style.bare_strings
        customs = {
            tool.function.name: bare and isinstance(tool.function, LarkFunction)
            for tool in self.tools
            if isinstance(tool, CustomTool)
        }
        return MessageReader(splitter, calls, InputEvents(customs) if customs else None)

    def apply(self, params: SamplingParams) -> SamplingParams:
        output = self.grammar or params.structured_output
        return msgspec.structs.replace(
            params,
            structured_output=output,
            visible_token_ids=self.visible_token_ids,
            thinking_token_budget=self.thinking_budget,
            thinking_opened=bool(self.opened),
        )


def find_answer_form(served: Served, request: ChatCompletionRequest, prompt_ids: list[int]) -> AnswerForm | None:
    """None where the answer is text and nothing else. Raises InvalidRequestError for what cannot be combined."""
    tokenizer = served.driver.tokenizer
    template = tokenizer.template()
    tools = request.offered_tools
    thinking = splits_thinking(served)
    check_thinking_budget(request, thinking)
    if not tools and not thinking:
        return None
    opened = None
    if thinking:
        goes_on = request.continue_final_message and goes_on_thinking(request.messages[-1].content or "")
        opened = goes_on or tokenizer.opens_thinking(prompt_ids)
    at_once = opened is None or has_thought(tokenizer, prompt_ids)
    before = ["start: main"] if at_once else rules_before_main(tokenizer, bool(opened))
    form = find_tool_use(template, tokenizer, served.config.tool_call_format).form if tools else None
    if form is not None:
        grammar = _named_call_grammar(request, form, tokenizer, before)
    else:
        output = request.structured_output
        grammar = None if output is None or opened is None else after_thinking(output, before)
    markers = [*([] if form is None else form.markers), *([BEGIN, END] if thinking else [])]
    special = {marker: token_id for marker in markers if (token_id := _special_id(tokenizer, marker)) is not None}
    return AnswerForm(
        form,
        _callable(request),
        grammar,
        opened,
        tokenizer.thinking_tags if thinking else None,
        request.thinking_budget,
        tuple(special.values()),
        tuple(special) if request.skip_special_tokens else (),
        form is not None and request.choice.mode == "required",
    )


def splits_thinking(served: Served) -> bool:
    """Whether what the model thinks is told from what it says: only then can it be limited."""
    tokenizer = served.driver.tokenizer
    return served.config.reasoning_split and thinks(tokenizer.template(), tokenizer)


def check_thinking_budget(request: ChatCompletionRequest, thinking: bool) -> None:
    """Raise InvalidRequestError for a limit on the thinking that cannot be kept here."""
    if request.thinking_budget is None:
        return
    name = "reasoning.max_tokens" if request.thinking_token_budget is None else FIELD
    if not thinking:
        message = (
            f"{name}: this server tells no thinking from what this model says, so it cannot limit it: leave it out."
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
    """As `_call_grammar`; errors name the tool that is wrong."""
    try:
        return _call_grammar(request, form, tokenizer, before)
    except SchemaError as error:
        names = [tool.function.name for tool in request.tools]
        param = f"tools[{names.index(error.function)}].function.parameters{'.' * bool(error.path)}{error.path}"
        raise invalid(f"{param}: {error}.", param) from None


def _call_grammar(
    request: ChatCompletionRequest, form: ToolFormat, tokenizer: Tokenizer, before: Sequence[str]
) -> StructuredOutput | None:
    """None where the model is free: with "auto", unless a tool is strict, one call at most may be made, or text that
    is no call must be JSON."""
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


async def prepare_answer(driver: Driver, request: ChatCompletionRequest, form: AnswerForm | None, tenant: str) -> None:
    """Compile what the text must be; errors name response_format, or the tool that is wrong."""
    asked, asked_by = request.structured_output, structured_output_field(request)
    if form is None or form.grammar is None:
        return await prepare(driver, asked, asked_by, tenant)
    if asked is not None:
        await _check(driver, asked, f"{asked_by}", tenant)
    try:
        await prepare(driver, form.grammar, "tools" if form.tool_format else asked_by, tenant)
    except InvalidRequestError:
        for i, tool in enumerate(request.tools):
            output, path = tool.form
            await _check(driver, output, f"tools[{i}].{path}", tenant)
        raise


async def _check(driver: Driver, output: StructuredOutput, param: str, tenant: str) -> None:
    try:
        await driver.grammars.checker.check(output, tenant)
    except InvalidRequestError as error:
        raise invalid(f"{param}: {error}", param) from None
