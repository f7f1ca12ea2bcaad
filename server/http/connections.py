"""The connections of the server: how many there may be, which of them go first, and which nobody reads from.

A connection is a stranger's until a request on it has shown a valid key, or, where there are no keys, has asked for
more than the public routes. Where there are too many the stranger's that has been silent for longest is cut, then a
known one without a request under way; only where there is neither a new one is turned away. So connections without a
key never keep one with a key out, and the descriptors that the server itself needs (a new Worker, a process that
compiles grammars) stay free.
"""

import logging
import os
import resource
from collections import Counter, OrderedDict
from contextlib import suppress
from typing import Protocol

logger = logging.getLogger(__name__)

MAX_DESCRIPTORS = 1 << 20  # where there is no limit to speak of
MAX_CONNECTIONS = 20_000
RESERVE = 64  # descriptors for a Worker that starts, processes that compile grammars, files
MIN_CONNECTIONS = 16
MAX_BACKLOG = 2048


class Connection(Protocol):
    """`is_idle`: no request is under way, whatever may still have to be sent of the last answer."""

    @property
    def is_idle(self) -> bool: ...
    @property
    def address(self) -> str: ...
    def cut(self) -> None: ...
    def cut_if_stalled(self) -> None: ...


class Connections:
    """`most` at a time, and `most_per_address` of one client's address (None: as many)."""

    def __init__(self, most: int, most_per_address: int | None = None) -> None:
        self._most, self._most_per_address = most, most_per_address
        # Both in the order of their last requests.
        self._strangers: OrderedDict[Connection, None] = OrderedDict()
        self._known: OrderedDict[Connection, None] = OrderedDict()
        self._addresses: Counter[str] = Counter()

    def __len__(self) -> int:
        return len(self._strangers) + len(self._known)

    @property
    def num_addresses(self) -> int:
        """How many client addresses hold connections."""
        return len(self._addresses)

    def open(self, connection: Connection) -> bool:
        """Take a new one; False where there is no room for it. Either way it must be closed by `close`."""
        address = connection.address
        self._addresses[address] += 1
        self._strangers[connection] = None
        if self._most_per_address is not None and self._addresses[address] > self._most_per_address:
            return self._make_room(connection, address)
        return len(self) <= self._most or self._make_room(connection, None)

    def close(self, connection: Connection) -> None:
        """It has ended; a second time that means nothing."""
        if connection in self._strangers or connection in self._known:
            self._strangers.pop(connection, None)
            self._known.pop(connection, None)
            address = connection.address
            self._addresses[address] -= 1
            if not self._addresses[address]:
                del self._addresses[address]

    def begin(self, connection: Connection) -> None:
        """A request begins on it."""
        for connections in (self._strangers, self._known):
            if connection in connections:
                connections.move_to_end(connection)

    def recognise(self, connection: Connection) -> None:
        """It is no stranger's any more."""
        if connection in self._strangers:
            del self._strangers[connection]
            self._known[connection] = None

    def sweep(self) -> None:
        """Cut those that nobody reads from; to be called every few seconds."""
        for connection in (*self._strangers, *self._known):
            connection.cut_if_stalled()

    def _make_room(self, new: Connection, address: str | None) -> bool:
        """Cut another one, of this address where it is not None."""

        def may_go(one: Connection) -> bool:
            return one is not new and (address is None or one.address == address)

        victim = next(filter(may_go, self._strangers), None)
        victim = victim or next((one for one in self._known if one.is_idle and may_go(one)), None)
        if victim is None:
            return False
        self.close(victim)
        victim.cut()
        return True


def raise_descriptor_limit() -> int:
    """The soft limit of open files becomes the hard one; returns it. What is started later inherits it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = MAX_DESCRIPTORS if hard == resource.RLIM_INFINITY else min(hard, MAX_DESCRIPTORS)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        with suppress(OSError, ValueError):  # some systems have a lower limit of their own
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
            soft = wanted
    return MAX_DESCRIPTORS if soft == resource.RLIM_INFINITY else soft


def backlog(descriptors: int) -> int:
    """How many connections the kernel may hold that were not accepted: at worst they come all at once."""
    return max(MIN_CONNECTIONS, min(MAX_BACKLOG, descriptors // 8))


def room_for_connections(descriptors: int) -> int:
    """What a limit of so many open files leaves for connections."""
    room = descriptors - RESERVE - backlog(descriptors)
    with suppress(OSError):
        room -= len(os.listdir("/proc/self/fd"))
    if room < MIN_CONNECTIONS:
        logger.warning("the limit of open files leaves no room for more than %d connections", MIN_CONNECTIONS)
    return max(MIN_CONNECTIONS, min(MAX_CONNECTIONS, room))
