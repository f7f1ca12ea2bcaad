"""The table of cosines and sines that the rotary kernels read, from plain or scaled frequencies.

RoPE: Su et al. 2021. "linear": position interpolation, Chen et al. 2023. "yarn": Peng et al. 2023, section 3.
"llama3": Grattafiori et al. 2024, whose published code is the only complete definition. "longrope": Ding et al. 2024.
"ntk": Hunyuan's fixed alpha (transformers, hunyuan_v1_dense), the rule of "dynamic" without a sequence length.
"""

import math

import torch
from torch import Tensor

from engine.models.config import ModelConfig, RopeScaling

ROWS_AT_A_TIME = 1 << 16


def cos_sin_table(config: ModelConfig, num_positions: int, device: torch.device) -> Tensor:
    """fp32 [num_positions, rotary_dim]: the cosines of rotary_dim / 2 angles, then the sines.

    The table is computed in fp32 on the CPU, like in transformers, so that positions in the thousands agree to the last
    bit. It is computed in pieces, because the intermediate tensors take five times the memory of the table.
    """
    frequencies = rotary_frequencies(config, num_positions)
    scale = config.rope_scaling.attention_factor if config.rope_scaling else 1.0
    table = torch.empty((num_positions, config.rotary_dim), dtype=torch.float32, device=device)
    for start in range(0, num_positions, ROWS_AT_A_TIME):
        positions = torch.arange(start, min(start + ROWS_AT_A_TIME, num_positions), dtype=torch.float32)
        angles = positions[:, None] * frequencies[None, :]
        table[start : start + len(positions)] = torch.cat([angles.cos(), angles.sin()], dim=-1) * scale
    return table


def rotary_frequencies(config: ModelConfig, num_positions: int) -> Tensor:
    """fp32 [rotary_dim / 2] in radians per position, for sequences of up to num_positions tokens."""
    exponents = torch.arange(0, config.rotary_dim, 2, dtype=torch.float32) / config.rotary_dim
    periods = config.rope_theta**exponents
    frequencies = 1.0 / periods
    scaling = config.rope_scaling
    if scaling is None:
        return frequencies
    if scaling.kind == "ntk":
        return frequencies / scaling.factor ** (exponents * (config.rotary_dim / (config.rotary_dim - 2)))
    if scaling.kind == "linear":
        return frequencies / scaling.factor
    if scaling.kind == "llama3":
        return _llama3(frequencies, scaling)
    if scaling.kind == "longrope":
        long = config.has_long_rope(num_positions)
        return 1.0 / (torch.tensor(scaling.long_factors if long else scaling.short_factors) * periods)
    return _yarn(frequencies, config, scaling)


def _llama3(frequencies: Tensor, scaling: RopeScaling) -> Tensor:
    """Divide slow frequencies by the factor, keep fast ones, blend between; by turns within the trained length."""
    turns = scaling.original_max_position * frequencies / (2 * math.pi)
    keep = (turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
    keep = keep.clamp(0.0, 1.0)
    return (1 - keep) * frequencies / scaling.factor + keep * frequencies


def _yarn(frequencies: Tensor, config: ModelConfig, scaling: RopeScaling) -> Tensor:
    """Keep pairs with more than beta_fast turns in the trained length; divide those with less than beta_slow turns."""

    def pair_with(turns: float) -> float:
        wavelength_ratio = scaling.original_max_position / (turns * 2 * math.pi)
        return config.rotary_dim * math.log(wavelength_ratio) / (2 * math.log(config.rope_theta))

    first, last = pair_with(scaling.beta_fast), pair_with(scaling.beta_slow)
    if scaling.truncate:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, config.rotary_dim - 1)
    pairs = torch.arange(config.rotary_dim // 2, dtype=torch.float32)
    divide = ((pairs - first) / max(last - first, 0.001)).clamp(0.0, 1.0)
    return frequencies / scaling.factor * divide + frequencies * (1 - divide)
