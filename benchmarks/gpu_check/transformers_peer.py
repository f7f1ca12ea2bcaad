"""transformers on the prompts of the nano-vllm workload: one by one, in static batches, with continuous batching.

Each way gets some seconds, not the whole workload. The figures are output tokens per second. One by one: measured over
the first prompts. Static batches: extrapolated to the whole workload from the measured time of a step, which grows with
the context, so the figure favours transformers. Continuous batching: as measured; if the time was too short, the tokens
of unfinished requests count, too.
"""

import dataclasses
import math
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.generation import ContinuousBatchingConfig

from benchmarks.gpu_check.names import QWEN
from benchmarks.gpu_check.parts import Setting
from benchmarks.gpu_check.record import Recorder
from benchmarks.gpu_check.shapes import NanoRequest, nano_workload, write_model
from benchmarks.gpu_check.timing import pick_device, synchronize

ONE_BY_ONE, STATIC, CONTINUOUS = (f"{QWEN}: transformers {way}" for way in ("one by one", "static batch", "continuous"))
ONE_SECONDS, ONE_PROMPTS = 3.0, 4
BATCH_SECONDS, BATCH_SIZES = 20.0, (64, 32, 16)
CONTINUOUS_SECONDS = 20.0
TINY_SECONDS, TINY_BATCH = 1.0, (3,)


def run(recorder: Recorder, setting: Setting) -> None:
    """The first case loads the model, and so does the first of a process that goes on behind a fault."""
    device = pick_device(setting.tiny)
    peers: list[Peer] = []
    for name, measure in ((ONE_BY_ONE, Peer.one_by_one), (STATIC, Peer.static), (CONTINUOUS, Peer.continuous)):
        recorder.case(name, partial(_measure, peers, measure, recorder, setting, device), seconds=60)


def _measure(
    peers: "list[Peer]", measure: "Callable[[Peer], None]", recorder: Recorder, setting: Setting, device: torch.device
) -> None:
    if not peers:
        model, workload = make_model(setting, device), nano_workload(setting.tiny)
        peers.append(Peer(model, workload, device, recorder, setting.tiny))
    measure(peers[0])


def make_model(setting: Setting, device: torch.device) -> Any:
    """The same shape with random weights, in bf16, with the attention that transformers chooses itself."""
    folder = write_model(QWEN, setting.folder, setting.tiny)
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder), dtype=torch.bfloat16).eval()
    model.generation_config.eos_token_id = None
    model.generation_config.pad_token_id = 0
    return model


class Peer:
    """One transformers model and the workload."""

    def __init__(
        self, model: Any, workload: list[NanoRequest], device: torch.device, recorder: Recorder, tiny: bool
    ) -> None:
        self._model, self._workload, self._device, self._recorder, self._tiny = model, workload, device, recorder, tiny

    def one_by_one(self) -> None:
        """The first prompts, a few seconds each: decoding alone hardly depends on the prompt's length."""
        self._generate(self._workload[:1], 4)
        tokens = seconds = 0.0
        for request in self._workload[:ONE_PROMPTS]:
            steps, taken = self._generate([request], request.output, TINY_SECONDS if self._tiny else ONE_SECONDS)
            tokens, seconds = tokens + steps, seconds + taken
        self._recorder.figure(ONE_BY_ONE, tokens / seconds, "tok/s", prompts=ONE_PROMPTS, tokens=tokens,
                              seconds=seconds)  # fmt: skip

    def static(self) -> None:
        """The largest batch that memory takes; each runs until its longest request is done."""
        for size in TINY_BATCH if self._tiny else BATCH_SIZES:
            try:
                return self._static(size)
            except torch.OutOfMemoryError:
                print(f"  a batch of {size} does not fit", flush=True)
            torch.cuda.empty_cache()
        raise RuntimeError("no batch fits the card's memory")

    def _static(self, size: int) -> None:
        batches = [self._workload[i : i + size] for i in range(0, len(self._workload), size)]
        self._generate(batches[0], 2)
        longest = max(request.output for request in batches[0])
        steps, taken = self._generate(batches[0], longest, TINY_SECONDS if self._tiny else BATCH_SECONDS)
        seconds = sum(max(request.output for request in batch) for batch in batches) * taken / steps
        tokens = sum(request.output for request in self._workload)
        self._recorder.figure(STATIC, tokens / seconds, "tok/s", batch=size, measured_steps=steps, seconds=taken,
                              ms_per_step=taken / steps * 1e3, seconds_for_all=seconds)  # fmt: skip

    def _generate(self, batch: list[NanoRequest], max_new_tokens: int, max_time: float = math.inf) -> tuple[int, float]:
        """(steps, seconds) of generate over prompts padded on the left; it stops after max_time."""
        width = max(len(request.prompt) for request in batch)
        rows = [[0] * (width - len(request.prompt)) + request.prompt for request in batch]
        mask = [[0] * (width - len(request.prompt)) + [1] * len(request.prompt) for request in batch]
        ids, mask_rows = (torch.tensor(value, device=self._device) for value in (rows, mask))
        limit = {} if math.isinf(max_time) else {"max_time": max_time}
        synchronize(self._device)
        started = time.perf_counter()
        out = self._model.generate(
            ids, attention_mask=mask_rows, max_new_tokens=max_new_tokens, do_sample=False, **limit
        )
        synchronize(self._device)
        return out.shape[1] - width, time.perf_counter() - started

    def continuous(self) -> None:
        """All prompts at once, each with its own number of tokens, through transformers' own scheduler."""
        config = self._model.generation_config
        seconds = TINY_SECONDS * 10 if self._tiny else CONTINUOUS_SECONDS
        sizes = _tiny_sizes() if self._tiny else None
        with self._model.continuous_batching_context_manager(
            config, block=True, timeout=2, continuous_batching_config=sizes
        ) as manager:
            started = time.perf_counter()
            for number, request in enumerate(self._workload):
                manager.add_request(request.prompt, request_id=str(number), max_new_tokens=request.output)
            finished: dict[str, int] = {}
            while len(finished) < len(self._workload) and time.perf_counter() - started < seconds:
                result = manager.get_result(timeout=0.2)
                if result is not None and result.is_finished():
                    if result.error is not None:
                        raise RuntimeError(f"transformers failed: {result.error}")
                    finished[result.request_id] = len(result.generated_tokens)
                elif result is None and not manager.is_running():
                    raise RuntimeError("transformers' generation thread ended")
            taken = time.perf_counter() - started
            self._report_continuous(finished, taken)

    def _report_continuous(self, finished: dict[str, int], seconds: float) -> None:
        """Record the rate. An unfinished request counts as many tokens as the longest finished request."""
        if not finished:
            raise RuntimeError(f"no request was finished within {seconds:.0f} s")
        unfinished = len(self._workload) - len(finished)
        tokens = sum(finished.values()) + unfinished * max(finished.values())
        self._recorder.figure(CONTINUOUS, tokens / seconds, "tok/s", seconds=seconds, finished=len(finished),
                              unfinished=unfinished, tokens=tokens)  # fmt: skip


def _tiny_sizes() -> ContinuousBatchingConfig:
    """Its own choice for a CPU is the whole memory. The tokens of a page were called block_size once."""
    names = {field.name for field in dataclasses.fields(ContinuousBatchingConfig)}
    page = "page_size" if "page_size" in names else "block_size"
    return ContinuousBatchingConfig(num_blocks=16, max_batch_tokens=64, **{page: 32})
