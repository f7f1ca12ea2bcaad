"""Card: the limits of a GPU that the tiles of kernels depend on, read from the device or known ahead of time."""

from dataclasses import dataclass, replace
from functools import cache

import torch

KB = 1024
MIN_CAPABILITY = 75  # Turing: the oldest cards that Triton compiles matrix instructions for
BF16_CAPABILITY = 80  # Turing has matrix instructions for fp16 alone
INT8_CAPABILITY = 80  # Triton leaves Turing's matrix instructions for int8 alone, too
E4M3_CAPABILITY = 89  # the first cards that multiply e4m3


@dataclass(frozen=True, slots=True, eq=False)  # compared by identity: tables are looked up with a card at every launch
class Card:
    """The limits of one kind of GPU.

    capability: 10 * major + minor. shared_memory: bytes that one program may use (opt-in). Per SM: shared memory in
    bytes, registers of 32 bits, warps and programs. reserved: bytes of shared memory that the driver takes from each
    program.
    """

    capability: int
    num_sms: int
    shared_memory: int
    shared_memory_per_sm: int
    warps_per_sm: int
    programs_per_sm: int
    registers_per_sm: int = 64 * KB
    reserved: int = 1 * KB

    def matrix_instruction(self, rows: int = 64) -> str:
        """The instruction that Triton multiplies tiles of that many rows with: "wgmma" and "tcgen05" take 64 rows or
        more; "fma" is ordinary arithmetic, because Triton leaves Turing's tensor cores alone since 3.3."""
        family = self.capability // 10
        if family < 8:
            return "fma"
        if rows < 64 or family not in (9, 10, 11):
            return "mma"
        return "wgmma" if family == 9 else "tcgen05"

    def programs(self, shared_memory: int, num_warps: int, registers: int = 0) -> int:
        """Programs of these sizes that an SM holds at once; registers are per thread, 0 if not known. Warps get
        registers in units of 256."""
        found = [self.warps_per_sm // num_warps, self.programs_per_sm]
        if registers:
            found.append(self.registers_per_sm // (-(-registers * 32 // 256) * 256 * num_warps))
        if shared_memory + self.reserved:
            found.append(self.shared_memory_per_sm // (shared_memory + self.reserved))
        return min(found) if shared_memory <= self.shared_memory else 0


# A card of each capability (CUDA programming guide, table of technical specifications per compute capability).
T4 = Card(75, 40, 64 * KB, 64 * KB, warps_per_sm=32, programs_per_sm=16, reserved=0)
A100 = Card(80, 108, 163 * KB, 164 * KB, warps_per_sm=64, programs_per_sm=32)
A10 = Card(86, 72, 99 * KB, 100 * KB, warps_per_sm=48, programs_per_sm=16)
L4 = Card(89, 58, 99 * KB, 100 * KB, warps_per_sm=48, programs_per_sm=24)
H100 = Card(90, 132, 227 * KB, 228 * KB, warps_per_sm=64, programs_per_sm=32)
B200 = Card(100, 148, 227 * KB, 228 * KB, warps_per_sm=64, programs_per_sm=32)
RTX_5090 = Card(120, 170, 99 * KB, 100 * KB, warps_per_sm=48, programs_per_sm=24)
CARDS = {card.capability: card for card in (T4, A100, A10, L4, H100, B200, RTX_5090)}


@cache
def known_card(capability: int) -> Card:
    """The entry of CARDS for a capability; for one that is not listed, the nearest older one."""
    return CARDS[max((c for c in CARDS if c <= capability), default=MIN_CAPABILITY)]


@cache
def read_card(device: torch.device) -> Card:
    """The card of a CUDA device. The interpreter counts as a small A100, so that its tests run with one split and with
    several.

    torch does not tell how many programs an SM holds: the number is that of the nearest older card in CARDS.
    """
    if device.type != "cuda":
        return replace(A100, num_sms=8)
    found = torch.cuda.get_device_properties(device)
    capability = 10 * found.major + found.minor
    return replace(
        known_card(capability),
        capability=capability,
        num_sms=found.multi_processor_count,
        shared_memory=found.shared_memory_per_block_optin,
        shared_memory_per_sm=found.shared_memory_per_multiprocessor,
        registers_per_sm=found.regs_per_multiprocessor,
        warps_per_sm=found.max_threads_per_multi_processor // found.warp_size,
    )
