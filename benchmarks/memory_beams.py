"""What beam search saves, modelled on the BlockManager: its fork pattern without a model that would draw the beams.

The books are the real ones (fork, allocate with copy-on-write, free); who survives is drawn. In a step that reshuffles,
each of the `width` survivors descends from a beam drawn uniformly, so some fork and some end; in the other steps every
beam goes on by itself. How often real beams reshuffle depends on the model and the text: `turnover` 1.0 is the most
that can be shared, a low one is close to parallel sampling.
"""

import random
from collections import deque

from benchmarks.memory_load import MAX_MODEL_LEN, PARAMS, Lengths
from engine.block_manager import BlockManager
from engine.sequence import Sequence


class BeamGroup:
    """One request: its beams, and the tokens after which it ends."""

    def __init__(self, manager: BlockManager, lengths: Lengths, rng: random.Random) -> None:
        self.beams = [_new_sequence()]
        self._manager, self._rng = manager, rng
        self._left = lengths.output - 1  # the last token is never computed
        self._compute(self.beams[0], lengths.prompt)

    def step(self, width: int, turnover: float) -> bool:
        """Fork and end beams, then compute a token of each; False, with all blocks free, when the request is done."""
        if len(self.beams) < width or self._rng.random() < turnover:
            self._reshuffle(width)
        for seq in self.beams:
            self._compute(seq, 1)
        self._left -= 1
        if self._left == 0:
            for seq in self.beams:
                self._manager.free(seq)
        return self._left > 0

    def _reshuffle(self, width: int) -> None:
        """A parent's first child takes its place, further ones fork off it; beams without a child end."""
        children = [self._rng.choice(self.beams) for _ in range(width)]
        survivors: list[Sequence] = []
        for parent in children:
            if parent not in survivors:
                survivors.append(parent)
            else:
                survivors.append(_new_sequence())
                self._manager.fork(parent, survivors[-1])
        for seq in self.beams:
            if seq not in survivors:
                self._manager.free(seq)
        self.beams = survivors

    def _compute(self, seq: Sequence, num_tokens: int) -> None:
        blocks = self._manager.allocate(seq, num_tokens)
        assert blocks is not None, "the pool holds every beam at its longest"
        seq.num_computed_tokens += num_tokens


def beam_sharing(load: list[Lengths], width: int, turnover: float, at_once: int = 16, block_size: int = 16) -> float:
    """The share of the blocks that beams save, measured like `memory_load.sharing`: a mean over steps."""
    rng = random.Random(1)
    manager = BlockManager(at_once * width * (MAX_MODEL_LEN // block_size + 1), block_size, False)
    waiting = deque(load)
    groups: list[BeamGroup] = []
    saved = []
    while waiting:
        while waiting and len(groups) < at_once:
            groups.append(BeamGroup(manager, waiting.popleft(), rng))
        groups = [group for group in groups if group.step(width, turnover)]
        logical = sum(len(seq.block_table) for group in groups for seq in group.beams)
        if len(waiting) < len(load) * 3 // 4 and logical:
            saved.append(1 - (manager.num_blocks - len(manager.free_blocks)) / logical)
    return sum(saved) / len(saved)


def _new_sequence() -> Sequence:
    return Sequence(0, [], PARAMS, seed=0, max_num_tokens=MAX_MODEL_LEN)
