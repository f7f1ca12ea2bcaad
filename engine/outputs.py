"""The outputs of a request. Structs, not dataclasses: several are made per stream and step."""

import struct
from array import array
from collections.abc import Iterable, Sequence
from enum import Enum
from typing import Protocol, overload

import msgspec


class FinishReason(str, Enum):
    STOP = "stop"  # end-of-sequence token, stop string or stop token
    LENGTH = "length"  # max_tokens or the end of the context
    ABORT = "abort"
    ERROR = "error"

    def __str__(self) -> str:
        return self.value


def pack_top(top: Iterable[tuple[int, float]]) -> bytes:
    """(token_id, logprob) of k tokens in 8 k bytes: the ids as int32, then the logprobs as float32, in native order. As
    objects they would cost the Driver more than all else of a token."""
    pairs = list(top)
    token_ids, logprobs = (array(kind, [pair[i] for pair in pairs]) for i, kind in enumerate("if"))
    return token_ids.tobytes() + logprobs.tobytes()


def unpack_top(packed: bytes) -> tuple[tuple[int, ...], tuple[float, ...]]:
    """(token ids, logprobs) of what `pack_top` packed."""
    k = len(packed) // 8
    numbers = struct.unpack(f"{k}i{k}f", packed)
    return numbers[:k], numbers[k:]


class TokenLogprobs(msgspec.Struct, frozen=True):
    """Log-probabilities at one position, from the model's own distribution (before temperature and filters).

    `packed_top` holds the most likely tokens and their logprobs (see pack_top). `token_id` and `logprob` always report
    the chosen token, even if it is not among them. `rank` is its place among all tokens: 1 for the most likely; 0 in
    generated tokens.
    """

    token_id: int
    logprob: float
    packed_top: bytes = b""
    rank: int = 0

    @property
    def top(self) -> tuple[tuple[int, float], ...]:
        """(token_id, logprob), most likely first."""
        return tuple(zip(*unpack_top(self.packed_top), strict=True))


class PromptScores(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Logprobs of n prompt tokens from position `start` on, as the Worker sends them: in native arrays.

    `logprobs` float32 [n, 1 + k]: the token's own logprob, given the tokens before it, then the k highest.
    `ranks` int32 [n]: 1 for the most likely token. `top_ids` int32 [n, k].
    """

    seq_id: int
    start: int
    k: int
    logprobs: bytes
    ranks: bytes
    top_ids: bytes

    @property
    def num_tokens(self) -> int:
        return len(self.ranks) // 4


class PromptLogprobs(Sequence[TokenLogprobs | None]):
    """Logprobs of a prompt's tokens, in order; None for the first token, which no token precedes.

    The numbers are kept in arrays, 8 bytes each; an entry is made when it is read. All are there once the request has
    an output.
    """

    def __init__(self, token_ids: list[int]) -> None:
        self.token_ids = token_ids
        self._num_top = 0
        self._logprobs, self._ranks, self._top_ids = array("f"), array("i"), array("i")

    @property
    def num_scored(self) -> int:
        """Leading tokens whose logprobs are known; the first token counts, it never has any."""
        return 1 + len(self._ranks)

    @property
    def complete(self) -> bool:
        return self.num_scored == len(self.token_ids)

    def add(self, scores: PromptScores) -> None:
        """Append the scores of one chunk. Tokens that are scored already keep their scores.

        A chunk is scored twice when its sequence was preempted or its Worker died. Raises ValueError if scores between
        the known ones and these are missing.
        """
        known = self.num_scored - scores.start
        if known < 0:
            raise ValueError(f"logprobs from position {scores.start} on came before those from {self.num_scored} on")
        self._num_top = scores.k
        self._ranks.frombytes(memoryview(scores.ranks)[4 * known :])
        self._logprobs.frombytes(memoryview(scores.logprobs)[4 * known * (1 + scores.k) :])
        self._top_ids.frombytes(memoryview(scores.top_ids)[4 * known * scores.k :])

    def __len__(self) -> int:
        return len(self.token_ids)

    @overload
    def __getitem__(self, position: int) -> TokenLogprobs | None: ...
    @overload
    def __getitem__(self, position: slice) -> list[TokenLogprobs | None]: ...
    def __getitem__(self, position: int | slice) -> TokenLogprobs | list[TokenLogprobs | None] | None:
        if isinstance(position, slice):
            return [self[i] for i in range(*position.indices(len(self)))]
        i = range(len(self))[position] - 1
        if i < 0:
            return None
        k = self._num_top
        logprobs = self._logprobs[i * (1 + k) : (i + 1) * (1 + k)]
        packed_top = self._top_ids[i * k : (i + 1) * k].tobytes() + logprobs[1:].tobytes()
        return TokenLogprobs(self.token_ids[i + 1], logprobs[0], packed_top, self._ranks[i])


class CompletionOutput(msgspec.Struct, frozen=True):
    """One of the n samples of a request.

    From `Driver.generate`, text, token_ids and logprobs hold only what was added since the last output. Text may lag
    behind the ids: a suffix that may become a stop string, or half a UTF-8 character, is held back. From `LLM.generate`
    they hold the whole sample. `stop_reason` is the stop string or stop token id that ended the sample, else None.
    """

    index: int
    text: str
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprobs, ...] | None = None
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None
    embedding: bytes = b""  # fp32 numbers, little-endian: the answer to a request to embed

    @property
    def cumulative_logprob(self) -> float | None:
        """Sum over `logprobs`; None if none were asked for."""
        return None if self.logprobs is None else sum(token.logprob for token in self.logprobs)


class RequestOutput(msgspec.Struct, frozen=True):
    """New parts of the samples of a request. `finished` is set on the last output, when every sample has ended.
    Counts are in tokens and cumulative.

    `prompt_logprobs` comes with the first output of a request that asked for it. With a `Request.prediction`,
    `num_accepted_prediction_tokens` and `num_rejected_prediction_tokens` count its tokens that were computed ahead and
    are in the output, or not.
    """

    request_id: str
    outputs: list[CompletionOutput]
    finished: bool
    num_prompt_tokens: int
    num_generated_tokens: int = 0
    num_cached_tokens: int = 0
    prompt: str | None = None
    prompt_token_ids: list[int] = []
    prompt_logprobs: PromptLogprobs | None = None
    num_accepted_prediction_tokens: int = 0
    num_rejected_prediction_tokens: int = 0


class OutputSink(Protocol):
    """Takes outputs by a call, in place of a reader that waits for them."""

    @property
    def ready(self) -> bool:
        """False while an output would have to wait, say for a client that does not read: the reader then gets it."""

    @property
    def takes_text(self) -> bool:
        """True if `take_text` is to be called where an output has nothing but new text of the only sample."""

    def take(self, output: RequestOutput) -> None: ...
    def take_text(self, text: str) -> None: ...
