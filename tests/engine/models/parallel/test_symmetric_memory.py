"""The choice among methods of an all-reduce, with methods and times of our own. device_cases.py has the real ones."""

import pytest
import torch

from engine.models.parallel.symmetric_memory import BUFFER_BYTES, NCCL, SIZES, SymmetricSum


class Platform:
    """One rank of `size` equal ones. `costs`: for each method, the seconds of a call and of each byte."""

    def __init__(self, costs, size=2, wrong=()):
        self.costs, self.size, self.wrong = costs, size, wrong
        self.calls = []
        methods = {name: self.method(name) for name in costs if name != NCCL}
        self.summed = SymmetricSum(torch.zeros(BUFFER_BYTES, dtype=torch.uint8), methods, self.nccl)

    def nccl(self, x):
        self.calls.append((NCCL, x.nbytes))
        x.mul_(self.size)

    def method(self, name):
        def work(part, x):
            assert part.shape == x.shape and part.dtype == x.dtype
            part.copy_(x)
            self.calls.append((name, x.nbytes))
            x.copy_(part * (1 if name in self.wrong else self.size))

        return work

    def timer(self, work):
        work()
        name, num_bytes = self.calls[-1]
        start, each = self.costs[name]
        return start + each * num_bytes

    def used_for(self, x):
        self.calls.clear()
        expected = x.float() * self.size
        self.summed(x)
        assert torch.equal(x.float(), expected)
        [(name, _)] = self.calls
        return name


COSTS = {NCCL: (30e-6, 1e-12), "one_shot": (5e-6, 9e-12), "two_shot": (9e-6, 4e-12)}


def agree(numbers):
    return numbers


def test_the_fastest_method_is_used_for_each_size():
    platform = Platform(COSTS)
    platform.summed.choose(torch.bfloat16, platform.timer, agree)
    assert list(platform.summed.fastest) == SIZES
    used = [platform.used_for(torch.ones(n // 2, dtype=torch.bfloat16)) for n in (16, 8192, 1 << 20, 32 << 20)]
    assert used == ["one_shot", "one_shot", "two_shot", NCCL]
    assert platform.used_for(torch.ones((3, 1024), dtype=torch.float32)) == "one_shot"
    beyond = torch.ones(BUFFER_BYTES // 2 + 8, dtype=torch.bfloat16)
    assert platform.used_for(beyond) == NCCL


@pytest.mark.parametrize(
    "x",
    [torch.ones(64, dtype=torch.float16), torch.ones(7, dtype=torch.bfloat16), torch.ones((64, 64)).T[:, :32]],
    ids=["dtype", "odd bytes", "strided"],
)
def test_tensors_that_the_kernels_do_not_add_go_through_nccl(x):
    platform = Platform(COSTS)
    platform.summed.choose(torch.bfloat16, platform.timer, agree)
    assert platform.used_for(x) == NCCL


def test_a_method_that_adds_wrongly_is_left_out():
    platform = Platform(COSTS, wrong={"one_shot"})
    platform.summed.choose(torch.bfloat16, platform.timer, agree)
    assert "one_shot" not in platform.summed.fastest.values()
    assert platform.used_for(torch.ones(4096, dtype=torch.bfloat16)) == "two_shot"


def test_ranks_choose_alike_by_the_slowest_of_them():
    costs = [COSTS, {**COSTS, "one_shot": (25e-6, 9e-12)}]  # the second rank is far from the others
    given = []
    for own in costs:
        platform = Platform(own)
        platform.summed.choose(torch.bfloat16, platform.timer, lambda numbers: given.append(numbers) or numbers)
    half = len(given) // 2
    together = [list(map(min, a, b)) for a, b in zip(given[:half], given[half:], strict=True)]
    chosen = []
    for own in costs:
        platform, answers = Platform(own), iter(together)
        platform.summed.choose(torch.bfloat16, platform.timer, lambda _, answers=answers: next(answers))
        chosen.append(platform.summed.fastest)
    assert chosen[0] == chosen[1] and chosen[0][SIZES[0]] == "two_shot"
