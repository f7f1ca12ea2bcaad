"""Delivery: tokens on their way from the scheduler to the streams of their requests."""

import time
from collections import Counter

from engine.executor.step import SampledToken, StepPlan, StepResult
from engine.memory.sequence import Sequence
from engine.outputs import FinishReason, TokenLogprobs
from engine.requests.stream import RequestStream
from engine.scheduling.beam_group import BeamGroup
from engine.scheduling.beam_search import Hypothesis
from engine.scheduling.scheduler import Scheduler
from engine.telemetry.request_log import RequestReport, StepMeter
from engine.telemetry.request_timings import RequestTimings
from engine.telemetry.stats import EngineStats


class LiveRequest:
    """A request that has not ended. `plain`, `put_plain` and `last_tokens` are at hand for the many plain tokens."""

    __slots__ = ("last_tokens", "num_unfinished", "plain", "put_plain", "stream", "timings")

    def __init__(self, stream: RequestStream, timings: RequestTimings, num_unfinished: int) -> None:
        self.stream = stream
        self.timings = timings
        self.num_unfinished = num_unfinished
        self.plain = stream.plain
        self.put_plain = stream.put_plain
        self.last_tokens = timings.last_tokens

    def report(self, reason: FinishReason | None = None) -> RequestReport:
        """What is known of it now; `reason`: why it has ended."""
        return self.timings.report(self.stream.request.request_id, self.stream.sequences(), reason)


class Delivery:
    """Knows whose sequences are whose: `owners` maps a seq_id to its request and the indices of its samples there."""

    def __init__(self, stats: EngineStats) -> None:
        self.owners: dict[int, tuple[LiveRequest, range]] = {}
        self.meter = StepMeter()
        self._stats = stats

    def planned(self, plan: StepPlan) -> None:
        """A plan is on its way to the Worker: what it computes of prompts is noted with their requests."""
        num_rows = len(plan.decodes) + len(plan.chunks)
        self.meter.count(num_rows)
        for chunk in plan.chunks:
            if not chunk.num_tokens or chunk.seq_id not in self.owners:  # a fork computes none
                continue
            live, _ = self.owners[chunk.seq_id]
            if live.stream.request.beam_search is None or not live.stream.num_generated_tokens:  # else no prompt's
                live.timings.observe_chunk(chunk.num_tokens, num_rows)

    def take(self, result: StepResult, scheduler: Scheduler, *, plain: bool) -> list[LiveRequest]:
        """Let `scheduler` take in a result, and hand its tokens over.

        Returns the requests that got some and are to be woken; with `plain`, those were woken already that need no
        more of the caller than that.
        """
        now = time.monotonic()
        fresh = scheduler.update(result)
        for scores in result.prompt_scores:
            if scores.seq_id in self.owners:
                self.owners[scores.seq_id][0].stream.add_scores(scores)
        if plain:
            fresh = self._deliver_plain(fresh, now)
        touched: dict[LiveRequest, None] = {}
        details = {token.seq_id: token for token in result.detailed}
        for seq, token_id in fresh:
            live, indices = self.owners[seq.seq_id]
            token = details.get(seq.seq_id) or SampledToken(seq.seq_id, token_id)
            self._deliver(live, indices, seq, token, now, scheduler)
            touched[live] = None
        for seq, vector in scheduler.take_vectors(result):
            live, indices = self.owners[seq.seq_id]
            live.stream.put_embedding(vector)
            self._deliver_end(live, indices, seq, now)
            touched[live] = None
        return list(touched)

    def take_search(self, group: BeamGroup, scheduler: Scheduler) -> None:
        """Hand over the hypotheses of a beam search that has ended."""
        live, _ = self.owners[group.slots[0].seq_id]
        for slot, result in zip(group.slots, group.results, strict=True):
            self._deliver_result(live, slot, result, scheduler)

    def _deliver_plain(self, fresh: list[tuple[Sequence, int]], now: float) -> list[tuple[Sequence, int]]:
        """Hand over tokens that are neither the first nor the last of a plain stream, which nearly all are.

        Returns the others. What is counted is counted once for the whole step.
        """
        owners = self.owners
        others, last_times = [], []
        for pair in fresh:
            seq, token_id = pair
            live, _ = owners[seq.seq_id]
            times = live.last_tokens
            if live.plain and seq.finish_reason is None and (last_time := times[0]) is not None:
                live.put_plain(token_id)
                last_times.append(last_time)
                times[0] = now
            else:
                others.append(pair)
        self._stats.generation_tokens.add(len(last_times))
        for last_time, count in Counter(last_times).items():
            self._stats.inter_token_latency.observe(now - last_time, count)
        return others

    def _deliver(
        self, live: LiveRequest, indices: range, seq: Sequence, token: SampledToken, now: float, scheduler: Scheduler
    ) -> None:
        """Turn one new token into text, find stop strings, and hand both to the stream."""
        if not seq.params.generates:
            return self._deliver_end(live, indices, seq, now)
        stream = live.stream
        detokenizer = stream.detokenizer(indices[0])
        ended_by_token = seq.finish_reason is FinishReason.STOP
        text, stop = "", None
        if not ended_by_token or seq.params.include_stop_str_in_output:
            text, stop = detokenizer.append(token.token_id)
        if stop is not None:
            scheduler.finish(seq, FinishReason.STOP, stop)
            seq.finish_reason, seq.stop_reason = FinishReason.STOP, stop  # it wins over a length reached with it
        logprobs = None
        if seq.params.logprobs is not None:
            logprobs = TokenLogprobs(token.token_id, token.logprob, tuple(token.top))
        rest = None if seq.finish_reason is None else "" if stop else detokenizer.flush()
        for index in indices:
            stream.put(index, token.token_id, text, logprobs)
            live.timings.observe_token(index, stream.num_prompt_tokens, now)
            if rest is not None:
                stream.finish(index, rest)
        if rest is not None:
            live.num_unfinished -= len(indices)
            del self.owners[seq.seq_id]

    def _deliver_end(self, live: LiveRequest, indices: range, seq: Sequence, now: float) -> None:
        """The prompt is computed, and nothing follows."""
        live.timings.observe_prompt(live.stream.num_prompt_tokens, now)
        for index in indices:
            live.stream.finish(index, "")
        live.num_unfinished -= len(indices)
        del self.owners[seq.seq_id]

    def _deliver_result(self, live: LiveRequest, slot: Sequence, result: Hypothesis, scheduler: Scheduler) -> None:
        (_, indices), now = self.owners[slot.seq_id], time.monotonic()
        reason, slot.finish_reason = slot.finish_reason, None  # it belongs to the last token
        for number, (token_id, logprob) in enumerate(result.tokens(), start=1):
            if number == result.length:
                slot.finish_reason = reason
            self._deliver(live, indices, slot, SampledToken(slot.seq_id, token_id, logprob), now, scheduler)
