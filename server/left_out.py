"""The header x-pageserve-left-out: tools and parts of the history that the prompt omits."""

import logging
from collections.abc import Sequence

HEADER = "x-pageserve-left-out"

logger = logging.getLogger(__name__)
_logged: set[str] = set()  # kinds that the log has named; the list of kinds is closed, so the set stays small


def left_out_headers(kinds: Sequence[str]) -> dict[str, str]:
    """A header that names the tools and items that the model is not told of; the log names each kind once.

    `kinds`: types of tools that this server cannot run, and of items that it cannot read.
    """
    for kind in kinds:
        if kind not in _logged:
            _logged.add(kind)
            logger.warning("requests name %s, which this server cannot run or read: the model is not told of it", kind)
    return {HEADER: ", ".join(kinds)} if kinds else {}
