"""OpenAI's harmony format, in which gpt-oss models write: an answer is a sequence of messages on channels.

    <|channel|>analysis<|message|>a thought<|end|>
    <|start|>assistant<|channel|>commentary to=functions.f <|constrain|>json<|message|>{"a": 1}<|call|>
    <|start|>assistant<|channel|>final<|message|>the answer<|return|>

https://github.com/openai/harmony (docs/format.md). The header of a message stands before <|message|>; the prompt ends
with the first header's <|start|>assistant. A header may name its recipient before the channel, too.
"""

import re
from collections.abc import Collection, Iterable
from dataclasses import dataclass

from engine.text.chat_template import ChatTemplate
from engine.text.tokenizer import Tokenizer
from server.tools.calls.call_body import held_back
from server.tools.calls.lark import ANY_TEXT, marker_rule

START, CHANNEL, MESSAGE, END = "<|start|>", "<|channel|>", "<|message|>", "<|end|>"
CONSTRAIN, CALL, RETURN = "<|constrain|>", "<|call|>", "<|return|>"
MARKERS = (START, CHANNEL, MESSAGE, END, CONSTRAIN, CALL, RETURN)
NEEDED = (START, CHANNEL, MESSAGE, END)  # tokens that every harmony vocabulary has

THOUGHT = f"{CHANNEL}analysis{MESSAGE}"
FINAL = f"{CHANNEL}final{MESSAGE}"
PREAMBLE = f"{CHANNEL}commentary{MESSAGE}"  # text for the user before a call
NEXT = f"{END}{START}assistant"
FUNCTION = "functions."  # recipients of calls
CALL_BEGIN = f"{CHANNEL}commentary to={FUNCTION}"
CALL_ARGUMENTS = f" {CONSTRAIN}json{MESSAGE}"

CHANNEL_NAME = re.compile(re.escape(CHANNEL) + r"\s*(\w+)")
RECIPIENT = re.compile(r"to=([^\s<]+)")


def speaks_harmony(template: ChatTemplate, tokenizer: Tokenizer) -> bool:
    """True if the model writes harmony messages: its template and its vocabulary have the markers."""
    return CHANNEL in template.source and all(tokenizer.added_token_id(marker) is not None for marker in NEEDED)


def marker_ids(tokenizer: Tokenizer) -> dict[str, int]:
    """The markers that the vocabulary has, with their token ids."""
    found = {marker: tokenizer.added_token_id(marker) for marker in MARKERS}
    return {marker: token_id for marker, token_id in found.items() if token_id is not None}


def open_header(tokenizer: Tokenizer, prompt_ids: list[int]) -> str:
    """The header with which the answer begins, as far as the prompt has written it.

    "assistant" behind the usual prompt. With <|message|> at its end, the answer continues the text of that message.
    """
    start, message = tokenizer.added_token_id(START), tokenizer.added_token_id(MESSAGE)
    for at in range(len(prompt_ids) - 1, -1, -1):
        if prompt_ids[at] == start:
            tail = prompt_ids[at + 1 :]
            end = tail.index(message) + 1 if message in tail else len(tail)
            return tokenizer.decode(tail[:end], skip_special_tokens=False)
    return ""


def rules_before_main(tokenizer: Tokenizer, header: str, *markers: str) -> list[str]:
    """Lark rules of thoughts and `markers` before `main`, for grammars of an answer behind `header`.

    Behind a header that is complete (the answer continues a message of the prompt), there is only `main`.
    """
    if header.endswith(MESSAGE):
        return ["start: main"]
    thought = f"thought: {marker_rule(THOUGHT, tokenizer)} THOUGHT? {marker_rule(NEXT, tokenizer)}"
    begin = " ".join(marker_rule(marker, tokenizer) for marker in markers)
    return [f"start: thought* {begin} main", thought, f"THOUGHT: {ANY_TEXT}"]


