"""Token logprobs in the two shapes of the OpenAI API, aligned with the text that the client gets."""

import codecs
from array import array
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from itertools import chain
from typing import Any, Protocol

import msgspec

from engine.outputs import CompletionOutput, FinishReason, TokenLogprobs, unpack_top
from engine.sampling_params import MIN_LOGPROB
from engine.text.tokenizer import Tokenizer

PORTION = 256  # tokens, each with its alternatives, that are encoded at a time
KNOWN_TOKENS = 1 << 14  # tokens with their JSON kept, some 300 bytes each
COMPLETION_LISTS = ("tokens", "token_logprobs", "top_logprobs", "text_offset")

Entry = tuple[int, TokenLogprobs]  # (offset of the token's text, in characters of the returned text; the token)


class PackedEntries:
    """Entries in arrays, 8 bytes per number or pair. As objects, a million logprobs would occupy a quarter of a
    gigabyte, in pieces too small to be returned to the system."""

    def __init__(self) -> None:
        self._starts, self._token_ids, self._logprobs = array("q"), array("q"), array("d")
        self._packed_tops = bytearray()  # the alternatives of all entries
        self._top_ends = array("q")  # the end of each entry in them

    def extend(self, entries: Iterable[Entry]) -> None:
        for start, token in entries:
            self._starts.append(start)
            self._token_ids.append(token.token_id)
            self._logprobs.append(token.logprob)
            self._packed_tops += token.packed_top
            self._top_ends.append(len(self._packed_tops))

    def __len__(self) -> int:
        return len(self._starts)

    def portions(self) -> Iterator[list[Entry]]:
        """The entries, PORTION at a time."""
        for start in range(0, len(self), PORTION):
            yield [self._entry(i) for i in range(start, min(start + PORTION, len(self)))]

    def _entry(self, i: int) -> Entry:
        packed_top = bytes(self._packed_tops[self._top_ends[i - 1] if i else 0 : self._top_ends[i]])
        return self._starts[i], TokenLogprobs(self._token_ids[i], self._logprobs[i], packed_top)


class TokenNames(Protocol):
    """The part of a tokenizer that logprobs need."""

    def token_text(self, token_id: int) -> str: ...
    def token_bytes(self, token_id: int) -> bytes: ...
    def __hash__(self) -> int: ...


@dataclass(frozen=True)
class TokenIds:
    """`return_tokens_as_token_ids`: "token_id:" and the id in place of the text, which two tokens may share."""

    tokenizer: Tokenizer

    def token_text(self, token_id: int) -> str:
        return f"token_id:{token_id}"

    def token_bytes(self, token_id: int) -> bytes:
        return self.tokenizer.token_bytes(token_id)


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


def chat_logprobs(entries: PackedEntries | list[Entry], tokenizer: TokenNames) -> msgspec.Raw:
    """The object of /v1/chat/completions, as JSON."""
    return msgspec.Raw(b"".join([b'{"content":', *_content_pieces(entries, tokenizer), b',"refusal":null}']))


def chat_content(entries: PackedEntries | list[Entry], tokenizer: TokenNames) -> msgspec.Raw:
    """The list of tokens in it, as JSON."""
    return msgspec.Raw(b"".join(_content_pieces(entries, tokenizer)))


def _content_pieces(entries: PackedEntries | list[Entry], tokenizer: TokenNames) -> Iterator[bytes]:
    """Pieces of the JSON, made a portion at a time: as objects, a million logprobs would occupy half a gigabyte."""
    separator = b"["
    for portion in entries.portions() if isinstance(entries, PackedEntries) else [entries]:
        if portion:
            yield separator
            yield _chat_tokens(portion, tokenizer)
            separator = b","
    yield b"[]" if separator == b"[" else b"]"


def _chat_tokens(entries: list[Entry], tokenizer: TokenNames) -> bytes:
    """The JSON of tokens with their alternatives, separated by commas. All numbers are encoded at once, and what stands
    around them is known: dicts would take three times as long."""
    tops = [unpack_top(token.packed_top) for _, token in entries]
    logprobs = [[finite(token.logprob), *values] for (_, token), (_, values) in zip(entries, tops, strict=True)]
    numbers = iter(msgspec.json.encode(list(chain.from_iterable(logprobs)))[1:-1].split(b","))
    tokens = []
    for (_, token), (top_ids, _) in zip(entries, tops, strict=True):
        start, end = _around_logprob(token.token_id, tokenizer)
        pieces = [start, next(numbers), end]
        separator = b',"top_logprobs":['
        for token_id in top_ids:
            start, end = _around_logprob(token_id, tokenizer)
            pieces += separator, start, next(numbers), end
            separator = b"},"
        pieces.append(b"}]}" if top_ids else b',"top_logprobs":[]}')
        tokens.append(b"".join(pieces))
    return b",".join(tokens)


@lru_cache(KNOWN_TOKENS)
def _around_logprob(token_id: int, tokenizer: TokenNames) -> tuple[bytes, bytes]:
    """The JSON of a token before its logprob, and after it without the closing brace."""
    text, raw = tokenizer.token_text(token_id), list(tokenizer.token_bytes(token_id))
    return b'{"token":%b,"logprob":' % msgspec.json.encode(text), b',"bytes":' + msgspec.json.encode(raw)


def finite(logprob: float) -> float:
    """`logprob`, or LOWEST where it is -inf."""
    return max(logprob, MIN_LOGPROB)
