"""Delivery: new tokens on their way from the scheduler to the streams of their requests."""

import asyncio
from collections import Counter

from engine.executor.step import SampledToken, StepResult
from engine.memory.sequence import Sequence
from engine.outputs import FinishReason, TokenLogprobs
from engine.requests.live_request import LiveRequest
from engine.requests.stream import RequestStream
from engine.scheduling.beam_search import Hypothesis
from engine.scheduling.scheduler import Scheduler
from engine.telemetry.stats import EngineStats

FreshTokens = list[tuple[Sequence, int]]  # (sequence, token id)
Vectors = list[tuple[Sequence, bytes]]  # (sequence that was embedded, fp32 numbers)


def give_soon(streams: list[RequestStream]) -> None:
    """Give the unread outputs of `streams` at the end of this turn of the event loop: the next plan goes to the Worker
    first. One callback serves all streams of a step; one for each would cost a twentieth of a token."""
    if streams:
        asyncio.get_running_loop().call_soon(_give_all, streams)


def _give_all(streams: list[RequestStream]) -> None:
    for stream in streams:
        stream.give()


class Delivery:
    """`owners` maps the id of each live sequence to its request and to the indices of the samples that it computes.

    The scheduler is told of one thing only: that a sequence ends at a stop string, which shows in the text.
    """

    def __init__(self, scheduler: Scheduler, stats: EngineStats) -> None:
        self.owners: dict[int, tuple[LiveRequest, range]] = {}
        self._scheduler = scheduler
        self._stats = stats

    def deliver(
        self,
        result: StepResult,
        fresh: FreshTokens,
        vectors: Vectors,
        now: float,
        *,
        plain: bool,
    ) -> list[LiveRequest]:
        """Hand the fresh tokens and the vectors of a step to their streams.

        Returns the requests whose readers are to be woken. With `plain`, tokens within plain streams have woken theirs
        already, and their requests are left out.
        """
        for scores in result.prompt_scores:
            if scores.seq_id in self.owners:
                self.owners[scores.seq_id][0].stream.add_scores(scores)
        if plain:
            fresh = self._deliver_plain(fresh, now)
        touched: dict[LiveRequest, None] = {}
        details = {token.seq_id: token for token in result.detailed}
        verified = {tokens[0].seq_id: tokens for tokens in result.verified}
        for seq, token_id in fresh:
            if seq.seq_id in verified:
                if tokens := verified[seq.seq_id]:  # all of them come with the first
                    touched[self._deliver_several(seq, tokens, now)] = None
                    verified[seq.seq_id] = []
                continue
            live, indices = self.owners[seq.seq_id]
            token = details.get(seq.seq_id) or SampledToken(seq.seq_id, token_id)
            self._deliver_token(live, indices, seq, token, now)
            touched[live] = None
        for seq, vector in vectors:
            live, indices = self.owners[seq.seq_id]
            live.stream.put_embedding(vector)
            self._deliver_end(live, indices, seq, now)
            touched[live] = None
        return list(touched)

    def deliver_hypotheses(self, live: LiveRequest, now: float) -> None:
        """Hand over the hypotheses of a beam search that has ended."""
        assert live.search is not None, "the request is a beam search"
        for slot, hypothesis in zip(live.search.slots, live.search.results, strict=True):
            _, indices = self.owners[slot.seq_id]
            self._deliver_hypothesis(live, indices, slot, hypothesis, now)

    def _deliver_plain(self, fresh: FreshTokens, now: float) -> FreshTokens:
        """Hand over the tokens that are neither the first nor the last of a plain stream: nearly all.

        Returns the other tokens. Statistics are updated once for the whole step.
        """
        owners = self.owners
        others, last_times, to_give = [], [], []
        for pair in fresh:
            seq, token_id = pair
            live, indices = owners[seq.seq_id]
            times, index = live.last_tokens, indices.start
            plain = live.plain and seq.finish_reason is None and len(indices) == 1
            if plain and (last_time := times[index]) is not None:
                if live.put_plain(index, token_id):
                    to_give.append(live.stream)
                last_times.append(last_time)
                times[index] = now
            else:
                others.append(pair)
        give_soon(to_give)
        self._stats.generation_tokens.add(len(last_times))
        for last_time, count in Counter(last_times).items():
            if last_time == now:  # further tokens of a draft
                continue
            self._stats.inter_token_latency.observe(now - last_time, count)
        return others

    def _deliver_token(self, live: LiveRequest, indices: range, seq: Sequence, token: SampledToken, now: float) -> None:
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
            self._scheduler.finish(seq, FinishReason.STOP, stop)
            seq.finish_reason, seq.stop_reason = FinishReason.STOP, stop  # also if the token reached max_tokens
        logprobs = None
        if seq.params.logprobs is not None:
            logprobs = TokenLogprobs(token.token_id, token.logprob, token.packed_top)
        rest = None if seq.finish_reason is None else "" if stop else detokenizer.flush()
        for index in indices:
            stream.put(index, token.token_id, text, logprobs)
            live.timings.observe_token(index, stream.num_prompt_tokens, now)
            if rest is not None:
                stream.finish(index, rest)
        if rest is not None:
            live.num_unfinished -= len(indices)
            del self.owners[seq.seq_id]

    def _deliver_several(self, seq: Sequence, tokens: list[SampledToken], now: float) -> LiveRequest:
        """Hand over the tokens that one step brought for `seq`. A stop string in one of them drops those behind it."""
        live, indices = self.owners[seq.seq_id]
        reason, seq.finish_reason = seq.finish_reason, None  # the last token alone ends the sample
        for number, token in enumerate(tokens, start=1):
            if number == len(tokens):
                seq.finish_reason = reason
            self._deliver_token(live, indices, seq, token, now)
            if seq.seq_id not in self.owners and number < len(tokens):
                del seq.token_ids[number - len(tokens) :]
                break
        return live

    def _deliver_end(self, live: LiveRequest, indices: range, seq: Sequence, now: float) -> None:
        """End samples whose prompt is computed and that generate no token."""
        live.timings.observe_prompt(live.stream.num_prompt_tokens, now)
        for index in indices:
            live.stream.finish(index, "")
        live.num_unfinished -= len(indices)
        del self.owners[seq.seq_id]

    def _deliver_hypothesis(
        self, live: LiveRequest, indices: range, slot: Sequence, hypothesis: Hypothesis, now: float
    ) -> None:
        reason, slot.finish_reason = slot.finish_reason, None  # the last token alone ends the sample
        for number, (token_id, logprob) in enumerate(hypothesis.tokens(), start=1):
            if number == hypothesis.length:
                slot.finish_reason = reason
            self._deliver_token(live, indices, slot, SampledToken(slot.seq_id, token_id, logprob), now)