class HarmonySplitter:
    """Splits an answer that arrives in any pieces into reasoning and the rest; a ReasoningSplitter for harmony.

    The rest is the text of final messages and preambles without markers, and each call of a known function in the one
    form CALL_BEGIN name CALL_ARGUMENTS arguments <|call|>. Messages to other recipients count as reasoning: they are
    not for the user. Text without any header is content.
    """

    done = False  # any message may be followed by another

    def __init__(
        self, header: str, functions: Collection[str], counter: "ThoughtCounter | None" = None, splits: bool = True
    ) -> None:
        """`header`: see open_header. `functions`: names of the functions that the model may call. `splits` false:
        thoughts are content."""
        self._functions = functions
        self._counter = counter
        self._splits = splits
        self._text = ""
        self._kind: str | None = None  # the kind of message: "thought", "content" or "call"; None: in its header
        self._is_first = True  # no message has begun yet
        if header.endswith(MESSAGE):
            self._enter(header)

    @property
    def num_tokens(self) -> int:
        """Number of tokens of thoughts so far, without those of headers and markers."""
        return 0 if self._counter is None else self._counter.num_tokens

    def count(self, token_ids: tuple[int, ...]) -> None:
        """Counts the tokens of the text that is fed next."""
        if self._counter is not None:
            self._counter.feed(token_ids)

    def feed(self, text: str) -> list[tuple[str, str]]:
        """(reasoning, content and calls): the text that is certain by now, a pair for each message or part of one."""
        self._text += text
        pairs, goes_on = [], True
        while goes_on:
            is_thought = self._kind == "thought" and self._splits
            said, goes_on = self._read_header() if self._kind is None else self._read_body()
            if said:
                pairs.append((said, "") if is_thought else ("", said))
        return pairs

    def finish(self) -> tuple[str, str]:
        """(reasoning, content and calls): the text held back so far. No more text comes."""
        text, self._text = self._text, ""
        if self._kind == "thought":
            return (text, "") if self._splits else ("", text)
        if self._kind is None and not (self._is_first and all(marker not in text for marker in MARKERS)):
            return "", ""  # a header that was cut off
        return "", text

    # Both return the text before the next message or marker, and whether reading goes on behind it.

    def _read_header(self) -> tuple[str, bool]:
        at = self._text.find(MESSAGE)
        if at < 0:
            return "", False
        header, self._text = self._text[: at + len(MESSAGE)], self._text[at + len(MESSAGE) :]
        return self._enter(header), True

    def _read_body(self) -> tuple[str, bool]:
        found = [(at, marker) for marker in MARKERS if (at := self._text.find(marker)) >= 0]
        if not found:
            known = len(self._text) - max(held_back(self._text, marker) for marker in MARKERS)
            said, self._text = self._text[:known], self._text[known:]
            return said, False
        at, marker = min(found)
        said, self._text = self._text[:at], self._text[at if marker in (START, CHANNEL) else at + len(marker) :]
        if marker in (MESSAGE, CONSTRAIN):  # has no meaning here
            return said, True
        said += CALL if self._kind == "call" else ""
        self._kind = None
        return said, True

    def _enter(self, header: str) -> str:
        """Begin the message behind `header`; returns the text that opens a call."""
        self._is_first = False
        channel, recipient = CHANNEL_NAME.search(header), RECIPIENT.search(header)
        function = recipient[1].removeprefix(FUNCTION) if recipient and recipient[1].startswith(FUNCTION) else None
        if function in self._functions:
            self._kind = "call"
            return f"{CALL_BEGIN}{function}{CALL_ARGUMENTS}"
        thinks = recipient is not None or (channel is not None and channel[1] == "analysis")
        self._kind = "thought" if thinks else "content"
        return ""


@dataclass(frozen=True)
class HarmonyAnswer:
    """The answer of a harmony model to one request. `header`: see open_header. `splits`: thoughts are no content."""

    tokenizer: Tokenizer
    header: str
    splits: bool

    def splitter(self, functions: Collection[str]) -> HarmonySplitter:
        """A splitter for one sample. `functions`: names of the functions that the model may call."""
        return HarmonySplitter(self.header, functions, ThoughtCounter(self.tokenizer, self.header), self.splits)


class ThoughtCounter:
    """Counts the tokens of thoughts in an answer: those between the header of an analysis and the next marker."""

    def __init__(self, tokenizer: Tokenizer, header: str) -> None:
        """`header`: see open_header."""
        ids = marker_ids(tokenizer)
        self._markers = frozenset(ids.values())
        self._channel, self._message = ids[CHANNEL], ids[MESSAGE]
        self._analysis = tokenizer.encode("analysis", add_special_tokens=False)
        self._name: list[int] | None = None  # tokens of the channel's name so far; None: not in a channel's name
        self._is_analysis = header.endswith(THOUGHT)
        self._counts = self._is_analysis
        self.num_tokens = 0

    def feed(self, token_ids: Iterable[int]) -> None:
        """Count the next tokens of the answer."""
        for token_id in token_ids:
            if token_id not in self._markers:
                self.num_tokens += self._counts
                if self._name is not None:
                    self._name.append(token_id)
                continue
            if self._name is not None:
                self._is_analysis = self._name[: len(self._analysis)] == self._analysis
            self._counts = self._is_analysis and token_id == self._message
            self._name = [] if token_id == self._channel else None
            self._is_analysis = self._is_analysis and token_id != self._channel
