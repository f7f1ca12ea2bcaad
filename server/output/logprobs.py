"""Token logprobs in the two shapes of the OpenAI API, aligned with the text that the client gets."""

import codecs
from array import array
from collections import deque
from collections.abc import Iterable, Iterator
from itertools import chain
from typing import Any, Protocol

import msgspec

from engine.outputs import CompletionOutput, FinishReason, TokenLogprobs
from engine.sampling_params import MIN_LOGPROB
from engine.text.tokenizer import Tokenizer

PORTION = 256  # tokens, each with its alternatives, that are encoded at a time
COMPLETION_LISTS = ("tokens", "token_logprobs", "top_logprobs", "text_offset")

Entry = tuple[int, TokenLogprobs]  # (offset of the token's text, in characters of the returned text; the token)


class PackedEntries:
    """Entries in arrays, 8 bytes per number. As objects, a million logprobs would occupy a quarter of a gigabyte, in
    pieces too small to be returned to the system."""

    def __init__(self) -> None:
        self._starts, self._token_ids, self._logprobs = array("q"), array("q"), array("d")
        self._top_ids, self._top_logprobs = array("q"), array("d")
        self._top_ends = array("q")  # end of each entry's alternatives in the two arrays above

    def extend(self, entries: Iterable[Entry]) -> None:
        for start, token in entries:
            self._starts.append(start)
            self._token_ids.append(token.token_id)
            self._logprobs.append(token.logprob)
            for token_id, logprob in token.top:
                self._top_ids.append(token_id)
                self._top_logprobs.append(logprob)
            self._top_ends.append(len(self._top_ids))

    def __len__(self) -> int:
        return len(self._starts)

    def portions(self) -> Iterator[list[Entry]]:
        """The entries, PORTION at a time."""
        for start in range(0, len(self), PORTION):
            yield [self._entry(i) for i in range(start, min(start + PORTION, len(self)))]

    def _entry(self, i: int) -> Entry:
        top = slice(self._top_ends[i - 1] if i else 0, self._top_ends[i])
        ranked = zip(self._top_ids[top], self._top_logprobs[top], strict=True)
        return self._starts[i], TokenLogprobs(self._token_ids[i], self._logprobs[i], tuple(ranked))


class TokenNames(Protocol):
    """The part of a tokenizer that logprobs need."""

    def token_text(self, token_id: int) -> str: ...
    def token_bytes(self, token_id: int) -> bytes: ...


class TokenIds:
    """`return_tokens_as_token_ids`: "token_id:" and the id in place of the text, which two tokens may share."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.token_bytes = tokenizer.token_bytes

    def token_text(self, token_id: int) -> str:
        return f"token_id:{token_id}"


def token_names(tokenizer: Tokenizer, as_token_ids: bool) -> TokenNames:
    return TokenIds(tokenizer) if as_token_ids else tokenizer


class LogprobAligner:
    """Gives each token the offset of its text and holds the token back until that text has been sent.

    Text lags behind tokens (half characters, possible stop strings), and the text of a stop is never sent. So a token
    is released once the text reaches past its start. Tokens that start behind the end of a stopped text (the
    end-of-sequence token, a stop string) are dropped. The bytes of all tokens then equal the bytes of the text, except
    for a last token that a stop string cuts in two. With `keep_all` (for echo, whose entries clients count) these
    tokens are not dropped: they come last, at the end of the text.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        skip_special_tokens: bool,
        start: int = 0,
        *,
        keep_all: bool = False,
        visible: tuple[int, ...] = (),
    ) -> None:
        """`start`: characters before the text of the tokens; `visible`: SamplingParams.visible_token_ids."""
        self._tokenizer = tokenizer
        self._hidden = tokenizer.hidden_token_ids(skip_special_tokens, visible)
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._position = start  # end of the text of all tokens
        self._sent = start  # end of the text that the client has
        self._held: deque[Entry] = deque()
        self._keep_all = keep_all

    def align(self, output: CompletionOutput) -> list[Entry]:
        """The tokens to report beside `output.text`."""
        for token in output.logprobs or ():
            self._held.append((self._position, token))
            if token.token_id not in self._hidden:
                self._position += len(self._decoder.decode(self._tokenizer.token_bytes(token.token_id)))
        self._sent += len(output.text)
        ended = output.finish_reason is not None
        everything = ended and (self._keep_all or output.finish_reason is not FinishReason.STOP)
        entries: list[Entry] = []
        while self._held and (everything or self._held[0][0] < self._sent):
            offset, token = self._held.popleft()
            entries.append((min(offset, self._sent), token))
        return entries


def completion_logprobs(entries: list[Entry], tokenizer: TokenNames) -> dict[str, Any]:
    """The parallel lists of /v1/completions. The chosen token is always among its `top_logprobs`."""
    return {
        "tokens": [tokenizer.token_text(token.token_id) for _, token in entries],
        "token_logprobs": [finite(token.logprob) for _, token in entries],
        "top_logprobs": [_top_by_text(token, tokenizer) for _, token in entries],
        "text_offset": [offset for offset, _ in entries],
    }


def encoded_completion_logprobs(
    echoed: dict[str, list[Any]] | None, entries: PackedEntries, tokenizer: TokenNames
) -> msgspec.Raw:
    """The JSON of `completion_logprobs`, made a portion at a time; `echoed`: the lists of the prompt, which come
    first."""
    generated = (completion_logprobs(part, tokenizer) for part in entries.portions())
    encoded: dict[str, list[bytes]] = {name: [] for name in COMPLETION_LISTS}
    for portion in chain([echoed] if echoed else [], generated):
        for name, values in portion.items():
            encoded[name].append(msgspec.json.encode(values)[1:-1])
    lists = (b'"%b":[%b]' % (name.encode(), b",".join(values)) for name, values in encoded.items())
    return msgspec.Raw(b"{%b}" % b",".join(lists))


def _top_by_text(token: TokenLogprobs, tokenizer: TokenNames) -> dict[str, float]:
    """{text: logprob}, most likely first. If two ids have one text, the likelier id counts."""
    top: dict[str, float] = {}
    for token_id, logprob in (*token.top, (token.token_id, token.logprob)):
        text = tokenizer.token_text(token_id)
        top[text] = max(top.get(text, MIN_LOGPROB), finite(logprob))
    return top


def chat_logprobs(entries: list[Entry], tokenizer: TokenNames) -> dict[str, Any]:
    """The list of /v1/chat/completions."""
    content = [
        _with_bytes(token.token_id, token.logprob, tokenizer)
        | {"top_logprobs": [_with_bytes(token_id, logprob, tokenizer) for token_id, logprob in token.top]}
        for _, token in entries
    ]
    return {"content": content, "refusal": None}


def encoded_chat_logprobs(entries: PackedEntries, tokenizer: TokenNames) -> msgspec.Raw:
    """The JSON of `chat_logprobs`, made a portion at a time: as objects, a million logprobs would occupy half a
    gigabyte."""
    parts = (msgspec.json.encode(chat_logprobs(part, tokenizer)["content"])[1:-1] for part in entries.portions())
    return msgspec.Raw(b'{"content":[%b],"refusal":null}' % b",".join(parts))


def _with_bytes(token_id: int, logprob: float, tokenizer: TokenNames) -> dict[str, Any]:
    raw = list(tokenizer.token_bytes(token_id))
    return {"token": tokenizer.token_text(token_id), "logprob": finite(logprob), "bytes": raw}


def finite(logprob: float) -> float:
    """`logprob`, or LOWEST where it is -inf."""
    return max(logprob, MIN_LOGPROB)
