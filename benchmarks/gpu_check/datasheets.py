"""Datasheet figures of cards: the limits that a model of a step assumes before a card is measured. No torch here."""

from dataclasses import dataclass

from benchmarks.gpu_check.bounds import Limits

# Assumptions, as shares of the datasheet's figure. Readings on one H200: a copy of 8 GB moved 4.3 of 4.8 TB/s, a bf16
# product of 8192^3 ran at 770 to 800 of 989 TFLOP/s. A kernel that only reads gets a little more than a copy.
READ_SHARE, MATMUL_SHARE = 0.92, 0.80


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
