"""`pageserve plan MODEL`: shows where memory goes and whether it fits, from config.json alone.

Run as `python -m engine.worker.memory_plan`. Takes the engine's flags, and --memory SIZE to plan for another machine.
Exit status: 0 if the model fits, 1 if not (then it prints the nearest settings that do), 2 for a wrong setting.
"""

import bisect
import itertools
import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from engine.checkpoint.locate import resolve_model
from engine.command_line import Parser, merge_positional_model, one_line
from engine.config import EngineConfig
from engine.errors import ConfigError, PageserveError
from engine.models.config import ModelConfig
from engine.models.families import quantized_on_load, read_model_config
from engine.models.loading.load import check_checkpoint, slot_bytes, weight_bytes
from engine.settings import CONFIG_VARIABLE, add_flags, load_settings, parse_size, settings_of
from engine.worker.cache.kv_cache import (
    DoesNotFitError,
    KVCacheSize,
    format_bytes,
    gpu_cache_bytes,
    host_cache_bytes,
    model_max_len,
    most_positions,
    resolve_kv_format,
    size_kv_cache,
)
from engine.worker.device.choice import compressed_bytes, flashinfer_bytes, keeps_compressed, multiplies_pairs
from engine.worker.device.cuda_graphs import GRAPH_SHARE, MAX_DRAFT_ROWS, MAX_MIXED_TOKENS, decode_sizes, mixed_buckets
from engine.worker.device.host import StepLimits, available_host_bytes, resolve_step_limits
from engine.worker.sampling.prompt_scorer import MAX_SCORED_LOGITS, SCORE_BYTES
from engine.worker.sampling.sampling_rows import MAX_DRAW_ELEMENTS
from engine.worker.speculation.loaded_draft import find_draft_config

DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
CUDA_CONTEXT_BYTES = 700 << 20  # estimate: the driver, cuBLAS and code of kernels
CUDA_GRAPH_BYTES = 8 << 20  # estimate, not measured yet: the nodes of one recorded step
# Bytes per logit: fp32 logits, a copy for logprobs, and the copies that penalties make.
LOGITS_BYTES = 4 + 4 + 16
# Bytes per logit of a group of draws: logits, exponentials, mask, values and indices of a sort and its scratch space.
DRAW_BYTES = 4 + 4 + 1 + 2 * (4 + 8)
COUNTS_BYTES = 5  # per sequence and token of the vocabulary: int32 and bool
MIN_BATCHED_TOKENS = 64
UNUSED_VARIABLE = "PAGESERVE_PLAN_UNUSED"  # names of the server's settings, which a YAML file of `serve` may hold
MIN_MEMORY = 16 << 20  # bytes; a smaller --memory lacks its unit


@dataclass(frozen=True, slots=True)
class Machine:
    """device_type "cuda" or "cpu"; total_bytes: memory of the card, or free host memory."""

    device_type: str
    total_bytes: int


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """Bytes by use; weights include the rotary tables, compressed are second copies of weights. `size` is None if the
    KV cache does not fit; `problem` says why."""

    weights: int
    compressed: int
    activations: int
    sampler: int
    overhead: int
    left_for_kv: int
    limits: StepLimits
    size: KVCacheSize | None
    problem: str


