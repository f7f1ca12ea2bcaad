"""The table of cosines and sines that the rotary kernels read, from plain or scaled frequencies; ALiBi's slopes; the
factors of queries by position.

RoPE: Su et al. 2021. "linear": position interpolation, Chen et al. 2023. "yarn": Peng et al. 2023, section 3.
"llama3": Grattafiori et al. 2024, whose published code is the only complete definition. "longrope": Ding et al. 2024.
ALiBi: Press et al. 2022. Factors of queries: Nakanishi 2025, as Llama 4 has them.
"proportional": Gemma 4's full attention (transformers, modeling_rope_utils).
"ntk": Hunyuan's fixed alpha (transformers, hunyuan_v1_dense), the rule of "dynamic" without a sequence length.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from engine.models.config import ModelConfig, RopeScaling

ROWS_AT_A_TIME = 1 << 16


@dataclass(frozen=True, slots=True)
class PositionTables:
    """Tables on the device that all layers share; each is None in a model without its mechanism.

    cos_sin: see cos_sin_table; window_cos_sin: the one of layers with a window, the same one if they rotate alike.
    alibi_slopes, query_scales: see the functions of these names.
    """

    cos_sin: Tensor | None
    window_cos_sin: Tensor | None
    alibi_slopes: Tensor | None
    query_scales: Tensor | None

    def rotation(self, config: ModelConfig, layer: int) -> Tensor | None:
        """The cosines and sines of a layer; None for a layer without rotary embedding."""
        if layer in config.nope_layers:
            return None
        return self.window_cos_sin if config.window(layer) else self.cos_sin


def position_tables(config: ModelConfig, num_positions: int, device: torch.device) -> PositionTables:
    """The tables for sequences of up to num_positions tokens."""
    cos_sin = window_cos_sin = None
    if config.position == "rope":
        cos_sin = window_cos_sin = cos_sin_table(config.full_rope(), num_positions, device)
        window_rope = config.window_rope()
        if window_rope is not None:
            window_cos_sin = cos_sin_table(window_rope, num_positions, device)
    slopes, scales = alibi_slopes(config, device), query_scales(config, num_positions, device)
    return PositionTables(cos_sin, window_cos_sin, slopes, scales)


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
    if scaling.kind == "proportional":
        turning = int(scaling.rotated_share * config.rotary_dim // 2)
        return frequencies / scaling.factor * (torch.arange(len(frequencies)) < turning)
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


def alibi_slopes(config: ModelConfig, device: torch.device) -> Tensor | None:
    """fp32 [num_heads]: a score falls by slope * (query position - key position). None without ALiBi. A rank of a
    tensor-parallel group has the slopes of its own heads.

    With n heads, a power of two, head h has 2 ** (-alibi_bias_max * (h + 1) / n). With another n, the slopes are those
    of the next power of two: every second one first, from the second on, then the others from the first on, as far as
    needed (the rule of BLOOM and MPT). alibi_scaled: the slopes are multiplied by softmax_scale.
    """
    if config.position != "alibi":
        return None
    num_ranks, rank = (1, 0) if config.shard is None else (config.shard.size, config.shard.rank)
    num_heads = config.num_heads * num_ranks
    count = 1 << (num_heads - 1).bit_length()
    slopes = 2.0 ** (torch.arange(1, count + 1, dtype=torch.float32) * (-config.alibi_bias_max / count))
    if count != num_heads:
        slopes = torch.cat([slopes[1::2], slopes[::2]])[:num_heads]
    slopes = slopes[rank * config.num_heads : (rank + 1) * config.num_heads]
    return (slopes * (config.softmax_scale if config.alibi_scaled else 1.0)).to(device)


def query_scales(config: ModelConfig, num_positions: int, device: torch.device) -> Tensor | None:
    """fp32 [num_positions]: the factors of queries by position, see QueryScaling; None if the model has none."""
    scaling = config.query_scaling
    if scaling is None:
        return None
    positions = torch.arange(num_positions, dtype=torch.float32, device=device)
    return torch.log1p(torch.floor((positions + scaling.offset) / scaling.period)) * scaling.factor + 1.0
