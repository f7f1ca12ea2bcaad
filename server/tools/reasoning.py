"""What a model thinks before it answers, between <think> and </think>, told from the answer."""

import json
from collections.abc import Sequence

from engine.structured_output import StructuredOutput
from engine.text.chat_template import ChatTemplate
from engine.text.tokenizer import Tokenizer
from engine.thinking import BEGIN, END, ThinkingScan, ThinkingTags
from server.tools.calls.call_body import held_back
from server.tools.calls.json_object import SPACE
from server.tools.calls.lark import ANY_TEXT, json_rule, marker_rule, regex, up_to

GAP = r"/[ \t\r\n]{1,8}/"  # between the thinking and the answer


def thinks(template: ChatTemplate, tokenizer: Tokenizer) -> bool:
    """Whether the model was made to think: its template speaks of it, or it has a token for it."""
    return END in template.source or tokenizer.added_token_id(END) is not None


def has_thought(tokenizer: Tokenizer, prompt_ids: list[int]) -> bool:
    """Whether the prompt ends with </think>: the thinking is over, or is not wanted."""
    return tokenizer.end_of(prompt_ids).endswith(END)


def goes_on_thinking(text: str) -> bool:
    """Whether an answer that begins with `text` is still inside."""
    return text.rfind(BEGIN) > text.rfind(END)


class ReasoningSplitter:
    """Takes text in any pieces. White space next to the markers belongs to neither side."""

    def __init__(self, inside: bool, tags: ThinkingTags | None) -> None:
        """`inside`: the prompt has opened the thinking. Else it may begin with the first text, and nowhere later.
        Without `tags` no tokens are counted."""
        self._state = "inside" if inside else "start"
        self._text = ""
        self._stripping = inside  # whether white space at the start is dropped
        self._scan = None if tags is None else ThinkingScan(tags, inside)

    @property
    def done(self) -> bool:
        """Nothing is held back, and all that comes is content."""
        return self._state == "outside" and not self._stripping and not self._text

    @property
    def num_tokens(self) -> int:
        """Thinking tokens so far, without those of the tags."""
        return 0 if self._scan is None else self._scan.num_tokens

    def count(self, token_ids: tuple[int, ...]) -> None:
        """The tokens of the text that is fed next."""
        if self._scan is not None and not self._scan.over:
            self._scan.feed(token_ids)

    def feed(self, text: str) -> tuple[str, str]:
        """(what is thinking, what is content) of what is known now."""
        self._text += text
        if self._state == "start":
            self._begin()
        thought = self._take_thought() if self._state == "inside" else ""
        return thought, self._take_content() if self._state == "outside" else ""

    def finish(self) -> tuple[str, str]:
        """No more text comes."""
        text, self._text = self._text, ""
        return ("", text) if self._state != "inside" else (text.rstrip(SPACE), "")

    def _begin(self) -> None:
        text = self._text.lstrip(SPACE)
        if text.startswith(BEGIN):
            self._text, self._state, self._stripping = text[len(BEGIN) :], "inside", True
        elif not BEGIN.startswith(text):
            self._state = "outside"

    def _take_thought(self) -> str:
        text = self._text.lstrip(SPACE) if self._stripping else self._text
        at = text.find(END)
        if at >= 0:
            self._text, self._state, self._stripping = text[at + len(END) :], "outside", True
            return text[:at].rstrip(SPACE)
        known = len(text[: len(text) - held_back(text, END)].rstrip(SPACE))
        self._text = text[known:]
        self._stripping = self._stripping and not known
        return text[:known]

    def _take_content(self) -> str:
        text, self._text = self._text, ""
        if self._stripping:
            text = text.lstrip(SPACE)
            self._stripping = not text
        return text


def rules_before_main(tokenizer: Tokenizer, opened: bool) -> list[str]:
    """Lark rules with a start that ends in `main`. `opened`: the prompt has begun the thinking; else it may begin."""
    end = marker_rule(END, tokenizer)
    thought = f"thought: {'FREE_TEXT? ' + end}" if end.startswith("<[") else f"thought[lazy]: {up_to(END)}"
    begin = "start: thought GAP? main" if opened else f"start: ({marker_rule(BEGIN, tokenizer)} thought GAP?)? main"
    return [begin, thought, f"FREE_TEXT: {ANY_TEXT}", f"GAP: {GAP}"]


def after_thinking(output: StructuredOutput, before: Sequence[str]) -> StructuredOutput:
    """The same form, behind the thinking. A Lark grammar has a start of its own and is left as it is: it holds from
    the first token on."""
    if output.kind == "grammar":
        return output
    text = "\n".join([*before, f"main: {_main(output)}"]) + "\n"
    return StructuredOutput("grammar", text, json_values=output.holds_json)


def _main(output: StructuredOutput) -> str:
    if output.kind == "regex":
        return f"/{regex(output.text)}/"
    if output.kind == "choice":
        return " | ".join(json.dumps(choice, ensure_ascii=False) for choice in json.loads(output.text))
    schema = json.loads(output.text) if output.kind == "json_schema" else {"type": "object"}
    return json_rule(schema if isinstance(schema, dict) else {}, strict=not output.lenient)