def make_plan(
    config: EngineConfig, model: ModelConfig, machine: Machine, draft: ModelConfig | None = None
) -> MemoryPlan:
    """Estimates the sizes that a Worker with this config would choose, or the first rank of it: then `model` is its
    part, and `machine` its card or its share of the host. `draft`: the draft model. Raises ConfigError for wrong
    settings."""
    limits = resolve_step_limits(config, machine.device_type, machine.total_bytes)
    on_gpu = machine.device_type == "cuda"
    dtype = model.dtype if config.dtype == "auto" else config.dtype
    dtype_bytes = DTYPE_BYTES[dtype]
    num_positions = _num_positions(config, model, machine, dtype_bytes)
    packed = multiplies_pairs(machine.device_type)
    weights = weight_bytes(model, dtype_bytes, packed) + model.rotary_bytes(num_positions)
    if draft is not None:
        weights += weight_bytes(draft, dtype_bytes, packed) + draft.rotary_bytes(num_positions)
    if on_gpu:
        weights += slot_bytes(model, config.lora_slots, dtype_bytes)
    shares = model.quantization is not None and model.quantization.reads_plain  # a quantised table serves both
    if not on_gpu and dtype_bytes == 2 and model.tie_embeddings and not shares:
        # The table is held twice: packed for lm_head, plain for the embedding.
        weights += len(model.vocab_part) * model.embedding_size * dtype_bytes
    models = [model] if draft is None else [model, draft]
    compresses = keeps_compressed(config, models, dtype, machine.device_type, machine.total_bytes)
    compressed = compressed_bytes(models) if compresses else 0
    activations = max(
        activation_bytes(one, dtype_bytes, limits.max_num_batched_tokens)  # they run one after the other
        for one in models
    )
    sampler = max(sampler_bytes(model, limits.max_num_seqs), scoring_bytes(model))  # they run one after the other
    overhead = 0
    if on_gpu:
        overhead = CUDA_CONTEXT_BYTES + _graph_bytes(config, model, machine, limits, dtype_bytes, draft)
        overhead += flashinfer_bytes(config, model)
    needed = weights + compressed + activations + sampler
    size, problem = None, ""
    available = machine.total_bytes - needed
    if on_gpu:
        available = gpu_cache_bytes(config, machine.total_bytes, overhead, needed)
    try:
        size = size_kv_cache(
            config,
            model,
            draft=draft,
            dtype_bytes=dtype_bytes,
            budget=available if on_gpu else host_cache_bytes(config, available),
            available=available,
            max_num_seqs=limits.max_num_seqs,
            on_gpu=on_gpu,
        )
    except DoesNotFitError as error:
        problem = error.reason  # without its advice: nearest_settings tries out settings
    return MemoryPlan(
        weights=weights,
        compressed=compressed,
        activations=activations,
        sampler=sampler,
        overhead=overhead,
        left_for_kv=available,
        limits=limits,
        size=size,
        problem=problem,
    )


def _num_positions(config: EngineConfig, model: ModelConfig, machine: Machine, dtype_bytes: int) -> int:
    """Rows of the rotary tables, with the bound that load_decoder uses."""
    budget = machine.total_bytes
    if machine.device_type != "cuda" and config.kv_cache_memory is None:
        budget = host_cache_bytes(config, budget)
    return most_positions(config, model, dtype_bytes, budget)


def _graph_bytes(
    config: EngineConfig,
    model: ModelConfig,
    machine: Machine,
    limits: StepLimits,
    dtype_bytes: int,
    draft: ModelConfig | None,
) -> int:
    """Bytes of all CUDA graphs, and of the temporary memory that they share."""
    if not config.cuda_graphs:
        return 0
    most_seqs, most_tokens = min(limits.max_num_seqs, config.cuda_graph_max_num_seqs), limits.max_num_batched_tokens
    count = 2 * len(decode_sizes(most_seqs)) + len(mixed_buckets(most_tokens, most_seqs))
    count += 0 if draft is None else len(decode_sizes(MAX_DRAFT_ROWS))
    shared = activation_bytes(model, dtype_bytes, min(most_tokens, MAX_MIXED_TOKENS))
    return shared + min(count * CUDA_GRAPH_BYTES, int(GRAPH_SHARE * machine.total_bytes))


def activation_bytes(model: ModelConfig, dtype_bytes: int, num_tokens: int) -> int:
    """Bytes at the widest point of a layer: residual, normed input, and the tensors of attention or of the MLP."""
    attention = 2 * model.q_size + 2 * model.kv_size + model.hidden_size
    return num_tokens * (2 * model.hidden_size + max(attention, model.mlp_activations)) * dtype_bytes


def sampler_bytes(model: ModelConfig, max_num_seqs: int) -> int:
    """Bytes of the sampler if every sequence has logprobs, penalties and top-p at once."""
    num_logits = max_num_seqs * model.vocab_size
    drawn = min(num_logits, max(MAX_DRAW_ELEMENTS, model.vocab_size))
    return num_logits * (LOGITS_BYTES + COUNTS_BYTES) + drawn * DRAW_BYTES


