"""The Scheduler and a fake device that checks what each step reads, driven without asyncio."""

from collections import deque

from engine.memory.block_manager import BlockManager
from engine.memory.sequence import Sequence, SequenceStatus
from engine.sampling_params import SamplingParams
from engine.scheduling.scheduler import Scheduler
from tests.fake_device import EOS_TOKEN_ID, FakeDevice, expected_tokens


class Loop:
    """The Driver's loop without asyncio: plans are sent up to `depth` ahead, results come back in order."""

    def __init__(self, num_blocks, block_size=4, depth=2, eos_every=0, prefix_caching=True, host_tier=None, **settings):
        settings = {"max_num_seqs": 8, "max_num_batched_tokens": 32, "eos_token_ids": [EOS_TOKEN_ID]} | settings
        self.scheduler = Scheduler(BlockManager(num_blocks, block_size, prefix_caching, host_tier), **settings)
        self.device = FakeDevice(num_blocks, block_size, eos_every)
        self.results = deque()
        self.depth = depth
        self.plans = []
        self._next_id = 0

    def add(self, prompt, max_tokens=8, priority=0, salt="", tenant="", weight=1.0, **params):
        params = SamplingParams(max_tokens=max_tokens, **params)
        seq = Sequence(
            self._next_id,
            prompt,
            params,
            seed=self._next_id,
            max_num_tokens=len(prompt) + max_tokens,
            priority=priority,
            arrival=self._next_id,
            cache_salt=salt,
            tenant=tenant,
            weight=weight,
        )
        self._next_id += 1
        self.scheduler.add(seq)
        return seq

    def step(self):
        """Send what can be sent, take one result; False when there is nothing to wait for."""
        while len(self.results) < self.depth and (plan := self.scheduler.schedule()) is not None:
            assert sum(s.num_tokens for s in plan.steps) <= self.scheduler.max_num_batched_tokens
            self.plans.append(plan)
            self.results.append(self.device.execute(plan))
            self.scheduler.check_invariants()
        if not self.results:
            return False
        self.scheduler.update(self.results.popleft())
        self.scheduler.check_invariants()
        return True

    def preempt(self, seq):
        """Preempt `seq` as if its blocks were needed."""
        self.scheduler._preempt(seq)

    def run(self, max_steps=20_000):
        for _ in range(max_steps):
            if not self.step():
                assert not self.scheduler.has_work, "work is left but nothing can be planned"
                return
        raise AssertionError("no end")

    def check_finished(self, seqs, eos_every=0):
        for seq in seqs:
            assert seq.status is SequenceStatus.FINISHED
            limit = seq.max_num_tokens - seq.num_prompt_tokens
            prompt = seq.token_ids[: seq.num_prompt_tokens]
            assert seq.token_ids[seq.num_prompt_tokens :] == expected_tokens(prompt, seq.seed, limit, eos_every)
        blocks = self.scheduler.block_manager
        assert len(blocks.free_blocks) == blocks.num_blocks, "an idle engine holds no blocks"


def prompt(rng, length):
    return [rng.randrange(97, 123) for _ in range(length)]


class ForkLoop(Loop):
    def add_samples(self, tokens, n, max_tokens=8, tenant="", weight=1.0, **params):
        params = SamplingParams(max_tokens=max_tokens, **params)
        seqs = []
        for _ in range(n):
            number, self._next_id = self._next_id, self._next_id + 1
            limits = {"seed": number, "max_num_tokens": len(tokens) + max_tokens, "arrival": number}
            seqs.append(Sequence(number, tokens, params, **limits, tenant=tenant, weight=weight))
        self.scheduler.add(seqs[0], seqs[1:])
        return seqs

    def computed(self):
        return sum(step.num_tokens for plan in self.plans for step in plan.steps)

    def copies(self):
        return [copy for plan in self.plans for copy in plan.block_copies]
