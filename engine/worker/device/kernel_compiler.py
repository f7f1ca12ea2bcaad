"""Compiles the CPU kernels that a model needs before it is served, and all others while it is served."""

import logging
import time
from collections.abc import Collection

import torch

from engine.models.config import ModelConfig
from engine.models.weight_format import InputFormat
from kernels.dispatch import cpu_kernels
from kernels.kv_format import KVFormat
from kernels.warmup import all_kernels, compile_kernels, compile_rest, help_with, needed_kernels

logger = logging.getLogger(__name__)

EXPERT_KERNELS = ("route", "router", "sort_pairs", "gather_pairs", "sum_pairs", "gate_rows")
W8A8_KERNELS = ("w8a8_linear", "w8a8_rows")


class KernelCompiler:
    """Compiles what one model needs. A second process begins at once, while this one loads the weights."""

    def __init__(
        self,
        dtype: torch.dtype,
        kv_format: KVFormat | None,
        quantized: bool,
        adapters: bool,
        compressed: bool,
        unused: Collection[str] = (),
    ) -> None:
        """The arguments are those of needed_kernels."""
        kernels = all_kernels()
        format_name = None if kv_format is None else kv_format.name
        names = needed_kernels(str(dtype).removeprefix("torch."), format_name, quantized, adapters, compressed, unused)
        self._kernels = [kernels[name] for name in names]
        self._num_missing = sum(not kernel.is_on_disk() for kernel in self._kernels)
        self._helper = help_with(names) if self._num_missing > 1 and torch.get_num_threads() > 1 else None

    def finish(self) -> None:
        """Compile what is left; returns when all of them can be called."""
        started = time.perf_counter()
        compile_kernels(self._kernels)
        if self._helper is not None:
            self._helper.stop()
        logger.info(
            "CPU kernels: %d compiled, %d loaded from disk in %.1f s",
            self._num_missing,
            len(self._kernels) - self._num_missing,
            time.perf_counter() - started,
        )


def unused_kernels(config: ModelConfig, dtype: torch.dtype) -> set[str]:
    """Kernels of kernels/cpu that a model has no use for in a dtype, see needed_kernels."""
    has_floats = dtype == torch.float32 or (config.moe is not None and config.moe.router_float32)
    centred = config.norm != "rms" or config.qk_norm_kind == "layer"
    adds = config.parallel_residual or not (config.pre_norm and config.input_norms) or not config.final_norm
    unused = {
        "layer_norm": not centred,
        "activate": config.gated_mlp or config.activation == "xielu",
        "float_linear": not has_floats,
        "xielu": config.activation != "xielu",
        "limit": config.logits_scale == 1.0 and not config.logit_softcap and not config.has_extended_layers,
        "combine": not (adds or config.moe or config.has_extended_layers),
    }
    unused |= dict.fromkeys(EXPERT_KERNELS, config.moe is None)
    int8_inputs = isinstance(config.quantization, InputFormat) and config.quantization.int8_inputs
    unused |= dict.fromkeys(W8A8_KERNELS, not int8_inputs)
    if dtype == torch.bfloat16 and (cpu := cpu_kernels()) is not None:
        supports, shapes = cpu.attention_pairs.supports_heads, config.head_shapes()
        in_pairs = [supports(config.num_heads, heads.num_kv_heads, heads.head_dim) for heads in shapes]
        unused |= {"attention": all(in_pairs), "attention_pairs": not any(in_pairs)}
    return {name for name, is_unused in unused.items() if is_unused}


def compile_in_background() -> None:
    """Compile the kernels that are not on disk in another process, which ends with this one."""
    if number := compile_rest():
        logger.info("CPU kernels: %d for other dtypes and formats are compiled in the background", number)
