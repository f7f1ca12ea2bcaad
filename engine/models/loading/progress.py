"""LoadingProgress: a bar on a terminal, a log line every few seconds elsewhere, and a phase for every tenth."""

import logging
import sys
import time
from collections.abc import Callable

from tqdm import tqdm

LOG_SECONDS = 5.0

logger = logging.getLogger(__name__)


class LoadingProgress:
    """Counts the bytes that are read of `total`. `report` gets the phase, such as "loading weights 40%"."""

    def __init__(self, total: int, report: Callable[[str], None]) -> None:
        self.total, self.done = max(total, 1), 0
        self._report, self._tenth = report, -1
        self._started = self._logged = time.monotonic()
        self._on_terminal = sys.stderr.isatty()
        self._bar = tqdm(
            total=total, desc="loading weights", unit="B", unit_scale=True, leave=False, disable=not self._on_terminal
        )

    def add(self, num_bytes: int) -> None:
        """Count bytes that are read."""
        self.done += num_bytes
        self._bar.update(num_bytes)
        tenth = self.done * 10 // self.total
        if tenth != self._tenth:
            self._tenth = tenth
            self._report(f"loading weights {tenth * 10}%")
        now = time.monotonic()
        if not self._on_terminal and now - self._logged >= LOG_SECONDS:
            self._logged = now
            logger.info("loading weights: %.1f of %.1f GB", self.done / 1e9, self.total / 1e9)

    def close(self) -> None:
        """End the bar, and log the time that loading took."""
        self._bar.close()
        logger.info("loaded %.2f GB of weights in %.1f s", self.done / 1e9, time.monotonic() - self._started)
