"""Datasheet figures of cards: the limits that a model of a step assumes before a card is measured. No torch here."""

import json
from dataclasses import dataclass, replace

from benchmarks.gpu_check.bounds import Limits
from benchmarks.gpu_check.card import card_facts
from benchmarks.gpu_check.parts import Setting
from benchmarks.gpu_check.record import Recorder

# Assumptions, as shares of the datasheet's figure. Readings on one H200: a copy of 8 GB moved 4.3 of 4.8 TB/s, a bf16
# product of 8192^3 ran at 770 to 800 of 989 TFLOP/s. A kernel that only reads gets a little more than a copy.
READ_SHARE, MATMUL_SHARE = 0.92, 0.80
LIMITS_FILE = "limits.json"


@dataclass(frozen=True, slots=True)
class Datasheet:
    """bandwidth in bytes/s, rate of dense bf16 products in FLOP/s (half the figure "with sparsity"), L2 cache in bytes.

    All four numbers are the vendor's; `source` names the document.
    """

    name: str
    bandwidth: float
    rate: float
    num_sms: int
    l2_bytes: int
    source: str

    @property
    def limits(self) -> Limits:
        """The ceilings that `gpu_check` is assumed to measure on this card."""
        return Limits(bandwidth=self.bandwidth * READ_SHARE, rate=self.rate * MATMUL_SHARE)


DATASHEETS = {
    sheet.name: sheet
    for sheet in (
        Datasheet("A100", 2.039e12, 312e12, 108, 40 << 20, "NVIDIA A100 datasheet, SXM 80 GB"),
        Datasheet("H100", 3.35e12, 989e12, 132, 50 << 20, "NVIDIA H100 datasheet, SXM 80 GB"),
        Datasheet("H200", 4.8e12, 989e12, 132, 50 << 20, "NVIDIA H200 datasheet, SXM 141 GB"),
        Datasheet("L4", 0.3e12, 121e12, 58, 48 << 20, "NVIDIA L4 datasheet; its 72 W may not sustain the rate"),
    )
}


def datasheet_of(card: str) -> Datasheet:
    """The datasheet whose name is a word of the card's name; the H100's for cards that are not listed."""
    words = card.replace("-", " ").split()
    return next((sheet for name, sheet in DATASHEETS.items() if name in words), DATASHEETS["H100"])


def find_limits(setting: Setting, recorder: Recorder) -> Limits:
    """The results of the part "limits"; the datasheet's where it did not get that far, and the record says so."""
    path = setting.folder / LIMITS_FILE
    measured = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    missing = [name for name in ("bandwidth", "rate") if name not in measured]
    if not missing:
        return Limits(**measured)
    sheet = datasheet_of(str(card_facts().get("name", "")))
    recorder.skip(f"measured limits: {', '.join(missing)}", f"shares are of the {sheet.name}'s datasheet instead")
    return replace(sheet.limits, **measured)


def keep_limits(setting: Setting, **measured: float) -> None:
    """Add results of the part "limits" to those that later parts find."""
    path = setting.folder / LIMITS_FILE
    fields = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    fields["bandwidth"] = max(fields.get("bandwidth", 0.0), measured.pop("bandwidth", 0.0))
    if not fields["bandwidth"]:
        del fields["bandwidth"]
    path.write_text(json.dumps(fields | measured), encoding="utf-8")
