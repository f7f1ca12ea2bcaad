"""AdapterSlots: which adapter each row of the batch uses, and which slot of the device holds it.

Adapters are read and packed by a thread, between steps, and wait in host memory. An adapter gets a slot when a sequence
that uses it comes: a free one, else that of the least recently used adapter without a row. The Driver lets at most
max_loras adapters have rows.
"""

import logging
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from engine.errors import EngineError, PageserveError
from engine.executor.step import AdapterLoaded, LoadAdapter, UnloadAdapter, WorkerMessage
from engine.models.adapters.checkpoint import read_adapter
from engine.models.layers.adapted import AdapterLayers, PackedAdapter
from engine.worker.batch.device_rows import Put
from engine.worker.batch.input_batch import StepInputs
from engine.worker.batch.step_buffer import IntArray
from engine.worker.device.queue import DeviceQueue

logger = logging.getLogger(__name__)

BASE = -1


class AdapterSlots:
    """The adapters in host memory by their ids, and the slot of each row of InputBatch (`row_slots` int64, BASE for the
    base). On a device with buckets, `device_slots` is a copy of it with one more row, for padding."""

    def __init__(self, layers: AdapterLayers, max_num_seqs: int, queue: DeviceQueue | None) -> None:
        self.layers = layers
        layers.forget_rows()  # an earlier runner may have left some
        self.row_slots = np.full(max_num_seqs, BASE, np.int64)
        self._queue = queue
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="adapters")
        self._adapters: dict[int, Future[PackedAdapter]] = {}
        self._slots: dict[int, int] = {}  # adapter id -> slot, the least recently used first
        self._free = list(range(layers.max_loras - 1, -1, -1))
        self._num_rows = [0] * layers.max_loras  # by slot
        self._always = False
        self.device_slots = torch.full((max_num_seqs + 1,), BASE, device=layers.device)
        self._changed: set[int] = set()  # rows whose slot on the device is not up to date

    def handle(self, message: LoadAdapter | UnloadAdapter, send: Callable[[WorkerMessage], None]) -> None:
        """Begin to read an adapter, or drop one. `send` gets the answer to LoadAdapter, from the thread that reads."""
        if isinstance(message, UnloadAdapter):
            self._adapters.pop(message.adapter_id, None)
            if (slot := self._slots.get(message.adapter_id)) is not None and not self._num_rows[slot]:
                self._free.append(self._slots.pop(message.adapter_id))
            return
        future = self._adapters[message.adapter_id] = self._thread.submit(self._read, message)
        future.add_done_callback(lambda done: send(_answer(message, done)))

    def close(self) -> None:
        """Wait until every adapter is read and its answer is sent."""
        self._thread.shutdown()

    def _read(self, message: LoadAdapter) -> PackedAdapter:
        layers = self.layers
        adapter = read_adapter(Path(message.path), layers.config, layers.parts, layers.max_rank, layers.dtype)
        if message.digest not in (b"", adapter.digest):
            raise EngineError(f"the files in {message.path} have changed since the adapter was loaded")
        return layers.pack(adapter.factors, adapter.digest)

    def add(self, row: int, adapter_id: int) -> None:
        """A sequence with this adapter, 0 for the base, enters a row. ValueError where the adapter cannot be had; waits
        for an adapter that is being read, which happens only after the start of a new Worker."""
        if not adapter_id:
            self._set_row(row, BASE)
            return
        if (future := self._adapters.get(adapter_id)) is None:
            raise EngineError(f"the plan names adapter {adapter_id}, which the Worker does not hold")
        try:
            adapter = future.result()
        except PageserveError as error:
            raise ValueError(f"the adapter cannot be loaded: {error}") from None
        slot = self._slots.pop(adapter_id, None)
        if slot is None:
            slot = self._take_slot()
            self._run(lambda: self.layers.fill(slot, adapter))
        self._slots[adapter_id] = slot
        self._num_rows[slot] += 1
        self._set_row(row, slot)

    def remove(self, row: int) -> None:
        """The sequence of a row has left. Its adapter keeps the slot until another one needs it."""
        slot = int(self.row_slots[row])
        if slot == BASE:
            return
        self._set_row(row, BASE)
        self._num_rows[slot] -= 1
        unloaded = [number for number, own in self._slots.items() if own == slot and number not in self._adapters]
        if unloaded and not self._num_rows[slot]:
            self._free.append(self._slots.pop(unloaded[0]))

    def stage(self, inputs: StepInputs, target_rows: IntArray, put: Put) -> "StagedSlots":
        """The slots of a step's rows; they are valid on the device after the upload that `put` belongs to."""
        slots, targets = self.row_slots[inputs.rows], self.row_slots[target_rows]
        active = self._always or bool((slots >= 0).any())
        counts = np.diff(inputs.ends, prepend=0)
        outputs = inputs.metadata.outputs
        if not active:
            nothing = self.device_slots[:0]
            return StagedSlots(self.layers, nothing, None, nothing, active=False)
        tokens = put(np.repeat(slots, counts))
        return StagedSlots(self.layers, tokens, None if outputs is None else outputs.indices, put(targets), active=True)

    @property
    def has_changes(self) -> bool:
        """True if `enter_changes` has something to do before a step in a bucket."""
        return bool(self._changed)

    def enter_changes(self, put: Put) -> Callable[[], None]:
        """Put the slots of changed rows into the step's upload. The function returned enters them into device_slots;
        call it in the device's queue, after the upload."""
        rows = np.array(sorted(self._changed), np.int64)
        self._changed.clear()
        places, values = put(rows), put(self.row_slots[rows])
        return lambda: _enter(self.device_slots, places, values)

    def warm_up(self, running: bool) -> None:
        """While warm-up steps run, their kernels run too, without an adapter in a slot."""
        self._always = running

    def slots_of(self, rows: Tensor) -> Tensor:
        """On the device: the slots of rows of InputBatch, int64 [n], for a step in a bucket."""
        return self.device_slots.index_select(0, rows)

    def _take_slot(self) -> int:
        if not self._free:
            found = next((number for number, slot in self._slots.items() if not self._num_rows[slot]), None)
            if found is None:
                raise EngineError(f"the plan uses more than max_loras={self.layers.max_loras} adapters at once")
            self._free.append(self._slots.pop(found))
        return self._free.pop()

    def _set_row(self, row: int, slot: int) -> None:
        if self.row_slots[row] != slot:
            self.row_slots[row] = slot
            if self._queue is not None:
                self._changed.add(row)

    def _run(self, work: Callable[[], None]) -> None:
        if self._queue is None:
            work()
        else:
            self._queue.run(work)