def scoring_bytes(model: ModelConfig) -> int:
    """Bytes of scoring prompts, which takes one piece of rows at a time."""
    return max(MAX_SCORED_LOGITS, model.vocab_size) * SCORE_BYTES


def nearest_settings(
    config: EngineConfig, model: ModelConfig, machine: Machine, draft: ModelConfig | None = None
) -> Iterator[str]:
    """Yields flags that make the model fit: the smallest change of each kind; two kinds at once if no single one
    does."""
    kinds = [kind for kind in _candidates(config, model, machine) if kind]

    def fits(change: dict[str, Any]) -> bool:
        changed = model
        if "quantization" in change:
            changed = quantized_on_load(model, change["quantization"])
        return _fits(replace(config, **change), changed, machine, draft)

    found = [change for kind in kinds if (change := next(filter(fits, kind), None)) is not None]
    if not found:
        for first, second in itertools.combinations(kinds, 2):
            if fits(first[-1] | second[-1]) and not first[-1].keys() & second[-1].keys():
                nearest = next(change for change in second if fits(first[-1] | change))
                found.append(next(change for change in first if fits(change | nearest)) | nearest)
    for change in found:
        yield " ".join(_flag(name.replace("_", "-"), value) for name, value in change.items())


def _flag(name: str, value: Any) -> str:
    return f"--{'' if value else 'no-'}{name}" if isinstance(value, bool) else f"--{name} {value}"


def _fits(config: EngineConfig, model: ModelConfig, machine: Machine, draft: ModelConfig | None) -> bool:
    try:
        return make_plan(config, model, machine, draft).size is not None
    except ConfigError:
        return False


def least_memory(config: EngineConfig, model: ModelConfig, machine: Machine, draft: ModelConfig | None) -> int | None:
    """Bytes of the smallest machine of this kind that fits these settings, in steps of 64 MiB; None if no size
    helps."""
    sizes = range(machine.total_bytes, 1 << 50, 64 << 20)

    def fits(size: int) -> bool:
        return _fits(config, model, replace(machine, total_bytes=size), draft)

    at = bisect.bisect_left(sizes, True, key=fits)
    return sizes[at] if at < len(sizes) else None


