"""Adapters: the LoRA adapters of a model by name, from their loading to the end of the last stream that uses them.

The Worker reads an adapter and answers with the digest of its files; from then on the name may be used. Every next
Worker reads all adapters again, and the files must be the same. A name that is unloaded is gone at once; the adapter
stays in the Worker until its last request has ended.
"""

import asyncio
import itertools
import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from engine.config import ADAPTER_NAME, EngineConfig
from engine.errors import EngineError, InvalidRequestError, ModelError, PageserveError, WorkerDiedError
from engine.executor.step import AdapterLoaded, LoadAdapter, UnloadAdapter
from engine.request import Adapter

FILES = ("adapter_config.json", "adapter_model.safetensors", "adapter_model.bin")
NOT_FOUND = "model_not_found"
MAX_DEATHS = 2  # an adapter is given up after the deaths of so many Workers that read it for the first time

logger = logging.getLogger(__name__)

Send = Callable[[LoadAdapter | UnloadAdapter], None]


@dataclass(slots=True)
class LoadedAdapter:
    """An adapter that is loaded or being loaded (then `digest` is empty); `waiter` gets the end of the loading.
    `num_deaths` counts Workers that died while they read it."""

    adapter_id: int
    name: str
    path: str
    digest: bytes = b""
    num_live: int = 0
    num_deaths: int = 0
    unloaded: bool = False
    error: str = ""
    waiter: asyncio.Future[None] = field(default_factory=lambda: asyncio.get_running_loop().create_future())

    @property
    def adapter(self) -> Adapter:
        return Adapter(self.adapter_id, self.name, self.name.encode() + b"\0" + self.digest)


