"""A row of the table of claims."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Row:
    """A claim, our figure and the one beside it. `aim`: the least ours / other, or the most with `at_most`; None: the
    ratio is shown, and nothing was promised. `note`: the work, or what else was seen."""

    claim: str
    unit: str
    ours: float
    other: float
    other_name: str
    aim: float | None = None
    at_most: bool = False
    note: str = ""

    @property
    def ratio(self) -> float:
        return self.ours / self.other

    @property
    def held(self) -> bool | None:
        """Whether the aim was reached; None without one."""
        if self.aim is None:
            return None
        return self.ratio <= self.aim if self.at_most else self.ratio >= self.aim

    def line(self) -> str:
        """The row as text."""
        sign = "<=" if self.at_most else ">="
        aim = "" if self.aim is None else f"{sign} {self.aim:g} {'held' if self.held else 'missed'}"
        figures = f"{self.ours:10.1f} {self.other:10.1f} {self.ratio:7.2f}"
        return f"{self.claim:34} {self.unit:16} {figures}  {aim:13} {self.other_name}; {self.note}"


HEADING = f"{'claim':34} {'unit':16} {'ours':>10} {'other':>10} {'ratio':>7}  {'aim':13} the other; work"