def _candidates(config: EngineConfig, model: ModelConfig, machine: Machine) -> Iterator[list[dict[str, Any]]]:
    """Yields for each kind of change the settings to try, nearest first."""
    limits = resolve_step_limits(config, machine.device_type, machine.total_bytes)
    longest = config.max_model_len or model.max_position_embeddings
    lengths = [n for i in range(1, 64) if (n := longest * (64 - i) // 64 // config.block_size * config.block_size)]
    yield [{"max_model_len": n} for n in lengths]
    seqs, tokens = _halves(limits.max_num_seqs, 1), _halves(limits.max_num_batched_tokens, MIN_BATCHED_TOKENS)
    yield [{"max_num_seqs": n} for n in seqs]
    yield [{"max_num_batched_tokens": n} for n in tokens]
    yield [{"max_num_seqs": a, "max_num_batched_tokens": b} for a, b in zip(seqs, tokens, strict=False)]
    if machine.device_type == "cuda":
        percent = int(config.gpu_memory_utilization * 100)
        yield [{"gpu_memory_utilization": p / 100} for p in range(percent + 1, 98)]
        if config.cuda_graphs:
            yield [{"cuda_graphs": False}]
    elif config.kv_cache_memory is not None:
        sizes = (1 << i for i in range(42, 19, -1))
        asked = parse_size(config.kv_cache_memory) or 0
        yield [{"kv_cache_memory": f"{size >> 20}MiB"} for size in sizes if size < asked]
    else:
        yield [{"kv_cache_memory": f"{1 << i}MiB"} for i in range(4, 22)]
    if config.num_blocks is not None:
        fewer, more = _halves(config.num_blocks, 1), [config.num_blocks << i for i in range(20)]
        yield [{"num_blocks": n} for n in (*fewer, *more)]
    if config.kv_cache_dtype == "auto":
        yield [{"kv_cache_dtype": "int8"}]
    if config.compressed_weights:
        yield [{"compressed_weights": False}]
    if model.quantization is None:
        yield [{"quantization": "int8"}, {"quantization": "int4"}]
    if config.dtype == "float32" or (config.dtype == "auto" and model.dtype == "float32"):
        yield [{"dtype": "bfloat16"}]


def _halves(value: int, least: int) -> list[int]:
    values = []
    while value // 2 >= least:
        value //= 2
        values.append(value)
    return values


def describe(
    config: EngineConfig, model: ModelConfig, machine: Machine, plan: MemoryPlan, draft: ModelConfig | None = None
) -> Iterator[str]:
    """Yields the printed lines."""
    dtype = model.dtype if config.dtype == "auto" else config.dtype
    kv_format = resolve_kv_format(config, model)
    per_token = model.kv_bytes_per_token(DTYPE_BYTES[dtype], kv_format)
    if draft is not None:
        per_token += draft.kv_bytes_per_token(DTYPE_BYTES[dtype], resolve_kv_format(config, draft))
    where = "GPU memory" if machine.device_type == "cuda" else "free host memory"
    whole = model if model.shard is None else model.shard.whole
    yield f"{config.model or 'bundled model'}: {whole.num_parameters() / 1e6:,.1f} M parameters in {dtype}"
    if model.shard is not None:
        yield f"  each of {model.shard.size} ranks, with {model.num_parameters() / 1e6:,.1f} M parameters at most:"
    yield _row(where, machine.total_bytes, "")
    if machine.device_type == "cuda":
        usable = int(machine.total_bytes * config.gpu_memory_utilization)
        yield _row("usable", usable, f"gpu_memory_utilization {config.gpu_memory_utilization:g}")
        graphs = "recorded graphs" + (", FlashInfer" if config.attention_backend == "flashinfer" else "")
        yield _row("CUDA context", plan.overhead, f"and {graphs}: an estimate")
    notes = [] if model.quantization is None else [model.quantization.name]
    notes += ["with rotary tables"] if model.position == "rope" else []
    if draft is not None:
        draft_bytes = weight_bytes(draft, DTYPE_BYTES[dtype], multiplies_pairs(machine.device_type))
        notes.append(f"{format_bytes(draft_bytes)} of the draft model")
    yield _row("weights", plan.weights, ", ".join(notes))
    if plan.compressed:
        yield _row("compressed weights", plan.compressed, "a second copy in 12 bits each, for steps of few tokens")
    yield _row("activations", plan.activations, f"at {plan.limits.max_num_batched_tokens} tokens a step")
    yield _row("sampler", plan.sampler, f"worst case at {plan.limits.max_num_seqs} sequences")
    length = plan.size.max_model_len if plan.size else model_max_len(config, model)
    yield _row("KV per token", per_token, f"in {kv_format.name}, scales included" if kv_format else f"in {dtype}")
    yield _row("KV per sequence", length * per_token, f"of max_model_len {length}")
    if plan.size is None:
        yield _row("left for KV cache", plan.left_for_kv, "")
        return
    capacity = plan.size.num_blocks * config.block_size
    yield _row("KV cache", plan.size.num_bytes, f"{plan.size.num_blocks:,} blocks, {capacity:,} tokens")
    for tokens in sorted({length, min(length, 1024)}, reverse=True):
        blocks = -(-tokens // config.block_size)
        fitting = min(plan.size.num_blocks // blocks, plan.limits.max_num_seqs)
        yield f"  {fitting:,} sequences of {tokens:,} tokens fit at once (max_num_seqs {plan.limits.max_num_seqs})"
    if length < model.max_position_embeddings and config.max_model_len is None:
        yield f"  max_model_len is cut from the model's {model.max_position_embeddings} to what the cache holds"
    if model.max_positions > model.max_position_embeddings and config.max_model_len is None:
        yield f"  longer with --max-model-len, up to {model.max_positions}: with LongRoPE's long factors for all"


def describe_encoder(config: EngineConfig, model: ModelConfig) -> Iterator[str]:
    """Yields the lines for a model that only embeds; its memory does not grow with the number of requests."""
    dtype = model.dtype if config.dtype == "auto" else config.dtype
    yield f"{config.model}: {model.num_parameters() / 1e6:,.1f} M parameters in {dtype}, an encoder: no KV cache"
    yield _row("weights", weight_bytes(model, DTYPE_BYTES[dtype]), "")


def _row(name: str, num_bytes: int, note: str) -> str:
    return f"  {name:<18} {format_bytes(num_bytes):>12}  {note}".rstrip()


def this_machine(config: EngineConfig) -> Machine:
    """The device that `serve` would use here."""
    if config.device != "cpu":
        import torch

        from engine.worker.device.choice import resolve_device

        if resolve_device(config.device).type == "cuda":
            return Machine("cuda", torch.cuda.mem_get_info()[1])
    return Machine("cpu", available_host_bytes())


def read_arguments(arguments: list[str]) -> tuple[EngineConfig, Machine]:
    """(settings, machine to plan for). --memory means a GPU unless --device is cpu."""
    about = "Show where memory goes, without loading weights. Exit status 1 when it does not fit."
    parser = Parser("plan", "[MODEL] [--memory SIZE]", about)
    parser.add_argument(
        "positional_model", nargs="?", metavar="MODEL", help="folder or hub id; default: the bundled one"
    )
    parser.add_argument(
        "--memory", metavar="SIZE", help="plan for a GPU (with --device cpu: a machine) of this size, such as 80GiB"
    )
    add_flags(parser, EngineConfig)
    flags = parser.read(arguments)
    merge_positional_model(flags)
    unused = os.environ.get(UNUSED_VARIABLE, "").split(",")
    (config,) = load_settings((EngineConfig,), flags, _engine_environment(), unused)
    if flags["memory"] is None:
        return config, this_machine(config)
    total_bytes = parse_size(flags["memory"])
    if total_bytes is None:
        raise ConfigError(f'--memory must be a size in bytes such as "80GiB", not {flags["memory"]!r}.')
    if total_bytes < MIN_MEMORY:
        unit = f"; write {flags['memory']}GiB or {flags['memory']}MiB" if flags["memory"].isdigit() else ""
        raise ConfigError(f"--memory {flags['memory']} is {total_bytes} bytes, less than any model needs{unit}.")
    return config, Machine("cpu" if config.device == "cpu" else "cuda", total_bytes)


def _engine_environment() -> dict[str, str]:
    """The environment variables of engine settings, without those of the server."""
    known = {setting.env for setting in settings_of(EngineConfig).values()} | {CONFIG_VARIABLE}
    return {name: value for name, value in os.environ.items() if name in known}


def main(arguments: list[str]) -> int:
    try:
        config, machine = read_arguments(arguments)
        model_dir = resolve_model(replace(config, load_format="dummy"))  # needs config.json only
        model = read_model_config(model_dir, config.quantization, num_ranks=config.tensor_parallel_size)
        if config.load_format != "dummy":
            check_checkpoint(model_dir, model)
        if machine.device_type == "cpu":  # every process of a GPU server has a card of its own
            machine = replace(machine, total_bytes=machine.total_bytes // config.num_processes)
        if not model.causal:
            print("\n".join(describe_encoder(config, model)))
            return 0
        draft = find_draft_config(config, model)
        plan = make_plan(config, model, machine, draft)
    except PageserveError as error:
        print(one_line(error), file=sys.stderr)
        return 2
    print("\n".join(describe(config, model, machine, plan, draft)))
    if plan.size is not None:
        return 0
    print(f"Does not fit. {plan.problem}")
    changes = list(nearest_settings(config, model, machine, draft))
    print(
        "Any one of these lines makes it fit:"
        if changes
        else "No one setting and no two make it fit: a larger machine is needed."
    )
    for change in changes:
        print(f"  {change}")
    if (size := least_memory(config, model, machine, draft)) is not None:
        print(f"As it is, it fits {format_bytes(size)} and more.")
    return 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
