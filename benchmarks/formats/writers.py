"""Every layout of quantised checkpoints: quantization_config, and the tensors of a matrix rounded to nearest."""

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from benchmarks.formats.rounding import (
    E2M1,
    E4M3_MAX,
    block_peaks,
    grouped,
    in_order,
    integers,
    nearest,
    nibbles,
    shuffled,
    spread,
    words,
)

Tensors = dict[str, Tensor]
# A matrix fp32 [out, in] -> its tensors by the ending of their names, and the matrix that they mean, fp32.
Writer = Callable[[Tensor], tuple[Tensors, Tensor]]

FP4_TABLE = torch.tensor([*E2M1, *(-value for value in E2M1)])
# The code of bitsandbytes's nf4: quantiles of a normal distribution (Dettmers et al. 2023, appendix E).
NF4 = (
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635, -0.18477343022823334,
    -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
    0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
)  # fmt: skip


@dataclass(frozen=True)
class Layout:
    """One row of the table: a kind of checkpoint."""

    config: dict[str, Any]  # quantization_config
    write: Writer


def write_checkpoint(source: Path, target: Path, layout: Layout, skipped: tuple[str, ...] = ()) -> dict[str, Tensor]:
    """A copy of a plain checkpoint of one file with the matrices of its layers in a layout.

    skipped: parts of the names of modules that stay plain. Returns what the copy means: its plain tensors, fp32.
    """
    target.mkdir(parents=True, exist_ok=True)
    stored: Tensors = {}
    meant: Tensors = {}
    for name, tensor in load_file(source / "model.safetensors").items():
        module = name.removesuffix(".weight")
        if ".layers." not in name or tensor.dim() != 2 or any(part in name for part in skipped):
            stored[name], meant[name] = tensor, tensor.float()
            continue
        tensors, meant[name] = layout.write(tensor.float())
        stored |= {module + ending: part.contiguous() for ending, part in tensors.items()}
    save_file(stored, target / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((source / "config.json").read_text())
    (target / "config.json").write_text(json.dumps(config | {"quantization_config": layout.config}))
    for path in source.iterdir():
        if path.suffix == ".json" and path.name != "config.json":
            (target / path.name).write_bytes(path.read_bytes())
    return meant


def e4m3(weight: Tensor, scales: Tensor) -> tuple[Tensor, Tensor]:
    """Codes and what they mean, for scales that fit element by element."""
    codes = (weight / scales).clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn)
    return codes, codes.float() * scales


def fp8_block(rows: int, columns: int, ending: str = ".weight_scale_inv", dtype: torch.dtype = torch.float32) -> Writer:
    """FP8 with a scale for each block."""

    def write(weight: Tensor) -> tuple[Tensors, Tensor]:
        scales = (block_peaks(weight, rows, columns) / E4M3_MAX).clamp(min=1e-8).to(dtype)
        codes, meant = e4m3(weight, spread(scales.float(), rows, columns, weight.shape))
        return {".weight": codes, ending: scales}, meant

    return write


def fp8_tensor(ending: str, shape: tuple[int, ...], unused: tuple[str, ...] = ()) -> Writer:
    """FP8 with one scale in a tensor of `shape`; `unused` are scales of activations."""

    def write(weight: Tensor) -> tuple[Tensors, Tensor]:
        scale = weight.abs().max() / E4M3_MAX
        codes, meant = e4m3(weight, scale)
        return {".weight": codes, ending: scale.view(shape)} | {name: torch.tensor(0.5) for name in unused}, meant

    return write


def fp8_channel(weight: Tensor) -> tuple[Tensors, Tensor]:
    """FP8 with a scale for each row."""
    scales = weight.abs().amax(-1, keepdim=True) / E4M3_MAX
    codes, meant = e4m3(weight, scales)
    return {".weight": codes, ".weight_scale": scales}, meant


