"""SamplingParams: how the tokens of one request are sampled and when its output ends."""

import math
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from typing import Any, Literal

import msgspec

from engine.errors import InvalidRequestError
from engine.structured_output import StructuredOutput

MAX_LOGPROBS = 128
MIN_LOGPROB = -9999.0  # reported in place of -inf, which JSON cannot carry
MAX_BEAM_WIDTH = MAX_LOGPROBS // 2
MAX_LENGTH_PENALTY = 10.0  # absolute value: no length raised to this power overflows
MAX_SEED = 2**64 - 1
MIN_SEED = -(2**63)
MAX_STOP_STRINGS = 64
MAX_STOP_CHARS = 1024  # per stop string: a stream may hold back this much text
MAX_N = 128
MIN_REPETITION_PENALTY = 1e-6  # logits are divided by the penalty and must stay finite in fp32
MAX_BAD_WORDS = 256
MAX_BAD_WORD_CHARS = 256
MAX_BAD_WORD_TOKENS = 32


class Pooling(msgspec.Struct, frozen=True, array_like=True):
    """The hidden state that becomes the embedding: `kind` "last" (last token), "mean" (mean of all tokens, summed in
    fp32) or "cls" (first token).

    The vector is cut to its first `dimensions` numbers if set (Matryoshka: Kusupati et al. 2022), then divided by its
    L2 norm if `normalize` is set.
    """

    kind: str
    normalize: bool = True
    dimensions: int | None = None

    @property
    def needs_every_token(self) -> bool:
        """True if pooling reads the hidden state of every token: then no token may come from the prefix cache."""
        return self.kind != "last"


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """Sampling parameters of one request. The constructor validates all fields; `check_token_ids` checks token ids
    against the model.

    temperature 0 is greedy. top_k 0 (or -1), top_p 1 and min_p 0 each switch their filter off. top_p 0 is greedy, too:
    the smallest possible nucleus holds only the most likely token. `logprobs` is the number of most likely tokens to
    report beside the sampled token (None: no logprobs), `prompt_logprobs` the same for the tokens of the prompt.
    `max_tokens` None means "to the end of the context"; 0 computes the prompt and generates nothing. Penalties are
    those of the OpenAI API (presence, frequency: over generated tokens) and of CTRL (Keskar et al. 2019, section 4.1;
    repetition: over prompt and generated tokens).

    `bad_words` are never generated. Each is a token sequence, or a text that engine/text/bad_words.py replaces by token
    sequences before the request is made. `allowed_token_ids` are the only tokens that may be generated, the
    end-of-sequence token included.

    `thinking_token_budget` is the largest number of tokens between <think> and </think> (engine/thinking.py), tags not
    counted. After that the closing tag is forced, regardless of the other fields.
    """

    n: int = 1
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: dict[int, float] | None = None
    seed: int | None = None
    stop: tuple[str, ...] = ()  # the constructor also accepts a list or a single string
    stop_token_ids: tuple[int, ...] = ()
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    min_tokens: int = 0
    max_tokens: int | None = 16
    logprobs: int | None = None
    skip_special_tokens: bool = True
    bad_words: tuple[str | tuple[int, ...], ...] = ()
    allowed_token_ids: tuple[int, ...] | None = None
    structured_output: StructuredOutput | None = None  # the form that the generated text must have
    prompt_logprobs: int | None = None
    visible_token_ids: tuple[int, ...] = ()  # special tokens that appear in the text despite skip_special_tokens
    pooling: Pooling | None = None  # the result is an embedding; the constructor then sets max_tokens to 0
    thinking_token_budget: int | None = None
    thinking_opened: bool = False  # the prompt ends inside the thinking; only used with thinking_token_budget

    def __post_init__(self) -> None:
        stop = (self.stop,) if isinstance(self.stop, str) else entries("stop", self.stop)
        msgspec.structs.force_setattr(self, "stop", stop)
        msgspec.structs.force_setattr(self, "stop_token_ids", entries("stop_token_ids", self.stop_token_ids))
        if self.pooling is not None:
            msgspec.structs.force_setattr(self, "max_tokens", 0)
        if self.top_k == -1:  # vLLM's spelling of "off"
            msgspec.structs.force_setattr(self, "top_k", 0)
        if not isinstance(self.structured_output, StructuredOutput | None):
            raise InvalidRequestError("structured_output must be a StructuredOutput.", "structured_output")
        require_int("n", self.n, 1, MAX_N)
        require_float("temperature", self.temperature, 0.0, 2.0**16)
        require_float("top_p", self.top_p, 0.0, 1.0)
        require_int("top_k", self.top_k, 0, 2**31 - 1)
        require_float("min_p", self.min_p, 0.0, 1.0)
        require_float("repetition_penalty", self.repetition_penalty, MIN_REPETITION_PENALTY, 100.0)
        require_float("presence_penalty", self.presence_penalty, -2.0, 2.0)
        require_float("frequency_penalty", self.frequency_penalty, -2.0, 2.0)
        if self.seed is not None:
            require_int("seed", self.seed, MIN_SEED, MAX_SEED)
        require_int("min_tokens", self.min_tokens, 0, 2**31 - 1)
        if self.max_tokens is not None:
            require_int("max_tokens", self.max_tokens, 0, 2**31 - 1)
            if self.min_tokens > self.max_tokens:
                raise InvalidRequestError(
                    f"min_tokens ({self.min_tokens}) must not exceed the limit of new tokens ({self.max_tokens}).",
                    "min_tokens",
                )
        if self.thinking_token_budget is not None:
            require_int("thinking_token_budget", self.thinking_token_budget, 0, 2**31 - 1)
        if self.logprobs is not None:
            require_int("logprobs", self.logprobs, 0, MAX_LOGPROBS)
        if self.prompt_logprobs is not None:
            require_int("prompt_logprobs", self.prompt_logprobs, 0, MAX_LOGPROBS)
        if len(stop) > MAX_STOP_STRINGS:
            raise InvalidRequestError(
                f"stop holds {len(stop)} strings; at most {MAX_STOP_STRINGS} are allowed.", "stop"
            )
        for text in stop:
            if not isinstance(text, str) or not text:
                raise InvalidRequestError("stop must hold non-empty strings.", "stop")
            if len(text) > MAX_STOP_CHARS:
                raise InvalidRequestError(f"stop must hold strings of at most {MAX_STOP_CHARS} characters.", "stop")
        if not isinstance(self.logit_bias, dict | None):
            raise InvalidRequestError("logit_bias must map token ids to numbers.", "logit_bias")
        for token_id, bias in (self.logit_bias or {}).items():
            require_float(f"logit_bias[{token_id}]", bias, -100.0, 100.0, param="logit_bias")
        self._check_bans()

    def _check_bans(self) -> None:
        words = entries("bad_words", self.bad_words)
        words = tuple(word if isinstance(word, str) else entries("bad_words", word) for word in words)
        msgspec.structs.force_setattr(self, "bad_words", words)
        if sum(isinstance(word, str) for word in words) > MAX_BAD_WORDS:
            raise InvalidRequestError(f"bad_words may hold at most {MAX_BAD_WORDS} entries.", "bad_words")
        for word in words:
            chars, tokens = (MAX_BAD_WORD_CHARS, "characters"), (MAX_BAD_WORD_TOKENS, "tokens")
            limit, unit = chars if isinstance(word, str) else tokens
            if not 1 <= len(word) <= limit or (isinstance(word, str) and not word.strip()):
                raise InvalidRequestError(
                    f"bad_words must hold words of 1 to {limit} {unit}, not all white space.", "bad_words"
                )
        if self.allowed_token_ids is None:
            return
        # Without repetitions, which would only make the message to the Worker longer.
        msgspec.structs.force_setattr(
            self, "allowed_token_ids", tuple(dict.fromkeys(entries("allowed_token_ids", self.allowed_token_ids)))
        )
        if not self.allowed_token_ids:
            raise InvalidRequestError("allowed_token_ids must hold at least one token id.", "allowed_token_ids")

    def check_token_ids(self, vocab_size: int) -> None:
        """Raise InvalidRequestError unless every token id is below `vocab_size`, the width of the model's logits."""
        named: tuple[tuple[str, Iterable[Any]], ...] = (
            ("logit_bias", self.logit_bias or ()),
            ("stop_token_ids", self.stop_token_ids),
            ("allowed_token_ids", self.allowed_token_ids or ()),
            ("visible_token_ids", self.visible_token_ids),
            ("bad_words", [token_id for word in self.bad_words for token_id in word]),
        )
        for name, ids in named:
            for token_id in ids:
                if type(token_id) is not int or not 0 <= token_id < vocab_size:
                    raise InvalidRequestError(
                        f"{name} names token id {token_id!r}; this model's ids are 0 to {vocab_size - 1}.", name
                    )

    @property
    def ends_at_eos(self) -> bool:
        """True if an end-of-sequence token ends the output. Always so with structured output: the grammar allows the
        token only once the text is complete."""
        return not self.ignore_eos or self.structured_output is not None

    @property
    def generates(self) -> bool:
        """False if only the prompt is computed."""
        return self.max_tokens != 0

    @property
    def greedy(self) -> bool:
        """Below a temperature of 1e-5, softmax(logits / temperature) overflows to one-hot anyway."""
        return self.temperature < 1e-5 or self.top_p == 0.0


