"""StepCosts: the seconds of a decode step by its number of rows, a straight line fitted to the newest steps.

PassCosts adds the passes of a draft model, whose seconds the Worker reports apart.
"""

import math

FORGET = 0.98  # weight of a step relative to the one after it
MIN_STEPS, MIN_VARIANCE = 8.0, 0.5  # a fit needs steps of this weight, whose numbers of rows have this variance
LEARN_MORE, LEARN_LESS = 0.1, 0.5  # weights of a pass that took longer, and less, than the estimate
LARGEST = 2.0  # a step counts at most as so many times the estimate
FADE = 0.998  # per step: a slope that no step confirms goes back to the first estimate, so that drafts are tried again


class StepCosts:
    """Least squares with exponentially decaying weights. Times are relative: only their ratios are used.

    `weight_rows`: the estimate before the fit, that reading the weights takes as long as computing so many rows.
    """

    def __init__(self, weight_rows: float) -> None:
        self._weight_rows = weight_rows
        self._weight = self._rows = self._seconds = 0.0  # weighted means
        self._rows_rows = self._rows_seconds = 0.0  # weighted means of products
        self.fixed, self.per_row = weight_rows, 1.0
        self._known: set[int] = set()  # numbers of rows that occurred
        self._slow: set[int] = set()  # numbers of rows whose last step was slow

    def add(self, rows: int, seconds: float) -> None:
        """Learns the seconds of a step. The first step of a number of rows may record a program, and does not count.
        Nor does a slow one, unless the step of so many rows before it was slow, too: it may record another program."""
        if rows not in self._known:
            self._known.add(rows)
            return
        if self._weight >= MIN_STEPS:
            most = LARGEST * self._unit * (self.fixed + self.per_row * rows)
            if seconds <= most:
                self._slow.discard(rows)
            elif rows not in self._slow:
                self._slow.add(rows)
                return
            seconds = min(seconds, most)
        self._weight = FORGET * self._weight + 1.0
        share = 1.0 / self._weight
        self._rows += share * (rows - self._rows)
        self._seconds += share * (seconds - self._seconds)
        self._rows_rows += share * (rows * rows - self._rows_rows)
        self._rows_seconds += share * (rows * seconds - self._rows_seconds)
        variance = self._rows_rows - self._rows**2
        if self._weight >= MIN_STEPS and variance >= MIN_VARIANCE:
            self._set_slope((self._rows_seconds - self._rows * self._seconds) / variance)
        elif self.per_row * self._weight_rows > self.fixed:
            self._set_slope(FADE * self.per_row)

    def _set_slope(self, slope: float) -> None:
        self.per_row = min(max(slope, 0.0), self._seconds / self._rows)
        self.fixed = self._seconds - self.per_row * self._rows

    @property
    def _unit(self) -> float:
        """Seconds for which `fixed` and `per_row` count 1; 0 before the first step."""
        relative = self.fixed + self.per_row * self._rows
        return self._seconds / relative if relative > 0.0 else 0.0

    @property
    def row_cost(self) -> float:
        """The time of one more row, in the unit of `fixed` and `per_row`."""
        return self.per_row

    def needed(self, rows: int, num_tokens: float) -> float:
        """Returns the least probability at which one more row gains time in a step of `rows` that brings `num_tokens`:
        the row must bring tokens at the step's own rate, seconds(rows) / num_tokens, or better."""
        seconds = self.fixed + self.per_row * rows
        return self.row_cost * num_tokens / seconds if seconds > 0.0 else 1.0

    def rows_within(self, rows: int, growth: float) -> float:
        """Returns how many more rows lengthen a step of `rows` by the share `growth` of its time."""
        return growth * (self.fixed + self.per_row * rows) / self.row_cost if self.row_cost > 0.0 else math.inf


class PassCosts(StepCosts):
    """A draft model computes a token of all drafts of a step in one pass, which `num_sharing` sequences pay for."""

    def __init__(self, weight_rows: float) -> None:
        super().__init__(weight_rows)
        self.num_sharing = 1
        self._pass_seconds: float | None = None

    def add_passes(self, passes: int, seconds: float) -> None:
        """Learns the seconds of some passes. Those of a sequence's first draft also compute its prompt: they count
        little."""
        each = seconds / passes
        known = self._pass_seconds
        if known is None:
            self._pass_seconds = each
        elif each < known:
            self._pass_seconds = known + LEARN_LESS * (each - known)
        else:
            self._pass_seconds = known + LEARN_MORE * (min(each, LARGEST * known) - known)

    @property
    def row_cost(self) -> float:
        if self._pass_seconds is None or (unit := self._unit) <= 0.0:
            return self.per_row
        return self.per_row + self._pass_seconds / (self.num_sharing * unit)
