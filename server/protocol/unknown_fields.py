"""Fields that no API knows: an error (400) or, with `--ignore-unknown-fields`, dropped and reported.

The names of dropped fields are collected in a context variable that server/http/ignored_fields.py sets per request.
Clients choose the names, so what is kept of them is bounded: per request here, in the log there.
"""

from contextvars import ContextVar

MAX_NAMES = 16  # names kept per request; further ones are only counted
MAX_NAME_CHARS = 64


class IgnoredFields:
    """The dropped fields of one request: the first MAX_NAMES names, and the number of all."""

    def __init__(self) -> None:
        self.names: dict[str, None] = {}
        self.count = 0

    def add(self, name: str) -> None:
        self.count += 1
        if len(self.names) < MAX_NAMES:
            self.names[name[:MAX_NAME_CHARS]] = None


collected: ContextVar[IgnoredFields | None] = ContextVar("ignored_fields", default=None)


def is_ignored(name: str) -> bool:
    """True if the server ignores unknown fields; `name` is then added to the request's list."""
    ignored = collected.get()
    if ignored is not None:
        ignored.add(name)
    return ignored is not None
