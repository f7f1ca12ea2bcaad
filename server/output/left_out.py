"""Tools and items that a request names and the model is not told of: a header says it, and the log once per kind."""

import logging
from collections.abc import Sequence

HEADER = "x-pageserve-left-out"
logger = logging.getLogger(__name__)
_told: set[str] = set()  # of a closed list of kinds, so it stays small


def headers_of_left_out(kinds: Sequence[str]) -> dict[str, str]:
    """`kinds`: types of tools that this server cannot run, and of items that it cannot read."""
    for kind in kinds:
        if kind not in _told:
            _told.add(kind)
            logger.warning("requests name %s, which this server cannot run or read: the model is not told of it", kind)
    return {HEADER: ", ".join(kinds)} if kinds else {}
