"""Limits the number of connections: decides which connection is closed to make room, and closes stalled ones.

A connection is known once a request on it had a valid key or, without keys, asked for a route that is not public; until
then the client is a stranger. If there are too many connections, the stranger's connection that was silent longest is
closed, else a known one without a running request, else the new one is refused. So connections without a key never keep
clients with a key out, and the descriptors that the server itself needs (a new Worker, a process that compiles
grammars) stay free.
"""

import logging
import os
import resource
from collections import Counter, OrderedDict
from contextlib import suppress
from typing import Protocol

logger = logging.getLogger(__name__)

MAX_DESCRIPTORS = 1 << 20  # used if the operating system sets no limit
MAX_CONNECTIONS = 20_000
RESERVE = 64  # descriptors for a new Worker, processes that compile grammars, files
MIN_CONNECTIONS = 16
MAX_BACKLOG = 2048


class Connection(Protocol):
    """`is_idle`: no request is running; bytes of the last answer may still wait to be sent."""

    @property
    def is_idle(self) -> bool: ...
    @property
    def address(self) -> str: ...
    def cut(self) -> None: ...
    def cut_if_stalled(self) -> None: ...


class Connections:
    """Holds at most `most` connections, of which at most `most_per_address` have the same address (None: no limit)."""

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
        """Adds a connection; False if there is no room for it. In both cases the caller must call `close` later."""
        address = connection.address
        self._addresses[address] += 1
        self._strangers[connection] = None
        if self._most_per_address is not None and self._addresses[address] > self._most_per_address:
            return self._make_room(connection, address)
        return len(self) <= self._most or self._make_room(connection, None)

    def close(self, connection: Connection) -> None:
        """Removes a connection that has ended. A second call has no effect."""
        if connection in self._strangers or connection in self._known:
            self._strangers.pop(connection, None)
            self._known.pop(connection, None)
            address = connection.address
            self._addresses[address] -= 1
            if not self._addresses[address]:
                del self._addresses[address]

    def begin(self, connection: Connection) -> None:
        """Marks the start of a request: the connection is now the one used last."""
        for connections in (self._strangers, self._known):
            if connection in connections:
                connections.move_to_end(connection)

    def recognise(self, connection: Connection) -> None:
        """Marks a connection as known: its client is no stranger any more."""
        if connection in self._strangers:
            del self._strangers[connection]
            self._known[connection] = None

    def sweep(self) -> None:
        """Cuts connections whose client does not read. Call it every few seconds."""
        for connection in (*self._strangers, *self._known):
            connection.cut_if_stalled()

    def _make_room(self, new: Connection, address: str | None) -> bool:
        """Cuts another connection, one of `address` if that is not None. False if none may be cut."""

        def may_cut(other: Connection) -> bool:
            return other is not new and (address is None or other.address == address)

        victim = next(filter(may_cut, self._strangers), None)
        victim = victim or next((other for other in self._known if other.is_idle and may_cut(other)), None)
        if victim is None:
            return False
        self.close(victim)
        victim.cut()
        return True


def raise_descriptor_limit() -> int:
    """Raises the soft limit of open files to the hard limit and returns it. Processes started later inherit it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = MAX_DESCRIPTORS if hard == resource.RLIM_INFINITY else min(hard, MAX_DESCRIPTORS)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        with suppress(OSError, ValueError):  # some systems have a lower limit of their own
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
            soft = wanted
    return MAX_DESCRIPTORS if soft == resource.RLIM_INFINITY else soft


def backlog(descriptors: int) -> int:
    """Number of connections that the kernel may queue before they are accepted: clients may connect all at once."""
    return max(MIN_CONNECTIONS, min(MAX_BACKLOG, descriptors // 8))


def room_for_connections(descriptors: int) -> int:
    """Number of connections that a limit of `descriptors` open files allows."""
    room = descriptors - RESERVE - backlog(descriptors)
    with suppress(OSError):
        room -= len(os.listdir("/proc/self/fd"))
    if room < MIN_CONNECTIONS:
        logger.warning("the limit of open files leaves no room for more than %d connections", MIN_CONNECTIONS)
    return max(MIN_CONNECTIONS, min(MAX_CONNECTIONS, room))