class Adapters:
    """Made once the model has loaded; serves for as long as its requests."""

    def __init__(self, config: EngineConfig) -> None:
        self._config = config
        self._numbers = itertools.count(1)  # 0 is the base model
        self._by_id: dict[int, LoadedAdapter] = {}
        self._by_name: dict[str, LoadedAdapter] = {}
        self._send: Send | None = None
        self._ended: PageserveError | None = None
        for name, path in config.adapters.items():
            self._new(name, str(Path(path).resolve()))

    @property
    def paths(self) -> dict[str, str]:
        """The folders of the adapters that requests may name, by name."""
        return {name: entry.path for name, entry in self._by_name.items() if entry.digest}

    def count(self, adapter_ids: list[int]) -> dict[str, int]:
        """How often each adapter occurs in a list of ids, by name."""
        counts: dict[str, int] = {}
        for adapter_id in adapter_ids:
            if (entry := self._by_id.get(adapter_id)) is not None:
                counts[entry.name] = counts.get(entry.name, 0) + 1
        return counts

    # Workers.

    def attach(self, send: Send) -> None:
        """A Worker is ready: it gets every adapter before the first plan. Called again for the same Worker, it changes
        nothing."""
        if self._send is None:
            self._send = send
            for entry in self._by_id.values():
                send(LoadAdapter(entry.adapter_id, entry.path, entry.digest))

    def detach(self) -> None:
        """The Worker is gone, or sleeps."""
        self._send = None

    def worker_died(self, death: PageserveError) -> None:
        """The Worker is gone. An adapter that was being read at MAX_DEATHS deaths that did not come from outside may be
        their cause, such as one too many for the memory: no other Worker gets it."""
        self.detach()
        if isinstance(death, WorkerDiedError) and death.from_outside:
            return
        for entry in [entry for entry in self._by_id.values() if not entry.digest]:
            entry.num_deaths += 1
            if entry.num_deaths >= MAX_DEATHS:
                message = f"The Worker dies while it reads the adapter {entry.name!r}: {death}."
                self._give_up(entry, EngineError(message))

    @property
    def starting(self) -> bool:
        """True while an adapter is being loaded for the first time."""
        return any(not entry.digest for entry in self._by_id.values())

    def answered(self, message: AdapterLoaded) -> None:
        """The Worker has read an adapter, or could not."""
        entry = self._by_id.get(message.adapter_id)
        if entry is None:
            return
        entry.error = message.error
        if not message.error:
            entry.digest = message.digest
            logger.info("adapter %s is loaded: %d bytes, from %s", entry.name, message.num_bytes, entry.path)
            _settle(entry, None)
        elif entry.digest:
            logger.error("adapter %s cannot be loaded again: %s", entry.name, message.error)
        else:
            self._give_up(entry, ModelError(f"lora {entry.name}: {message.error}"))

    # Requests.

    def hold(self, name: str) -> Adapter:
        """The adapter that a new request names. InvalidRequestError for an unknown name; EngineError for an adapter
        that the present Worker could not load."""
        entry = self._by_name.get(name)
        if entry is None or not entry.digest:
            raise InvalidRequestError(f"There is no adapter {name[:128]!r}.", "model", NOT_FOUND)
        if entry.error:
            raise EngineError(f"The adapter {name!r} cannot be loaded any more: {entry.error}.")
        entry.num_live += 1
        return entry.adapter

    def hold_as(self, adapter: Adapter) -> Adapter | None:
        """Hold the weights of another replica's `adapter` for a request that comes from there. Returns None if they are
        not here: their name may belong to others by now."""
        same = (one for one in self._by_id.values() if one.adapter.version == adapter.version and not one.error)
        entry = next(same, None)
        if entry is None:
            return None
        entry.num_live += 1
        return entry.adapter

    def release(self, adapter: Adapter) -> None:
        """A request that held the adapter has ended, or has left."""
        entry = self._by_id[adapter.adapter_id]
        entry.num_live -= 1
        self._forget_unused(entry)

    # Loading at run time.

    async def load(self, name: str, path: str) -> None:
        """Load an adapter; returns once requests may name it. Raises InvalidRequestError for a wrong name or path, and
        for an adapter that is not served; EngineError if Workers die of it; the error of an engine that ends."""
        if not ADAPTER_NAME.fullmatch(name):
            raise InvalidRequestError("lora_name has 1 to 128 letters, digits and . : @ / _ -.", "lora_name")
        folder = await asyncio.to_thread(self._folder, path)
        if self._ended is not None:
            raise self._ended
        if name in self._by_name:
            raise InvalidRequestError(f"The adapter {name!r} is loaded already; unload it first.", "lora_name")
        entry = self._new(name, folder)
        if self._send is not None:
            self._send(LoadAdapter(entry.adapter_id, entry.path))
        try:
            await asyncio.shield(entry.waiter)
        except ModelError as error:
            raise InvalidRequestError(str(error), "lora_path") from None

    def fail_all(self, error: PageserveError) -> None:
        """The engine ends: so does every `load` that still waits, with this error."""
        self._ended = error
        for entry in self._by_id.values():
            _settle(entry, error)

    def unload(self, name: str) -> None:
        """Forget a name; requests that use it go on. InvalidRequestError if no adapter has it."""
        entry = self._by_name.get(name)
        if entry is None or not entry.digest:
            raise InvalidRequestError(f"There is no adapter {name[:128]!r}.", "lora_name", NOT_FOUND)
        del self._by_name[name]
        entry.unloaded = True
        self._forget_unused(entry)

    def _new(self, name: str, path: str) -> LoadedAdapter:
        entry = LoadedAdapter(next(self._numbers), name, path)
        self._by_id[entry.adapter_id] = self._by_name[name] = entry
        return entry

    def _give_up(self, entry: LoadedAdapter, error: PageserveError) -> None:
        """End the loading of an adapter that no request has named yet."""
        del self._by_name[entry.name]
        self._forget(entry)
        _settle(entry, error)

    def _forget_unused(self, entry: LoadedAdapter) -> None:
        if entry.unloaded and not entry.num_live:
            self._forget(entry)

    def _forget(self, entry: LoadedAdapter) -> None:
        del self._by_id[entry.adapter_id]
        if self._send is not None:
            self._send(UnloadAdapter(entry.adapter_id))

    def _folder(self, path: str) -> str:
        """The folder with all links resolved. InvalidRequestError unless it and its files are inside lora_root."""
        assert self._config.lora_root is not None, "allow_runtime_lora requires it"
        root = Path(self._config.lora_root).resolve()
        outside = InvalidRequestError("lora_path must be a folder inside --lora-root.", "lora_path")
        try:
            folder = (root / path).resolve()
            found = [folder, *((folder / name).resolve() for name in FILES)]
            if not all(file.is_relative_to(root) for file in found) or folder == root or not folder.is_dir():
                raise outside
        except (OSError, ValueError, RuntimeError):  # too long, a null byte, a circle of links
            raise outside from None
        return str(folder)


def _settle(entry: LoadedAdapter, error: PageserveError | None) -> None:
    if entry.waiter.done():
        return
    if error is None:
        entry.waiter.set_result(None)
    else:
        entry.waiter.set_exception(error)
        entry.waiter.exception()  # marks it as retrieved: the client may have left
