"""What a model thinks before it answers, between <think> and </think>, told from the answer."""

from engine.chat_template import ChatTemplate
from engine.tokenizer import Tokenizer
from server.tools.events import held_back
from server.tools.json_object import SPACE

BEGIN, END = "<think>", "</think>"
TAIL = 16  # tokens at the end of a prompt: where a template begins the thinking


def thinks(template: ChatTemplate, tokenizer: Tokenizer) -> bool:
    """Whether the model was made to think: its template speaks of it, or it has a token for it."""
    return END in template.source or tokenizer.added_token_id(END) is not None


def begins_thinking(tokenizer: Tokenizer, prompt_ids: list[int]) -> bool:
    """Whether the prompt ends with an open <think>, so that the answer begins inside."""
    return _end_of(tokenizer, prompt_ids).endswith(BEGIN)


def has_thought(tokenizer: Tokenizer, prompt_ids: list[int]) -> bool:
    """Whether the prompt ends with </think>: the thinking is over, or is not wanted."""
    return _end_of(tokenizer, prompt_ids).endswith(END)


def goes_on_thinking(text: str) -> bool:
    """Whether an answer that begins with `text` is still inside."""
    return text.rfind(BEGIN) > text.rfind(END)


def _end_of(tokenizer: Tokenizer, prompt_ids: list[int]) -> str:
    return tokenizer.decode(prompt_ids[-TAIL:], skip_special_tokens=False).rstrip()


class ReasoningSplitter:
    """Takes text in any pieces. White space next to the markers belongs to neither side."""

    def __init__(self, inside: bool, end_token_id: int | None) -> None:
        """`inside`: the prompt has opened the thinking. Else it may begin with the first text, and nowhere later."""
        self._state = "inside" if inside else "start"
        self._text = ""
        self._stripping = inside  # whether white space at the start is dropped
        self._end_token_id = end_token_id
        self._counting = True
        self.num_tokens = 0

    @property
    def done(self) -> bool:
        """Nothing is held back, and all that comes is content."""
        return self._state == "outside" and not self._stripping and not self._text

    def count(self, token_ids: tuple[int, ...]) -> None:
        """To be called before the text of these tokens is fed: those up to the end marker are of the thinking.

        Where no single token is that marker, the output that brings its text counts whole.
        """
        if not self._counting:  # it is over
            return
        if self._end_token_id in token_ids:
            self.num_tokens += token_ids.index(self._end_token_id) + 1
            self._counting = False
        elif self._state == "outside":
            self._counting = False
        else:
            self.num_tokens += len(token_ids)

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
        if self._state == "start":
            self.num_tokens = 0
        return ("", text) if self._state != "inside" else (text.rstrip(SPACE), "")

    def _begin(self) -> None:
        text = self._text.lstrip(SPACE)
        if text.startswith(BEGIN):
            self._text, self._state, self._stripping = text[len(BEGIN) :], "inside", True
        elif not BEGIN.startswith(text):
            self._state, self.num_tokens = "outside", 0

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
