"""SleepSwitch: the level of sleep that was asked for, and the tasks that wait for a change. The Driver acts on it.

A model sleeps in order: the plans under way are computed, cached prefixes move to the host or disk tier, and the Worker
leaves its device. The Driver keeps the journal, so live requests wait and go on after the wake as after the death of a
Worker. At level 1 the Worker's process stays and keeps the weights in host memory; at level 2 the process ends.
"""

import asyncio
from collections.abc import Callable
from typing import Any, Protocol


class Room(Protocol):
    """Bounds the models that are awake at the same time (server/room.py)."""

    async def enter(self, model: Any) -> None:
        """Return once the model may load."""

    def leave(self, model: Any) -> None:
        """The model has freed its device, or has ended."""


class SleepSwitch:
    """`asked` is the level to sleep at, None to be awake. `level` is that of the sleep that has begun, 0 for none;
    `told` is True once the Worker knows of it, `asleep` once the device is free. `fetching`: after the wake, blocks of
    live requests are on their way from the disk."""

    def __init__(self) -> None:
        self.asked: int | None = None
        self.level = 0
        self.told = self.asleep = self.fetching = False
        self._changed = asyncio.Event()

    @property
    def plans_stop(self) -> bool:
        """True from the moment that a sleep is asked for until the next Worker can go on with the live requests."""
        return self.asked is not None or self.level > 0 or self.fetching

    @property
    def settled(self) -> bool:
        """True if the model sleeps as deeply as was asked, or nobody asks any more."""
        return self.asked is None or (self.asleep and self.level >= self.asked)

    def set(self, level: int | None) -> None:
        """Ask for a level, or for a wake (None)."""
        if level != self.asked:
            self.asked = level
            self.notify()

    def end(self) -> None:
        """A Worker is ready."""
        self.level, self.told, self.asleep, self.fetching = 0, False, False, False

    def notify(self) -> None:
        """Let every task of `until` look again."""
        self._changed.set()
        self._changed = asyncio.Event()

    async def until(self, reached: Callable[[], bool]) -> None:
        """Return once `reached()` is true, which is looked at after each change."""
        while not reached():
            await self._changed.wait()