@dataclass(frozen=True, slots=True)
class StagedSlots:
    """The slots of one step that runs without a bucket: of its tokens int64 [num_tokens], of the rows that it samples
    int64 [num_targets], and the indices of its output rows. `active` False: no row has an adapter."""

    layers: AdapterLayers
    tokens: Tensor
    outputs: Tensor | None
    targets: Tensor
    active: bool

    def begin_forward(self) -> None:
        """Call it in the device's queue before the forward pass."""
        self.layers.set_rows(self.tokens, self.outputs, self.active)

    def begin_sampling(self) -> None:
        """Call it in the device's queue before compute_logits of the rows to sample."""
        self.layers.set_logits_rows(self.targets, self.active)

    def logits_of(self, compute_logits: Callable[[Tensor], Tensor], rows: Tensor) -> Callable[[Tensor], Tensor]:
        """compute_logits for hidden states of these tokens, which come in order, some at a time."""
        pieces = iter_pieces(rows)

        def compute(hidden: Tensor) -> Tensor:
            slots = self.tokens.index_select(0, pieces(len(hidden))) if self.active else self.tokens
            self.layers.set_logits_rows(slots, self.active)  # also without adapters: an earlier step may have had some
            return compute_logits(hidden)

        return compute


def iter_pieces(rows: Tensor) -> Callable[[int], Tensor]:
    """A function that returns the next `count` of the rows at each call."""
    start = 0

    def take(count: int) -> Tensor:
        nonlocal start
        start += count
        return rows[start - count : start]

    return take


def _answer(message: LoadAdapter, done: Future[PackedAdapter]) -> AdapterLoaded:
    error = done.exception()
    if error is None:
        adapter = done.result()
        return AdapterLoaded(message.adapter_id, adapter.digest, num_bytes=adapter.num_bytes)
    if not isinstance(error, PageserveError):
        logger.error("reading the adapter in %s failed", message.path, exc_info=error)
        return AdapterLoaded(message.adapter_id, error=f"{type(error).__name__}: {error}")
    return AdapterLoaded(message.adapter_id, error=str(error))


def _enter(device_slots: Tensor, places: Tensor, values: Tensor) -> None:
    device_slots.index_copy_(0, places, values)
