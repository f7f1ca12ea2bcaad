"""Separates reasoning, the text between <think> and </think>, from the answer: in streamed text and in grammars."""

import json
from collections.abc import Sequence

from engine.structured_output import StructuredOutput
from engine.text.chat_template import ChatTemplate
from engine.text.tokenizer import Tokenizer
from engine.thinking import BEGIN, END, ThinkingScan, ThinkingTags
from server.tools.calls.call_body import held_back
from server.tools.calls.json_object import SPACE
from server.tools.calls.lark import ANY_TEXT, json_rule, marker_rule, regex, up_to

GAP = r"/[ \t\r\n]{1,8}/"  # white space between the reasoning and the answer


def thinks(template: ChatTemplate, tokenizer: Tokenizer) -> bool:
    """True if the model was trained to think: its template mentions </think>, or its tokenizer has a token for it."""
    return END in template.source or tokenizer.added_token_id(END) is not None


def has_thought(tokenizer: Tokenizer, prompt_ids: list[int]) -> bool:
    """True if the prompt ends with </think>: the reasoning is over, or is switched off."""
    return tokenizer.end_of(prompt_ids).endswith(END)


def goes_on_thinking(text: str) -> bool:
    """True if an answer that starts with `text` is still inside the reasoning."""
    return text.rfind(BEGIN) > text.rfind(END)


class ReasoningSplitter:
    """Splits text that arrives in any pieces. White space next to the markers belongs to neither side."""

    def __init__(self, inside: bool, tags: ThinkingTags | None) -> None:
        """`inside`: the prompt ends with <think>. Otherwise only the very start of the text may open the reasoning.
        Without `tags` no tokens are counted."""
        self._state = "inside" if inside else "start"
        self._text = ""
        self._stripping = inside  # whether white space at the start is dropped
        self._scan = None if tags is None else ThinkingScan(tags, inside)

    @property
    def done(self) -> bool:
        """True if no text is held back and all further text is content."""
        return self._state == "outside" and not self._stripping and not self._text

    @property
    def num_tokens(self) -> int:
        """Number of thinking tokens so far, without those of the tags."""
        return 0 if self._scan is None else self._scan.num_tokens

    def count(self, token_ids: tuple[int, ...]) -> None:
        """Counts the tokens of the text that is fed next."""
        if self._scan is not None and not self._scan.over:
            self._scan.feed(token_ids)

    def feed(self, text: str) -> list[tuple[str, str]]:
        """(reasoning, content): the text that is certain by now. One pair, since reasoning comes first."""
        self._text += text
        if self._state == "start":
            self._begin()
        thought = self._split_thought() if self._state == "inside" else ""
        return [(thought, self._split_content() if self._state == "outside" else "")]

    def finish(self) -> tuple[str, str]:
        """(reasoning, content): the text held back so far. No more text comes."""
        text, self._text = self._text, ""
        return ("", text) if self._state != "inside" else (text.rstrip(SPACE), "")

    def _begin(self) -> None:
        text = self._text.lstrip(SPACE)
        if text.startswith(BEGIN):
            self._text, self._state, self._stripping = text[len(BEGIN) :], "inside", True
        elif not BEGIN.startswith(text):
            self._state = "outside"

    def _split_thought(self) -> str:
        text = self._text.lstrip(SPACE) if self._stripping else self._text
        at = text.find(END)
        if at >= 0:
            self._text, self._state, self._stripping = text[at + len(END) :], "outside", True
            return text[:at].rstrip(SPACE)
        known = len(text[: len(text) - held_back(text, END)].rstrip(SPACE))
        self._text = text[known:]
        self._stripping = self._stripping and not known
        return text[:known]

    def _split_content(self) -> str:
        text, self._text = self._text, ""
        if self._stripping:
            text = text.lstrip(SPACE)
            self._stripping = not text
        return text


def rules_before_main(tokenizer: Tokenizer, opened: bool) -> list[str]:
    """Lark rules of the reasoning, with a start rule that ends in `main`.

    `opened`: the prompt has opened the reasoning; otherwise the answer may open it.
    """
    end = marker_rule(END, tokenizer)
    thought = f"thought: {'FREE_TEXT? ' + end}" if end.startswith("<[") else f"thought[lazy]: {up_to(END)}"
    begin = "start: thought GAP? main" if opened else f"start: ({marker_rule(BEGIN, tokenizer)} thought GAP?)? main"
    return [begin, thought, f"FREE_TEXT: {ANY_TEXT}", f"GAP: {GAP}"]


def after_thinking(output: StructuredOutput, before: Sequence[str]) -> StructuredOutput:
    """The form `output` after the reasoning (`before`: its rules). A Lark grammar has a start rule of its own and is
    returned unchanged: it applies from the first token on."""
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
