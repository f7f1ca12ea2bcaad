"""Room: how many models of a server are awake at the same time, and which one sleeps for another."""

import asyncio
from typing import Protocol


class Occupant(Protocol):
    """A model with its Worker, as the Room sees it (engine/driver.py)."""

    @property
    def num_live_requests(self) -> int: ...

    @property
    def idle_since(self) -> float: ...

    async def wait_idle(self) -> None: ...

    async def vacate(self) -> None: ...


class Room:
    """Lets at most `size` models be awake (engine/requests/sleep.py). For a further one, the least recently used idle
    model sleeps at level 2.

    A model with live requests never sleeps for another: the other waits until one is idle, first come first served.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self._inside: list[Occupant] = []
        self._turn = asyncio.Lock()
        self._left = asyncio.Event()

    async def enter(self, model: Occupant) -> None:
        """Return once the model may load."""
        async with self._turn:
            while len(self._inside) >= self.size:
                await self._make_place()
            self._inside.append(model)

    def leave(self, model: Occupant) -> None:
        """The model has freed its device. Does nothing for a model outside."""
        if model in self._inside:
            self._inside.remove(model)
            self._left.set()

    async def _make_place(self) -> None:
        """Let an idle model sleep, or wait until a model is idle or has left."""
        idle = [model for model in self._inside if not model.num_live_requests]
        self._left.clear()
        if idle:
            waits = [min(idle, key=lambda model: model.idle_since).vacate()]
        else:
            waits = [model.wait_idle() for model in self._inside]
        tasks = [asyncio.ensure_future(wait) for wait in (*waits, self._left.wait())]
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
