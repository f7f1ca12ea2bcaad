"""Rows of bad input: a request with `fields` in place of those of a good one is a 400."""

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

HUGE = 10**60
LONG = "x" * 300_000


class Bad(NamedTuple):
    """The error names `param` (None: the only field, or a place in it). Its message holds `words`, else the field."""

    fields: dict[str, Any]
    param: str | None = None
    words: str = ""
    code: str | None = None

    @property
    def field(self) -> str:
        """The top-level field that the error names."""
        return (self.param or next(iter(self.fields))).split(".")[0].split("[")[0]


def values(table: Mapping[str, Iterable[Any]]) -> list[Bad]:
    """A row for each wrong value of each field."""
    return [Bad({field: value}) for field, wrong in table.items() for value in wrong]


def rows(table: Iterable[tuple[Any, ...]]) -> list[Bad]:
    """A row for each (fields, param[, words])."""
    return [Bad(*row) for row in table]
