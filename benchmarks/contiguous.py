"""The baseline of PagedAttention: one contiguous piece of KV memory per request, reserved when it is admitted.

The three reservations of the vLLM paper (Kwon et al. 2023, section 6.1, after Orca): `max` reserves the model's whole
context, `pow2` the output rounded up to a power of two, `oracle` knows the output in advance, which no real engine can.
Pieces come from a buddy allocator, as the paper assumes, or from the first hole that is long enough.
"""

from bisect import insort
from collections import deque
from dataclasses import dataclass
from typing import Protocol

from benchmarks.memory_load import Lengths, Shares, mean_of


class Pool(Protocol):
    def reserve(self, num_slots: int) -> int | None: ...

    def give_back(self, start: int, num_slots: int) -> None: ...


def power_of_two(number: int) -> int:
    """The least power of two that is not below `number` (at least 1)."""
    return 1 << (number - 1).bit_length()


class BuddyPool:
    """Pieces of a power of two of slots, split in halves and joined again. The pool itself may have any size."""

    def __init__(self, num_slots: int) -> None:
        self._free: dict[int, set[int]] = {1 << bit: set() for bit in range(num_slots.bit_length())}
        start = 0
        for size in sorted(self._free, reverse=True):
            if num_slots & size:
                self._free[size].add(start)
                start += size

    def reserve(self, num_slots: int) -> int | None:
        """The first slot of a piece that holds `num_slots`; None where no piece is long enough."""
        size = power_of_two(num_slots)
        found = next((s for s, starts in self._free.items() if s >= size and starts), None)
        if found is None:
            return None
        start = min(self._free[found])
        self._free[found].remove(start)
        while found > size:
            found //= 2
            self._free[found].add(start + found)
        return start

    def give_back(self, start: int, num_slots: int) -> None:
        size = power_of_two(num_slots)
        while size in self._free and start ^ size in self._free[size]:
            self._free[size].remove(start ^ size)
            start, size = min(start, start ^ size), size * 2
        self._free[size].add(start)


class FirstFitPool:
    """Exactly the slots asked for, from the first hole that has them: kinder to contiguous memory than the paper is."""

    def __init__(self, num_slots: int) -> None:
        self._holes = [(0, num_slots)]  # (start, end), sorted

    def reserve(self, num_slots: int) -> int | None:
        for index, (start, end) in enumerate(self._holes):
            if end - start >= num_slots:
                self._holes[index : index + 1] = [(start + num_slots, end)] if end - start > num_slots else []
                return start
        return None

    def give_back(self, start: int, num_slots: int) -> None:
        insort(self._holes, (start, start + num_slots))
        joined: list[tuple[int, int]] = []
        for hole in self._holes:
            if joined and joined[-1][1] == hole[0]:
                joined[-1] = joined[-1][0], hole[1]
            else:
                joined.append(hole)
        self._holes = joined


def reservation(kind: str, prompt: int, output: int, max_model_len: int) -> int:
    """Slots that a request reserves; ValueError for a kind that is none of max, pow2, oracle."""
    if kind == "max":
        return max_model_len
    if kind == "pow2":
        return min(max_model_len, prompt + power_of_two(output))
    if kind == "oracle":
        return prompt + output
    raise ValueError(f"reservation kind must be max, pow2 or oracle, not {kind!r}")


@dataclass(slots=True)
class _Held:
    start: int
    reserved: int
    final: int
    tokens: int


def contiguous_shares(kind: str, pool: Pool, num_slots: int, load: list[Lengths], max_model_len: int) -> Shares:
    """Serve `load` with iteration-level scheduling, first come, first served, until no request waits.

    Returns where the slots of the pool were, on average over the steps after the first quarter of the requests ended.
    """
    waiting, running, num_ended = deque(load), [], 0
    found = []
    while waiting:
        while waiting:
            prompt, output = waiting[0]
            reserved = reservation(kind, prompt, output, max_model_len)
            start = pool.reserve(reserved)
            if start is None:
                break
            waiting.popleft()
            running.append(_Held(start, reserved, prompt + output, prompt))
        if num_ended >= len(load) // 4 and waiting:
            found.append(_shares(running, num_slots))
        for held in running:
            held.tokens += 1
            if held.tokens == held.final:
                pool.give_back(held.start, held.reserved)
                num_ended += 1
        running = [held for held in running if held.tokens < held.final]
    return mean_of(found)


def _shares(running: list[_Held], num_slots: int) -> Shares:
    tokens = sum(held.tokens for held in running) / num_slots
    final = sum(held.final for held in running) / num_slots
    reserved = sum(held.reserved for held in running) / num_slots
    return Shares(tokens, final - tokens, reserved - final, 1 - reserved, len(running))
