"""Detokenizer: token ids to text, one token at a time. Emits whole characters only, and no text past a stop string."""

import codecs

from engine.sampling_params import SamplingParams
from engine.text.tokenizer import Tokenizer


class StopStringMatcher:
    """Passes text on up to the first stop string.

    Holds back only the longest suffix that may still grow into a stop string. If several stop strings match, the one
    that is complete first wins; among equals, the one that starts first. A client that reads byte by byte would find
    the same one.
    """

    def __init__(self, stops: tuple[str, ...], include_stop: bool) -> None:
        self._stops = stops
        self._include_stop = include_stop
        self._held = ""

    def feed(self, text: str) -> tuple[str, str | None]:
        """Add text: (text that is safe to send, the stop string that was found or None)."""
        text = self._held + text
        found = [(at + len(stop), at, stop) for stop in self._stops if (at := text.find(stop)) >= 0]
        if found:
            end, start, stop = min(found)
            self._held = ""
            return text[: end if self._include_stop else start], stop
        split = len(text) - self._num_held(text)
        self._held = text[split:]
        return text[:split], None

    def flush(self) -> str:
        """Return the held text at the end of the sample."""
        held, self._held = self._held, ""
        return held

    def _num_held(self, text: str) -> int:
        longest = max(len(stop) for stop in self._stops) - 1
        for length in range(min(longest, len(text)), 0, -1):
            if text.endswith(tuple(stop[:length] for stop in self._stops if len(stop) > length)):
                return length
        return 0


class Detokenizer:
    """The text of one sample. Tokens are bytes; a UTF-8 decoder holds an incomplete character until the rest arrives.

    Bytes that never become a character turn into U+FFFD, in `flush` at the latest. The result equals decoding all
    tokens at once (a property test checks this). While `mid_character` is False, `whole_texts` holds the text of every
    token that was seen before and consists of whole characters.
    """

    def __init__(self, tokenizer: Tokenizer, params: SamplingParams) -> None:
        self._tokenizer = tokenizer
        self._hidden = tokenizer.hidden_token_ids(params.skip_special_tokens, params.visible_token_ids)
        self.whole_texts = tokenizer.whole_texts(self._hidden)
        self.mid_character = False
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._matcher = StopStringMatcher(params.stop, params.include_stop_str_in_output) if params.stop else None
        self._min_tokens = params.min_tokens
        self._num_tokens = 0

    def append(self, token_id: int) -> tuple[str, str | None]:
        """Add a token: (new text that may be sent, the stop string that ended the sample or None)."""
        self._num_tokens += 1
        text = self.text(token_id)
        if self._matcher is None or not text:
            return text, None
        if self._num_tokens <= self._min_tokens:  # up to min_tokens, no stop string may end the sample
            return text, None
        return self._matcher.feed(text)

    @property
    def has_stops(self) -> bool:
        return self._matcher is not None

    def text(self, token_id: int) -> str:
        """The text that the next token adds. Without stop strings, callers use this in place of `append`."""
        whole = self.whole_texts.get(token_id)
        if whole is not None and not self.mid_character:
            return whole
        raw = self._bytes(token_id)
        if whole is None and _is_complete_utf8(raw):
            self.whole_texts[token_id] = raw.decode()
        text = self._decoder.decode(raw)
        self.mid_character = bool(self._decoder.getstate()[0])
        return text

    def flush(self) -> str:
        """The rest of the text, at the end of the sample."""
        text = self._decoder.decode(b"", final=True)
        if self._matcher is None:
            return text
        safe, stop = self._matcher.feed(text)
        return safe if stop else safe + self._matcher.flush()

    def _bytes(self, token_id: int) -> bytes:
        return b"" if token_id in self._hidden else self._tokenizer.token_bytes(token_id)


def _is_complete_utf8(raw: bytes) -> bool:
    """True if the bytes are whole characters in UTF-8."""
    try:
        raw.decode()
    except UnicodeDecodeError:
        return False
    return True