def gptq(bits: int, group_size: int, symmetric: bool, act_order: bool = False, v2: bool = False) -> Writer:
    """GPTQ's layout; v2 stores zeros as they are, the first format stores them minus 1."""

    def write(weight: Tensor) -> tuple[Tensors, Tensor]:
        columns = weight.shape[1]
        groups = shuffled(columns, group_size) if act_order else in_order(columns, group_size)
        q = integers(weight, bits, groups, symmetric)
        zeros = q.zeros if v2 else (q.zeros - 1) % (1 << bits)
        tensors = {".qweight": words(q.codes.T, bits, 0), ".qzeros": words(zeros.T, bits), ".scales": q.scales.T}
        return tensors | {".g_idx": groups.int()}, q.values()

    return write


def awq(group_size: int) -> Writer:
    """AutoAWQ's layout "gemm"."""
    order = torch.tensor([0, 2, 4, 6, 1, 3, 5, 7])  # the column in each place of a word

    def write(weight: Tensor) -> tuple[Tensors, Tensor]:
        q = integers(weight, 4, in_order(weight.shape[1], group_size), symmetric=False)
        codes, zeros = (table.T.unflatten(-1, (-1, 8))[..., order].flatten(-2) for table in (q.codes, q.zeros))
        return {".qweight": words(codes, 4), ".qzeros": words(zeros, 4), ".scales": q.scales.T}, q.values()

    return write


def packed(bits: int, group_size: int, symmetric: bool = True, act_order: bool = False) -> Writer:
    """compressed-tensors pack-quantized; zeros are packed along the rows."""

    def write(weight: Tensor) -> tuple[Tensors, Tensor]:
        columns = weight.shape[1]
        groups = shuffled(columns, group_size) if act_order else in_order(columns, group_size)
        q = integers(weight, bits, groups, symmetric, torch.bfloat16)
        tensors = {".weight_packed": words(q.codes, bits), ".weight_scale": q.scales}
        tensors |= {".weight_shape": torch.tensor(weight.shape)}
        tensors |= {} if symmetric else {".weight_zero_point": words(q.zeros, bits, 0)}
        return tensors | ({".weight_g_idx": groups.int()} if act_order else {}), q.values()

    return write


def int8(group_size: int, symmetric: bool, names: tuple[str, ...], scale_dtype: torch.dtype) -> Writer:
    """Signed bytes with a scale and a zero: names of the codes, the scales and the zeros, which may be left out."""

    def write(weight: Tensor) -> tuple[Tensors, Tensor]:
        q = integers(weight, 8, in_order(weight.shape[1], group_size), symmetric, scale_dtype)
        codes, zeros = ((table - 128).to(torch.int8) for table in (q.codes, q.zeros))
        return dict(zip(names, (codes, q.scales, zeros)[: len(names)], strict=True)), q.values()

    return write


def nvfp4(names: tuple[str, str, str], inverse: bool) -> Writer:
    """NVFP4: names of the codes, the scales and the scale of the matrix, which may be stored as its inverse."""

    def write(weight: Tensor) -> tuple[Tensors, Tensor]:
        parts = grouped(weight, 16)
        whole = weight.abs().max() / (6 * E4M3_MAX)
        scales = (parts.abs().amax(-1) / 6 / whole).to(torch.float8_e4m3fn)
        each = (scales.float() * whole).unsqueeze(-1)
        codes = nearest(parts / each.clamp(min=1e-12), FP4_TABLE)
        meant = (FP4_TABLE[codes] * each).flatten(1)
        stored = (nibbles(codes.flatten(1)), scales, (1 / whole if inverse else whole).view(1))
        return dict(zip(names, stored, strict=True)), meant

    return write


def exponents(peaks: Tensor) -> Tensor:
    """The smallest power of two that brings a peak to at most 6, as E8M0 bytes."""
    return ((peaks / 6).clamp(min=2.0**-126).log2().ceil() + 127).to(torch.uint8)


def mxfp4(weight: Tensor) -> tuple[Tensors, Tensor]:
    """compressed-tensors mxfp4-pack-quantized."""
    parts = grouped(weight, 32)
    scales = exponents(parts.abs().amax(-1))
    each = 2.0 ** (scales.float() - 127).unsqueeze(-1)
    codes = nearest(parts / each, FP4_TABLE)
    return {".weight_packed": nibbles(codes.flatten(1)), ".weight_scale": scales}, (FP4_TABLE[codes] * each).flatten(1)