def entries(name: str, value: Any) -> tuple[Any, ...]:
    """The entries of a list or another iterable; None has no entries. InvalidRequestError for a text."""
    try:
        if not isinstance(value, str):
            return () if value is None else tuple(value)
    except TypeError:
        pass
    raise InvalidRequestError(f"{name} must be a list.", name)


def require_int(name: str, value: Any, low: int, high: int) -> None:
    if type(value) is not int or not low <= value <= high:
        raise InvalidRequestError(f"{name} must be an integer from {low} to {high}.", name)


def require_float(name: str, value: Any, low: float, high: float, param: str | None = None) -> None:
    number = type(value) in (int, float) and math.isfinite(value)
    if not number or not low <= value <= high:
        raise InvalidRequestError(f"{name} must be a finite number from {low:g} to {high:g}.", param or name)


@dataclass(frozen=True, slots=True, kw_only=True)
class BeamSearchParams:
    """Parameters of a beam search, validated by the constructor. `beam_width` hypotheses are returned, best first.

    `length_penalty` above 0 favours long hypotheses, below 0 short ones. `early_stopping` decides when the search ends.
    True: `beam_width` hypotheses are finished. False: in addition, the best running hypothesis, at its current length,
    scores below all of them. "never": in addition, it cannot exceed them at any length up to max_tokens. The other
    fields are as in SamplingParams.
    """

    beam_width: int
    max_tokens: int | None = 16
    min_tokens: int = 0
    ignore_eos: bool = False
    stop_token_ids: tuple[int, ...] = ()
    length_penalty: float = 1.0
    early_stopping: bool | Literal["never"] = False
    skip_special_tokens: bool = True
    include_stop_str_in_output: bool = False

    def __post_init__(self) -> None:
        require_int("beam_width", self.beam_width, 1, MAX_BEAM_WIDTH)
        require_float("length_penalty", self.length_penalty, -MAX_LENGTH_PENALTY, MAX_LENGTH_PENALTY)
        if not (isinstance(self.early_stopping, bool) or self.early_stopping == "never"):
            raise InvalidRequestError('early_stopping must be true, false or "never".', "early_stopping")
        if self.max_tokens is not None:
            require_int("max_tokens", self.max_tokens, 1, 2**31 - 1)  # a search needs at least one token
        self.sampling_params()  # checks the rest

    def sampling_params(self, num_candidates: int | None = None) -> SamplingParams:
        """The SamplingParams of each hypothesis: the Worker reports its `num_candidates` most likely next tokens."""
        return SamplingParams(
            n=self.beam_width,
            temperature=0.0,
            max_tokens=self.max_tokens,
            min_tokens=self.min_tokens,
            ignore_eos=self.ignore_eos,
            stop_token_ids=self.stop_token_ids,
            logprobs=num_candidates,
            skip_special_tokens=self.skip_special_tokens,
            include_stop_str_in_output=self.include_stop_str_in_output,
        )

    def end_token_ids(self, eos_token_ids: Collection[int]) -> frozenset[int]:
        return frozenset(self.stop_token_ids) | frozenset(() if self.ignore_eos else eos_token_ids)


def check_beams(params: BeamSearchParams, eos_token_ids: Collection[int], vocab_size: int, max_num_seqs: int) -> None:
    """Raise InvalidRequestError if the model or the engine is too small for the search. The error names the width `n`,
    its field in the HTTP API."""
    width, num_end_tokens = params.beam_width, len(params.end_token_ids(eos_token_ids))
    needed = width + num_end_tokens
    if width > max_num_seqs:
        raise InvalidRequestError(
            f"n (the beam width) is {width}; this server runs at most {max_num_seqs} sequences at once. Lower n.", "n"
        )
    if needed > vocab_size:
        raise InvalidRequestError(
            f"n (the beam width) is {width}; besides the {num_end_tokens} tokens that end a hypothesis, this model has "
            f"only {max(0, vocab_size - num_end_tokens)} tokens to continue one. Lower n.",
            "n",
        )
    if needed > MAX_LOGPROBS:
        raise InvalidRequestError(
            f"n (the beam width) is {width} and {num_end_tokens} tokens (end-of-sequence and stop_token_ids) end a "
            f"hypothesis; together they may be at most {MAX_LOGPROBS}. Give fewer stop_token_ids.",
            "stop_token_ids",
        )
