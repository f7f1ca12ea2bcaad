"""CallGrammar: the grammar of a model's calls of given tools, in llguidance's Lark."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from engine.structured_output import StructuredOutput
from engine.text.tokenizer import Tokenizer
from server.protocol.tools import CustomTool, Tool
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
        text = NOT_A_CALL if self.form.bare else ANY_TEXT
        bare = " | calls" if self.form.bare else ""
        if self._is_token(self.form.begin):
            return self._grammar([f"main: TEXT? marked?{bare}", f"TEXT: {text}"])
        lazy = f"before[lazy]: {up_to(self.form.begin)}"
        return self._grammar([f"main: TEXT | before rest{bare}", lazy, f"TEXT: {text}"])

    def or_json(self, schema: dict[str, Any], strict: bool) -> StructuredOutput:
        """A grammar of either calls or JSON that obeys `schema`."""
        return self._grammar(["main: calls | content", f"content: {json_rule(schema, strict)}"])

    def _grammar(self, rules: list[str]) -> StructuredOutput:
        text = "\n".join([*self.before, *rules, *self._calls(), *self._objects()]) + "\n"
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
