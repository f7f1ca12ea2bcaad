"""Chooses device, dtype, attention backend and the kernels to compile; resolves "auto" on this machine."""

import logging
from collections.abc import Callable, Sequence

import torch

from engine.config import EngineConfig
from engine.errors import ConfigError
from engine.executor.step import Place
from engine.models.config import ModelConfig
from engine.models.parallel.ranks import Ranks, join_ranks
from engine.settings import parse_size
from engine.worker.device.kernel_compiler import KernelCompiler, unused_kernels
from engine.worker.device.queue import CudaQueue, DeviceQueue
from kernels.attention.choices import ANY, tile_choice
from kernels.attention.flashinfer import FlashInferPrefill, PromptAttention, device_bytes
from kernels.card import BF16_CAPABILITY, MIN_CAPABILITY, read_card
from kernels.dispatch import cpu_kernels
from kernels.kv_format import find_kv_format
from kernels.quantized.linear import multiplies_int8_inputs
from kernels.quantized.scaled_matmul import multiplies_in_8_bits

logger = logging.getLogger(__name__)

LEAST_FREE = 10  # by default, free memory is at least so many times the second copy
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def resolve_device(name: str, index: int | None = None) -> torch.device:
    """The device of a setting; "auto" is the GPU if there is one. index: of the GPU, None for the current one.
    ConfigError if a GPU is asked for and missing, or too old."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if name == "cuda" and not torch.cuda.is_available():
        raise ConfigError("device: cuda was asked for, but torch finds no CUDA GPU; use --device cpu or auto.")
    device = torch.device(name)
    if device.type == "cuda" and index is not None:
        if index >= torch.cuda.device_count():
            raise ConfigError(
                "tensor_parallel_size: every rank of every replica needs a GPU of its own, torch finds "
                f"{torch.cuda.device_count()}; use a smaller --tensor-parallel-size or --data-parallel-size."
            )
        device = torch.device(name, index)
        torch.cuda.set_device(device)
    if device.type == "cuda" and (capability := read_card(device).capability) < MIN_CAPABILITY:
        raise ConfigError(
            f"device: this GPU has compute capability {capability / 10}, and kernels need {MIN_CAPABILITY / 10} "
            "(Turing) or later; use --device cpu."
        )
    return device


def take_place(config: EngineConfig, place: Place) -> tuple[torch.device, Ranks | None]:
    """The device of a Worker process, and the ranks that it computes with, which all wait here for each other; None for
    one rank. Raises ConfigError."""
    device = resolve_device(config.device, place.gpu)
    return device, join_ranks(place.rank, place.size, place.rendezvous, device)


def resolve_dtype(config: EngineConfig, model: ModelConfig, device: torch.device) -> torch.dtype:
    """The dtype to compute in: the setting, or for "auto" the checkpoint's dtype if the device has native arithmetic
    for it, else the nearest dtype with native arithmetic."""
    bfloat16, float16 = _fast_dtypes(device, model.causal)
    if config.dtype == "auto":
        wanted = model.dtype
        if wanted == "bfloat16" and not bfloat16:
            wanted = "float16" if float16 else "float32"
        elif wanted == "float16" and not float16:
            wanted = "float32"
        if wanted != model.dtype:
            logger.warning("the checkpoint's %s is not computed natively here: using %s", model.dtype, wanted)
        return DTYPES[wanted]
    if config.dtype == "float16" and device.type == "cpu":
        raise ConfigError("dtype: float16 is not served on a CPU; use --dtype bfloat16 or float32.")
    if config.dtype == "bfloat16" and not bfloat16 and device.type == "cuda":
        capability = read_card(device).capability / 10
        raise ConfigError(f"dtype: this GPU (compute capability {capability}) has no bfloat16; use --dtype float16.")
    if config.dtype == "bfloat16" and not bfloat16:
        logger.warning("dtype: bfloat16 is emulated on this device and slow; --dtype %s is faster", "float32")
    return DTYPES[config.dtype]


def check_quantization(config: EngineConfig, dtype: torch.dtype, device: torch.device) -> None:
    """Raise ConfigError if w8a8 is asked for and this device or dtype has no products of int8 inputs. A checkpoint in
    W8A8 is served everywhere: elsewhere its inputs keep their dtype."""
    if config.quantization != "w8a8":
        return
    if device.type == "cuda":
        if multiplies_in_8_bits(torch.int8, device) and dtype != torch.float32:
            return
        obstacle = "a GPU needs compute capability 8.0, and inputs in 16 bits; use int8"
    elif dtype != torch.bfloat16:
        obstacle = "a CPU rounds inputs in bfloat16 alone; use --dtype bfloat16"
    elif not multiplies_int8_inputs():
        obstacle = "the kernel needs numba and a CPU with AVX512-VNNI; use int8"
    else:
        return
    raise ConfigError(f"quantization: w8a8 is not served here: {obstacle}.")


def check_attention(config: EngineConfig, model: ModelConfig, dtype: torch.dtype, device: torch.device) -> None:
    """Raise ConfigError if the GPU's attention kernels have no tile for this model. For a CPU there is nothing to
    check."""
    if device.type != "cuda":
        return
    kv_format, bits = find_kv_format(config.kv_cache_dtype), 8 * dtype.itemsize
    kv_bits = kv_format.bits if kv_format else bits
    try:
        for heads in model.head_shapes():
            group = model.num_heads // heads.num_kv_heads
            for use, rows in (("decode", group), ("prefill", ANY), ("invariant", 0)):
                tile_choice(use, read_card(device), bits, kv_bits, heads.head_dim, group, rows, True)
    except ValueError as error:
        raise ConfigError(f"model: {error}; use --device cpu.") from None


def compile_kernels(
    config: EngineConfig, model: ModelConfig, dtype: torch.dtype, device: torch.device, compressed: bool
) -> Callable[[], None] | None:
    """Begin to compile the kernels that the model needs; call the result to wait for them. None: a GPU, whose kernels
    are compiled by steps. compressed: bf16 weights are kept in 12 bits, too."""
    if device.type != "cpu":
        return None
    kv_format = find_kv_format(config.kv_cache_dtype)
    quantized, adapters = model.quantization is not None, config.lora_slots is not None
    return KernelCompiler(dtype, kv_format, quantized, adapters, compressed, unused_kernels(model, dtype)).finish


def make_flashinfer(
    config: EngineConfig,
    model: ModelConfig,
    max_num_seqs: int,
    dtype: torch.dtype,
    device: torch.device,
    queue: DeviceQueue | None = None,
) -> FlashInferPrefill | None:
    """FlashInfer with its kernels compiled, or None where attention_backend is another.

    "auto" is Triton: no measurement compares the two yet. ConfigError if FlashInfer is asked for and is not installed,
    does not serve this model, or fails here. queue: for tests; None: a queue of the device.
    """
    if config.attention_backend != "flashinfer":
        return None
    if problem := _problem(config, model, dtype, device):
        raise ConfigError(f"attention_backend: {problem}; use --attention-backend triton.")
    try:
        found = FlashInferPrefill(queue or CudaQueue(device), prompt_attention(config, model, dtype), max_num_seqs)
        found.warm_up()
    except ImportError as error:
        raise ConfigError(f"attention_backend: {error}, or use --attention-backend triton.") from None
    except Exception as error:  # its compiler, the driver, or an argument that another version takes otherwise
        logger.error("FlashInfer failed", exc_info=error)
        reason = (str(error).strip() or type(error).__name__).splitlines()[0][:200]
        raise ConfigError(
            f"attention_backend: FlashInfer fails here ({reason}); mend it, or use --attention-backend triton."
        ) from None
    return found


def flashinfer_bytes(config: EngineConfig, model: ModelConfig) -> int:
    """Bytes of device memory that the setting takes beside weights and cache."""
    return device_bytes(len(_windows(model))) if config.attention_backend == "flashinfer" else 0


def prompt_attention(config: EngineConfig, model: ModelConfig, dtype: torch.dtype) -> PromptAttention:
    """The sizes that FlashInfer plans with."""
    return PromptAttention(
        num_heads=model.num_heads,
        num_kv_heads=model.num_kv_heads,
        head_dim=model.head_dim,
        block_size=config.block_size,
        dtype=dtype,
        scale=model.softmax_scale,
        softcap=model.attn_softcap,
        windows=_windows(model),
    )


def _windows(model: ModelConfig) -> tuple[int, ...]:
    return tuple(sorted({model.window(layer) for layer in range(model.num_layers)}))


def _problem(config: EngineConfig, model: ModelConfig, dtype: torch.dtype, device: torch.device) -> str:
    if device.type != "cuda":
        return "FlashInfer needs a GPU, and this server runs on the CPU"
    if config.kv_cache_dtype != "auto":
        return f"FlashInfer does not read the KV cache of --kv-cache-dtype {config.kv_cache_dtype}"
    if config.batch_invariant:
        return "FlashInfer's results depend on the batch, and batch_invariant is set"
    beyond = {"ALiBi": model.position == "alibi", "attention_sinks": model.attention_sinks,
              "attention_chunk": model.attention_chunk > 0,
              "heads that differ by layer": len(model.head_shapes()) > 1}  # fmt: skip
    if missing := [name for name, asked in beyond.items() if asked]:
        return f"FlashInfer's kernels do not compute {' and '.join(missing)}, which this model has"
    return prompt_attention(config, model, dtype).problem()


def _fast_dtypes(device: torch.device, causal: bool) -> tuple[bool, bool]:
    """(bfloat16, float16): True for each that the device computes in natively, or as fast.

    Our kernels widen bfloat16 to fp32 as they read it where a CPU has no arithmetic for it. Torch's attention, which
    encoders (not `causal`) use, does not.
    """
    if device.type == "cuda":
        return read_card(device).capability >= BF16_CAPABILITY, True
    native = bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    return native or (causal and multiplies_pairs(device.type)), False


def multiplies_pairs(device_type: str) -> bool:
    """True if kernels/cpu multiplies bf16 weights, and codes of quantised weights, which are packed for that."""
    cpu = cpu_kernels() if device_type == "cpu" else None
    return cpu is not None and cpu.features.MULTIPLIES_PAIRS


def compressed_bytes(models: Sequence[ModelConfig]) -> int:
    """Bytes of the second copies. An embedding that is no lm_head has none."""
    total = 0
    for model in models:
        total += model.weight_bytes(2)
        if not model.tie_embeddings:
            total -= len(model.vocab_part) * model.embedding_size * 2
    return total * 12 // 16


def keeps_compressed(
    config: EngineConfig, models: Sequence[ModelConfig], dtype: str, device_type: str, free_bytes: int
) -> bool:
    """The setting compressed_weights, or its default. models: the served model, and the draft model if there is one.
    free_bytes: host memory before the weights are loaded. ConfigError if the setting asks for what cannot be done."""
    if config.compressed_weights is False:
        return False
    obstacle = _obstacle(config, models[0], dtype, device_type)
    if config.compressed_weights and obstacle is not None:
        raise ConfigError(f"compressed_weights: {obstacle}; leave the option out.")
    if config.compressed_weights or obstacle is not None:
        return obstacle is None
    asked = parse_size(config.kv_cache_memory or "0") or 0
    free = free_bytes - asked - sum(model.weight_bytes(2) for model in models)
    return free >= LEAST_FREE * compressed_bytes(models)


def _obstacle(config: EngineConfig, model: ModelConfig, dtype: str, device_type: str) -> str | None:
    """The reason why weights cannot be compressed; None if there is none."""
    if device_type != "cpu":
        return f"only a CPU reads such weights, not a device of type {device_type}"
    if dtype != "bfloat16":
        return f"only bfloat16 weights can be compressed, not {dtype}"
    if model.quantization is not None:
        return f"{model.quantization.name} weights are smaller already"
    if config.batch_invariant:
        return "batch_invariant has linear layers of its own"
    cpu = cpu_kernels()
    if cpu is None or not cpu.linear.supports_linear(torch.empty((16, 2), dtype=torch.bfloat16), None):
        return "the kernel needs numba and a CPU with AVX2"
    return None