def mxfp4_experts(weight: Tensor) -> tuple[Tensors, Tensor]:
    """gpt-oss: all experts [experts, out, in] in one tensor of blocks."""
    pairs = [mxfp4(expert) for expert in weight]
    blocks = torch.stack([tensors[".weight_packed"].unflatten(-1, (-1, 16)) for tensors, _ in pairs])
    scales = torch.stack([tensors[".weight_scale"] for tensors, _ in pairs])
    return {"_blocks": blocks, "_scales": scales}, torch.stack([meant for _, meant in pairs])


def bnb_4bit(kind: str, double: bool = False) -> Writer:
    """bitsandbytes: blocks of 64 of the flattened matrix, the even column in the high half of a byte."""
    table = torch.tensor(NF4) if kind == "nf4" else FP4_TABLE / 6

    def write(weight: Tensor) -> tuple[Tensors, Tensor]:
        blocks = weight.flatten().split(64)
        absmax = torch.stack([block.abs().max() for block in blocks])
        state: dict[str, Any] = {"quant_type": kind, "blocksize": 64, "dtype": "float32", "shape": list(weight.shape)}
        tensors: Tensors = {".weight.quant_map": table.clone()}
        if double:
            offset = float(absmax.mean())
            nested_map = torch.linspace(-1, 1, 256)
            outer = torch.stack([part.abs().max() for part in (absmax - offset).split(256)]).clamp(min=1e-8)
            spread_outer = outer.repeat_interleave(256)[: len(absmax)]
            nested = nearest((absmax - offset) / spread_outer, nested_map)
            absmax = nested_map[nested] * spread_outer + offset
            state |= {"nested_blocksize": 256, "nested_offset": offset, "nested_dtype": "float32"}
            tensors |= {".weight.nested_absmax": outer, ".weight.nested_quant_map": nested_map}
        each = absmax.repeat_interleave(64)[: weight.numel()]
        codes = nearest(weight.flatten() / each, table)
        tensors[".weight"] = nibbles(codes, low_first=False).view(-1, 1)
        tensors[".weight.absmax"] = nested.to(torch.uint8) if double else absmax
        tensors[f".weight.quant_state.bitsandbytes__{kind}"] = torch.tensor(list(json.dumps(state).encode())).byte()
        return tensors, (table[codes] * each).view(weight.shape)

    return write


def bnb_int8(weight: Tensor) -> tuple[Tensors, Tensor]:
    """bitsandbytes: a byte for each weight, and the largest magnitude of each row."""
    peaks = weight.abs().amax(-1)
    codes = (weight / peaks[:, None] * 127).round().to(torch.int8)
    tensors = {".weight": codes, ".SCB": peaks, ".weight_format": torch.tensor(0, dtype=torch.uint8)}
    return tensors, codes.float() * (peaks[:, None] / 127)


def torchao_int4(group_size: int) -> Writer:
    """Int4Tensor: two's complement codes, offsets in place of zeros, tables [groups, out]."""

    def write(weight: Tensor) -> tuple[Tensors, Tensor]:
        parts = grouped(weight, group_size)
        scales = ((parts.amax(-1) - parts.amin(-1)) / 15).clamp(min=1e-6).bfloat16()
        offsets = (parts.amin(-1) + 8 * scales.float()).bfloat16()
        signed = ((parts - offsets.float().unsqueeze(-1)) / scales.float().unsqueeze(-1)).round().clamp(-8, 7).long()
        meant = signed * scales.float().unsqueeze(-1) + offsets.float().unsqueeze(-1)
        qdata = nibbles(signed.flatten(1) % 16).view(torch.int8)
        return {"._weight_qdata": qdata, "._weight_scale": scales.T, "._weight_zero_point": offsets.T}, meant.flatten(1)

    return write


def torchao_float8(weight: Tensor) -> tuple[Tensors, Tensor]:
    """Float8Tensor with a scale for each row."""
    tensors, meant = fp8_channel(weight)
    return {"._weight_qdata": tensors[".weight"], "._weight_scale": tensors[".weight_scale"]}, meant
