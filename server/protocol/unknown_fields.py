"""Fields that no API knows: a 400, or with `--ignore-unknown-fields` left out and told of.

What was left out is collected in the context of the request (server/http/ignored_fields.py makes it). Names come from
clients, so what is kept of them is bounded: in a request here, in the log there.
"""

from contextvars import ContextVar

from pydantic_core import PydanticCustomError

MAX_NAMES = 16  # of a request; the rest is counted
MAX_NAME_CHARS = 64


class IgnoredFields:
    """Of one request: the first names, and how many fields there were in all."""

    def __init__(self) -> None:
        self.names: dict[str, None] = {}
        self.count = 0

    def add(self, name: str) -> None:
        self.count += 1
        if len(self.names) < MAX_NAMES:
            self.names[name[:MAX_NAME_CHARS]] = None


collected: ContextVar[IgnoredFields | None] = ContextVar("ignored_fields", default=None)


def field_error(code: str, text: str, *path: str | int) -> PydanticCustomError:
    """An error of the field at `path` below the one under validation; `text` follows the field's name."""
    return PydanticCustomError(code, "{text}", {"text": text, "path": path})


def is_ignored(name: str) -> bool:
    """Whether the server ignores unknown fields; then this one is noted."""
    ignored = collected.get()
    if ignored is not None:
        ignored.add(name)
    return ignored is not None


def unknown_field(text: str, *path: str | int) -> None:
    """Raise the error of an unknown field at `path`; return where it is ignored, for the caller to leave it out."""
    if not is_ignored(str(path[-1])):
        raise field_error("unknown_parameter", text, *path)
