"""HostTier: evicted KV blocks in host memory, from which a later prefix match loads them again.

When the pool gives out a cached block for other tokens, its content moves to a slot of this tier, under the same key; a
later match brings it back into a block of the pool. That is swapping (Kwon et al. 2023, section 4.5) and a second tier
of the prefix cache in one: a preempted sequence leaves its full blocks in the cache, evicted blocks move to the host,
and the sequence finds all of them when it starts again; only the tokens of its last block are computed again.

The Worker owns the memory; this class knows which block is in which slot. Plans write and read slots and the Worker
runs plans in order, so a slot counts as filled when the plan that fills it is made.
"""

from collections import OrderedDict
from collections.abc import Iterable

from engine.executor.step import BlockMove, CacheCosts, WorkerReady
from engine.memory.sequence import BlockKey

# Digests that are kept for each block that the disk can hold. The disk drops blocks while too many wait to be written,
# and then holds some that are older than as many digests as it has blocks.
DIGESTS_PER_DISK_BLOCK = 2


class HostTier:
    """`num_slots` slots by the key of their block; the least recently used is evicted first. Operations are O(1): to
    find its oldest entry, a dict would pass over those deleted before."""

    def __init__(
        self,
        num_slots: int,
        costs: CacheCosts | None = None,
        on_disk: Iterable[bytes] | None = None,
        num_disk_blocks: int = 0,
    ) -> None:
        """`costs` tells when loading beats computing; None: always.

        `on_disk`: digests that the disk tier should hold, the oldest first, if there is one; offloaded blocks go on to
        the disk, which holds up to `num_disk_blocks`.
        """
        self.num_slots = num_slots
        self.on_disk = None if on_disk is None else OrderedDict.fromkeys(on_disk)
        self._max_digests = DIGESTS_PER_DISK_BLOCK * num_disk_blocks
        self.num_loads = 0  # blocks brought back
        self.num_offloads = 0
        self.costs = costs
        self._slots: OrderedDict[BlockKey, int] = OrderedDict()  # in order of use
        self._free = list(range(num_slots - 1, -1, -1))
        self._pinned: set[int] = set()  # read by the plan under construction
        self._reserved: set[int] = set()  # the disk tier is about to fill them
        self._offloads: dict[int, BlockMove] = {}  # by slot, of the plan under construction
        self._loads: dict[int, int] = {}  # block -> slot

    @classmethod
    def of(cls, ready: WorkerReady, with_disk: bool) -> "HostTier | None":
        """Returns the tier of a Worker that has just started; None if the Worker has no host memory for it."""
        if not ready.num_host_blocks:
            return None
        on_disk = ready.disk_digests if with_disk else None
        return cls(ready.num_host_blocks, ready.cache_costs, on_disk, ready.num_disk_blocks)

    def count_on(self, before: "HostTier") -> None:
        """Continues the counters of the tier before the restart: metrics counters never fall."""
        self.num_loads, self.num_offloads = before.num_loads, before.num_offloads

    def __len__(self) -> int:
        return len(self._slots)

    def __contains__(self, key: BlockKey) -> bool:
        return key in self._slots

    def offload(self, key: BlockKey, block_id: int) -> None:
        """Keeps the content of a block that is about to be overwritten; evicts the least recently used slot."""
        if key in self._slots:
            self._touch(key)
            return
        slot = self._free.pop() if self._free else self._evict()
        if slot is not None:
            self._slots[key] = slot
            self._offloads[slot] = BlockMove(block_id, slot, self._digest_for_disk(key))
            self.num_offloads += 1

    def worth_loading(self, num_loaded: int, num_before: int, num_computed: int) -> bool:
        """True if loading `num_loaded` tokens takes less time than computing `num_computed` behind `num_before`."""
        return self.costs is None or self.costs.load(num_loaded) < self.costs.compute(num_before, num_computed)

    def pin(self, keys: list[BlockKey]) -> None:
        """Protects slots that are about to be loaded from eviction, until the plan under construction is made."""
        for key in keys:
            self._touch(key)
            self._pinned.add(self._slots[key])

    def load(self, key: BlockKey, block_id: int) -> None:
        """Copies a pinned slot back into a block of the pool; the slot keeps its content too."""
        self._loads[block_id] = self._slots[key]
        self.num_loads += 1

    def discard(self, key: BlockKey) -> None:
        """Forgets content that cannot be trusted; between plans only, when no slot is pinned."""
        if self.on_disk is not None:
            self.on_disk.pop(key.digest, None)  # a later offload writes it again
        if (slot := self._slots.pop(key, None)) is not None:
            self._offloads.pop(slot, None)
            self._free.append(slot)

    def pop_moves(self) -> tuple[list[BlockMove], list[BlockMove]]:
        """Returns and clears (offloads, loads) of the plan under construction. All offloads run before all loads."""
        offloads = list(self._offloads.values())
        loads = [BlockMove(block_id, slot) for block_id, slot in self._loads.items()]
        self._offloads, self._loads = {}, {}
        self._pinned.clear()
        return offloads, loads

    def reserve(self, num_slots: int) -> list[int]:
        """Returns up to `num_slots` slots for the disk tier to fill. No plan touches them until `fill`."""
        slots: list[int] = []
        while len(slots) < num_slots:
            slot = self._free.pop() if self._free else self._evict()
            if slot is None:
                break
            self._offloads.pop(slot, None)
            slots.append(slot)
        self._reserved.update(slots)
        return slots

    def fill(self, keys: list[BlockKey], slots: list[int]) -> None:
        """Assigns reserved slots to `keys`, in order; frees the rest."""
        self._reserved.difference_update(slots)
        for i, slot in enumerate(slots):
            if i < len(keys) and keys[i] not in self._slots:
                self._slots[keys[i]] = slot
            else:
                self._free.append(slot)

    def check_invariants(self) -> None:
        """Asserts that every slot is free or holds one block. For tests and simulation."""
        used = list(self._slots.values())
        assert len(used) == len(set(used)), "two blocks in one slot"
        assert sorted([*used, *self._free, *self._reserved]) == list(range(self.num_slots)), "a slot is lost"

    def _digest_for_disk(self, key: BlockKey) -> bytes:
        """Returns the digest under which the disk tier writes the block; empty if it need not."""
        if self.on_disk is None or key.digest in self.on_disk:
            return b""
        self.on_disk[key.digest] = None
        if len(self.on_disk) > self._max_digests:  # the disk has written over the oldest
            self.on_disk.popitem(last=False)
        return key.digest

    def _touch(self, key: BlockKey) -> None:
        self._slots.move_to_end(key)

    def _evict(self) -> int | None:
        """Frees and returns the least recently used slot; None if all are about to be read."""
        for key, slot in self._slots.items():  # in order of use; pinned slots were used last
            if slot not in self._pinned:
                del self._slots[key]
                return slot
        return None
