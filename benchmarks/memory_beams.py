"""Measures the memory that beam search saves, with the real Scheduler, BlockManager, ModelRunner and bundled model.

Which hypotheses survive a step is what the model says. Prompts are held-out documents of its own corpus, one after the
other, cut to the length that was drawn; a search runs for as many tokens as were drawn, past the end of a document if
need be. The context of the model is that of the loads, 2,048 tokens, so no length is scaled.
"""

from collections import deque
from collections.abc import Iterator
from itertools import count

from benchmarks.memory_load import MAX_MODEL_LEN, Lengths
from engine.checkpoint.locate import BUNDLED_MODEL
from engine.config import EngineConfig
from engine.executor.step import StepPlan, StepResult
from engine.memory.block_manager import BlockManager
from engine.memory.sequence import Sequence
from engine.sampling_params import BeamSearchParams, SamplingParams
from engine.scheduling.beam_group import BeamGroup, begin_search
from engine.scheduling.scheduler import Scheduler
from engine.text.tokenizer import Tokenizer
from engine.worker.device.host import set_threads
from training.corpus import HELD_OUT_SEED, Corpus

MAX_NUM_SEQS, MAX_NUM_BATCHED_TOKENS = 128, 2048
AT_ONCE = 16  # searches
CONFIG = EngineConfig(
    device="cpu",
    dtype="float32",
    num_blocks=6144,  # 1,024 tokens for each of 96 hypotheses that share nothing
    max_model_len=MAX_MODEL_LEN,
    max_num_seqs=MAX_NUM_SEQS,
    max_num_batched_tokens=MAX_NUM_BATCHED_TOKENS,
)


class BeamEngine:
    """The Driver's loop and the Worker's model in one process, on the CPU in fp32."""

    def __init__(self) -> None:
        set_threads(CONFIG.cpu_threads)
        from engine.worker.load import load_runner  # torch comes with it, which must find the threads set

        self._runner, ready = load_runner(CONFIG, BUNDLED_MODEL, [], lambda phase: None)
        self._num_blocks = ready.num_blocks
        self._tokenizer = Tokenizer(BUNDLED_MODEL)
        self._numbers = count()

    def sharing(self, load: list[Lengths], width: int, at_once: int = AT_ONCE) -> float:
        """The share of the blocks that beams save: 1 - blocks in use / blocks of the tables of all hypotheses.

        As `memory_load.sharing` measures it: a mean over steps, `at_once` searches at any time, once a quarter of them
        has ended and while further ones wait. ValueError for a `load` of which no step is left then.
        """
        if len(load) - len(load) // 4 <= at_once:
            raise ValueError(f"{len(load)} searches are too few to measure {at_once} at once")
        blocks = BlockManager(self._num_blocks, CONFIG.block_size, enable_prefix_caching=False)  # only forks share
        scheduler = Scheduler(blocks, max_num_seqs=MAX_NUM_SEQS, max_num_batched_tokens=MAX_NUM_BATCHED_TOKENS)
        waiting, saved, num_started = deque(self._searches(load, width)), [], 0
        while waiting:
            while waiting and num_started - len(scheduler.ended_groups) < at_once:
                scheduler.add(waiting.popleft().slots[0])
                num_started += 1
            plan = scheduler.schedule()
            assert plan is not None and not scheduler.num_preemptions, "the pool holds all searches"
            if len(scheduler.ended_groups) >= len(load) // 4:
                logical = sum(len(seq.block_table) for seq in scheduler.running)
                saved.append(1 - (blocks.num_blocks - len(blocks.free_blocks)) / logical)
            scheduler.update(self._compute(plan))
        removed = [seq.seq_id for seq in scheduler.running]
        self._compute(StepPlan(step_id=0, removed=removed, new=[], block_copies=[], chunks=[]))
        return sum(saved) / len(saved)

    def _compute(self, plan: StepPlan) -> StepResult:
        result = self._runner.result(self._runner.launch(plan))
        assert not result.failed
        return result

    def _searches(self, load: list[Lengths], width: int) -> Iterator[BeamGroup]:
        """The same prompts for every width."""
        documents = Corpus(HELD_OUT_SEED, held_out=True).documents()
        for lengths in load:
            prompt: list[int] = []
            while len(prompt) < lengths.prompt:
                prompt += self._tokenizer.encode(next(documents).text)
            params = BeamSearchParams(beam_width=width, max_tokens=lengths.output, ignore_eos=True)
            slots = [self._sequence(prompt[: lengths.prompt], lengths.output) for _ in range(width)]
            yield begin_search(params, slots, [])

    def _sequence(self, prompt: list[int], output: int) -> Sequence:
        number, limit = next(self._numbers), len(prompt) + output
        return Sequence(number, prompt, SamplingParams(), seed=0, max_num_tokens=limit, arrival=number)
