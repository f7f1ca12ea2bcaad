"""LiveRequest: a request that has not ended, with its sequences, its stream and its timings."""

import random
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass

import msgspec

from engine.memory.sequence import Sequence
from engine.outputs import FinishReason
from engine.request import Adapter, Request
from engine.requests.stream import RequestStream
from engine.sampling_params import SamplingParams
from engine.scheduling.beam_group import BeamGroup, begin_search
from engine.telemetry.request_log import RequestReport, StepMeter
from engine.telemetry.request_timings import RequestTimings
from engine.telemetry.stats import EngineStats
from engine.text.detokenizer import Detokenizer
from engine.text.tokenizer import Tokenizer

SEED_STEP = 0x9E3779B97F4A7C15  # between two samples of one seed: they draw apart, the first draws as if it were alone
ADAPTER_TENANT = "\0adapter "  # no key makes such a tenant


class LiveRequest:
    """`sequences` are computed. Samples that are bound to be equal (greedy, or embeddings) share one sequence. The
    sequences of a beam search are the slots of `search`.

    A stream is plain if a token that does not end a sample needs nothing but its text: no stop strings, no logprobs.
    Nearly all tokens are tokens of plain streams, so `plain`, `put_plain` and `last_tokens` are at hand here.
    """

    __slots__ = (
        "last_tokens",
        "num_unfinished",
        "plain",
        "put_plain",
        "request",
        "search",
        "sequences",
        "stream",
        "timings",
    )

    def __init__(
        self,
        request: Request,
        sequences: list[Sequence],
        tokenizer: Tokenizer,
        abort: Callable[[], None],
        stats: EngineStats,
        meter: StepMeter,
    ) -> None:
        """`abort` ends the request when its reader leaves."""
        num_samples = request.params.n
        pairs = [(seq, Detokenizer(tokenizer, request.params)) for seq in sequences]
        self.request = request
        self.sequences = sequences
        self.search: BeamGroup | None = None
        self.num_unfinished = num_samples  # samples
        self.stream = stream = RequestStream(request, pairs * (num_samples // len(sequences)), abort)
        self.timings = RequestTimings(stats, meter, num_samples)
        self.plain = stream.plain
        self.put_plain = stream.put_plain
        self.last_tokens = self.timings.last_tokens

    def begin(self, eos_token_ids: Collection[int]) -> tuple[Sequence, list[Sequence]]:
        """The sequence to schedule, which computes the prompt, and those to fork off it then.

        A beam search forks its hypotheses itself.
        """
        first, *forks = self.sequences
        if self.request.beam_search is None:
            return first, forks
        self.search = begin_search(self.request.beam_search, self.sequences, eos_token_ids)
        return first, []

    def samples_of(self, number: int) -> range:
        """The indices of the samples that sequence `number` computes."""
        return range(number, self.request.params.n, len(self.sequences))

    def report(self, reason: FinishReason | None = None) -> RequestReport:
        """The times and counts so far; `reason` says why the request has ended."""
        return self.timings.report(self.request.request_id, self.stream.sequences(), reason)


@dataclass(frozen=True, slots=True)
class Departure:
    """A request on its way to another replica: the `sequences` that it must compute, of which `head` computes the
    prompt for `forks`, too; the deaths of Workers that are held against it, and the `end` of its time, by the loop's
    clock."""

    live: LiveRequest
    sequences: list[Sequence]
    head: Sequence | None
    forks: list[Sequence]
    strikes: int
    end: float | None


def new_sequences(
    request: Request, max_num_tokens: int, numbers: Iterator[int], adapter: Adapter | None = None
) -> list[Sequence]:
    """The sequences that compute the samples of a request, each of at most `max_num_tokens` tokens with the prompt.

    Without API keys, all requests have the same tenant: then each adapter is a tenant of its own.
    `numbers` gives unique sequence ids, which ascend in order of arrival. The first sequence scores the prompt.
    """
    params = request.params
    alike = (params.greedy or not params.generates) and request.beam_search is None
    tenant = request.tenant or (f"{ADAPTER_TENANT}{request.adapter}" if adapter else "")
    seed = random.getrandbits(64) if params.seed is None else params.seed
    sequences = []
    for index in range(1 if alike else params.n):
        number = next(numbers)
        sequences.append(
            Sequence(
                number,
                request.prompt_token_ids,
                params if index == 0 else _without_scores(params),
                seed=(seed + index * SEED_STEP) % 2**64,
                max_num_tokens=max_num_tokens,
                priority=request.priority,
                arrival=number,
                cache_salt=request.cache_salt,
                tenant=tenant,
                weight=request.weight,
                adapter=adapter,
                prediction=request.prediction,
            )
        )
    return sequences


def _without_scores(params: SamplingParams) -> SamplingParams:
    return params if params.prompt_logprobs is None else msgspec.structs.replace(params, prompt_logprobs=None)
