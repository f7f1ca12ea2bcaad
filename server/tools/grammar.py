"""CallGrammar: the grammar of a model's calls of given tools, in llguidance's Lark."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from engine.structured_output import MAX_TEXT_BYTES, StructuredOutput
from engine.text.tokenizer import Tokenizer
from server.errors import invalid
from server.protocol import ChatCompletionRequest
from server.protocol.tools import CustomTool, Tool
from server.tools.calls.call_body import SchemaError
from server.tools.calls.lark import ANY_TEXT, json_rule, literal, marker_rule, up_to
from server.tools.formats import ToolFormat

NOT_A_CALL = r"/[^{ \t\r\n](.|\n)*/"  # text of a message that does not start with a bare call


@dataclass(frozen=True)
class CallGrammar:
    """`several`: the model may make more than one call. `tokenizer` tells which markers are single tokens. `before`:
    rules of the text before the answer, with a start rule that ends in `main` (server/tools/reasoning.py)."""

    form: ToolFormat
    tools: Sequence[Tool | CustomTool]
    several: bool
    tokenizer: Tokenizer
    before: Sequence[str] = ("start: main",)

    def required(self) -> StructuredOutput:
        """A grammar of calls without other text."""
        return self._grammar(["main: calls"])

    def after_text(self) -> StructuredOutput:
        """A grammar of any text, followed by calls or not. After the marker of a call the grammar enforces its form."""
        if self.form.before_text:
            opening, closing = (self._marker(marker) for marker in self.form.preamble)
            said = f"{self._marker(self.form.before_text)} TEXT?"
            return self._grammar([f"main: {said} | ({opening} TEXT? {closing})? marked", f"TEXT: {ANY_TEXT}"])
        text = NOT_A_CALL if self.form.bare else ANY_TEXT
        bare = " | calls" if self.form.bare else ""
        if self._is_token(self.form.begin):
            return self._grammar([f"main: TEXT? marked?{bare}", f"TEXT: {text}"])
        lazy = f"before[lazy]: {up_to(self.form.begin)}"
        return self._grammar([f"main: TEXT | before rest{bare}", lazy, f"TEXT: {text}"])

    def or_json(self, schema: dict[str, Any], strict: bool) -> StructuredOutput:
        """A grammar of either calls or JSON that obeys `schema`."""
        before = f"{self._marker(self.form.before_text)} " if self.form.before_text else ""
        return self._grammar(["main: calls | content", f"content: {before}json", f"json: {json_rule(schema, strict)}"])

    def _grammar(self, rules: list[str]) -> StructuredOutput:
        text = "\n".join([*self.before, *rules, *self._calls(), *self._objects()]) + "\n"
        if len(text.encode("utf-8", "surrogatepass")) > MAX_TEXT_BYTES:
            message = f"tools: the grammar of their calls exceeds {MAX_TEXT_BYTES} bytes: offer fewer or simpler tools."
            raise invalid(message, "tools")
        return StructuredOutput("grammar", text, json_values=True, ends=tuple(self.form.style.ends))

    def _calls(self) -> list[str]:
        """`rest` follows the first marker. `marked` starts with that marker; so does `calls` unless calls are bare."""
        form = self.form
        begin = self._marker(form.begin)
        calls = "rest" if form.bare else "marked"
        another = self.several and form.several
        if form.is_list:
            more = f" ({literal(form.separator)} call)*" if another else ""
            rest = f'rest: "[" call{more} "]"'
        elif form.end:
            more = f" ({literal(form.separator)} {begin} one)*" if another else ""
            space = literal(form.space)
            one = f"one: {space} call {space} {self._marker(form.end)}"
            return [f"calls: {calls}", f"marked: {begin} rest", f"rest: one{more}", one]
        else:
            between = [literal(form.separator)] * bool(form.separator) + [begin] * (not form.bare)
            rest = "rest: call" + (f" ({' '.join(between)} call)*" if another else "")
        return [f"calls: {calls}", f"marked: {begin} rest", rest]

    def _objects(self) -> list[str]:
        rules = ["call: " + " | ".join(f"call_{i}" for i in range(len(self.tools)))]
        for i, tool in enumerate(self.tools):
            rules += self.form.style.rules(f"{i}", tool.function, self._marker)
        return rules

    def _is_token(self, marker: str) -> bool:
        return self.tokenizer.added_token_id(marker) is not None

    def _marker(self, marker: str) -> str:
        return marker_rule(marker, self.tokenizer)


def callable_tools(request: ChatCompletionRequest) -> list[Tool | CustomTool]:
    """The tools that the answer may call: all that the request offers, or those that tool_choice names."""
    names = request.choice.names
    return [tool for tool in request.offered_tools if names is None or tool.function.name in names]


def call_grammar(
    request: ChatCompletionRequest, form: ToolFormat, tokenizer: Tokenizer, before: Sequence[str]
) -> StructuredOutput | None:
    """The grammar of an answer that may hold calls; None where the model is free. Errors name the wrong tool.

    The model is free with "auto", unless a tool is strict, at most one call is allowed, or other text must be JSON.
    `before`: see CallGrammar.
    """
    try:
        return _grammar_of_choice(request, form, tokenizer, before)
    except SchemaError as error:
        names = [tool.function.name for tool in request.tools]
        param = f"tools[{names.index(error.function)}].function.parameters{'.' * bool(error.path)}{error.path}"
        raise invalid(f"{param}: {error}.", param) from None


def _grammar_of_choice(
    request: ChatCompletionRequest, form: ToolFormat, tokenizer: Tokenizer, before: Sequence[str]
) -> StructuredOutput | None:
    if request.structured_outputs is not None:
        message = "structured_outputs may not be combined with tools; response_format may."
        raise invalid(message, "structured_outputs", "unsupported_value")
    tools, choice = callable_tools(request), request.choice
    calls = CallGrammar(form, tools, request.parallel_tool_calls and not choice.one, tokenizer, before)
    if choice.mode == "required":
        return calls.required()
    if (output := request.response_format) is not None:
        schema: Any = json.loads(output.text) if output.kind == "json_schema" else {"type": "object"}
        return calls.or_json(schema, strict=not output.lenient)
    if not request.parallel_tool_calls or any(tool.function.strict for tool in tools):
        return calls.after_text()
    return None
