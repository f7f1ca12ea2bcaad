"""Results of the sampler: from its tensors to the lists of a StepResult."""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice

import torch
from torch import Tensor

from engine.executor.step import SampledToken
from engine.worker.sampling.sampler import SamplerOutput
from engine.worker.sampling.sampling_rows import PlainDraws, SamplingInputs

NOT_FINITE = "the model's logits hold NaN or infinity, or no token is left to choose"


@dataclass(frozen=True, slots=True)
class SamplerRun:
    """One run of the sampler over consecutive rows of a step, usually all. num_logprobs per row; -1: none asked for."""

    output: SamplerOutput  # from a GPU: valid on the host once the step's mark is reached
    num_logprobs: list[int]
    error: str = ""

    def to_host(self) -> "SamplerRun":
        """The run with its tensors on the host; from a GPU the copies are queued (non_blocking: into pinned memory)."""
        output = self.output
        if not output.token_ids.is_cuda:
            return self
        tensors = (output.token_ids, output.failed, output.logprobs, output.top_ids)
        copies = [None if tensor is None else tensor.to("cpu", non_blocking=True) for tensor in tensors]
        return SamplerRun(SamplerOutput(*copies), self.num_logprobs, self.error)  # type: ignore[arg-type]


@dataclass(slots=True)
class ResultBuilder:
    """Collects the token columns and lists of a StepResult."""

    failed: dict[int, str]
    seq_ids: list[int]
    token_ids: list[int]
    detailed: list[SampledToken]

    def add_tokens(self, seq_ids: list[int], token_ids: list[int]) -> None:
        """Add tokens without logprobs; a sequence whose token is below 0 failed."""
        if not self.failed and (not token_ids or min(token_ids) >= 0):
            self.seq_ids += seq_ids
            self.token_ids += token_ids
            return
        for seq_id, token_id in zip(seq_ids, token_ids, strict=True):
            if token_id < 0:
                self.failed.setdefault(seq_id, NOT_FINITE)
            elif seq_id not in self.failed:
                self.seq_ids.append(seq_id)
                self.token_ids.append(token_id)

    def add_token(self, token: SampledToken) -> None:
        """Add one token, to the columns if it has no logprobs."""
        if token.packed_top or token.logprob:
            self.detailed.append(token)
        else:
            self.seq_ids.append(token.seq_id)
            self.token_ids.append(token.token_id)

    def add_run(self, seq_ids: Iterator[int], run: SamplerRun) -> None:
        """Add the rows of `run`, each for the next of `seq_ids`."""
        output = run.output
        token_ids = output.token_ids.tolist()
        if output.logprobs is None and not run.error:
            if output.failed.any():
                token_ids = output.token_ids.masked_fill(output.failed, -1).tolist()
            self.add_tokens(list(islice(seq_ids, len(token_ids))), token_ids)
            return
        row_failed = output.failed.tolist()
        with_logprobs = _with_logprobs(output, run.num_logprobs)
        for i, token_id in enumerate(token_ids):
            seq_id = next(seq_ids)
            chosen, packed_top = (0.0, b"") if run.num_logprobs[i] < 0 else next(with_logprobs)
            if row_failed[i]:
                self.failed[seq_id] = run.error or NOT_FINITE
            elif seq_id not in self.failed:
                self.detailed.append(SampledToken(seq_id, token_id, chosen, packed_top))


def num_logprobs(sampling: SamplingInputs | PlainDraws | None, num_rows: int) -> list[int]:
    return sampling.num_logprobs.tolist() if isinstance(sampling, SamplingInputs) else [-1] * num_rows


def failed_run(error: Exception, device: torch.device) -> SamplerRun:
    token_ids, failed = torch.zeros(1, dtype=torch.int64, device=device), torch.ones(1, dtype=torch.bool, device=device)
    return SamplerRun(SamplerOutput(token_ids, failed), [-1], f"{type(error).__name__}: {error}")


def token_ids_of(runs: tuple[SamplerRun, ...] | list[SamplerRun]) -> Tensor:
    """The sampled tokens of all runs, int64 [rows]."""
    return runs[0].output.token_ids if len(runs) == 1 else torch.cat([run.output.token_ids for run in runs])


def _with_logprobs(output: SamplerOutput, num_logprobs: list[int]) -> Iterator[tuple[float, bytes]]:
    """The logprob and the packed alternatives (engine.outputs.pack_top) of each row that asked for logprobs."""
    if output.logprobs is None or output.top_ids is None:
        return
    asked = [k for k in num_logprobs if k >= 0]
    for k, logprobs, top_ids in zip(asked, output.logprobs.numpy(), output.top_ids.int().numpy(), strict=True):
        yield float(logprobs[0]), top_ids[:k].tobytes() + logprobs[1 : k + 1].tobytes()
