"""EngineConfig: every engine setting, declared once.

Each field carries its help text and its limits. The command line, the YAML check, the environment variables and the
table in docs/settings.md are generated from these fields (engine/settings.py).
"""

import re
from dataclasses import dataclass

from engine.errors import ConfigError
from engine.settings import check_config, option

ADAPTER_NAME = re.compile(r"[\w.:@/-]{1,128}")
MAX_DRAFT_TOKENS = 64  # largest K of `speculative`
NGRAM = "ngram"  # the method of `speculative` that needs no model


@dataclass(frozen=True)
class EngineConfig:
    """Engine settings. A setting that vLLM has as well carries vLLM's name. None: chosen once the model is known.

    The constructor checks every field; ConfigError names the field and the values that it may have.
    """

    model: str = option("", "folder, .gguf file or Hugging Face id of a checkpoint; empty: the bundled model")
    revision: str | None = option(None, "branch, tag or commit of a hub id")
    tokenizer: str | None = option(None, "folder or hub id of the tokenizer; default: the model's")
    load_format: str = option(
        "auto",
        "auto: safetensors, else pickles; dummy: random weights, only config.json is needed",
        choices=("auto", "safetensors", "dummy"),
    )
    device: str = option("auto", "auto: cuda if there is a GPU, else cpu", choices=("auto", "cuda", "cpu"))
    dtype: str = option(
        "auto",
        "type of weights and activations; auto: the checkpoint's",
        choices=("auto", "float32", "bfloat16", "float16"),
    )
    quantization: str | None = option(
        None,
        "quantise the weights of a plain checkpoint as they are loaded: int8, fp8 (e4m3) or int4, or w8a8: int8 with "
        "inputs rounded to int8, too, on a GPU (compute capability 8.0) or a CPU with AVX512-VNNI; default: as stored",
        choices=("int8", "int4", "fp8", "w8a8"),
    )
    generation_config: str = option(
        "auto",
        "sampling defaults for fields that a request leaves out; auto: the model's generation_config.json, openai: "
        "those of OpenAI (temperature 1, no filters)",
        choices=("auto", "openai"),
    )
    max_model_len: int | None = option(
        None, "longest prompt + output in tokens; default: as many as the model and memory allow", minimum=1
    )
    block_size: int = option(16, "tokens per KV block", choices=(8, 16, 32, 64, 128))
    gpu_memory_utilization: float = option(0.9, "share of the GPU's memory that the server may use", above=0, maximum=1)
    memory_share: float | None = option(
        None,
        "share of the GPU's memory that this model may use beside others of the same server; default: "
        "gpu_memory_utilization, divided by the number of models that are awake together",
        above=0,
        maximum=1,
    )
    kv_cache_memory: str | None = option(
        None,
        'size of the KV cache on a CPU, of each rank, such as "2GiB"; default: enough for max_num_seqs sequences of '
        "max_model_len, at most 4 GiB and a quarter of free memory",
        size=True,
    )
    num_blocks: int | None = option(None, "number of KV blocks; overrides the memory settings", minimum=1)
    compressed_weights: bool | None = option(
        None,
        "on a CPU, keep linear layers a second time in 12 bits a weight, without loss: steps of up to 6 tokens take a "
        "quarter less time, weights three quarters more memory; default: on where free memory is ten times the copy",
    )
    kv_cache_dtype: str = option(
        "auto",
        "storage type of keys and values; auto: the model's dtype; int8, fp8 (e4m3), int4: quantised, with a scale for "
        "each token and head",
        choices=("auto", "int8", "fp8", "int4"),
    )
    swap_space: float = option(
        0.0,
        "GiB of host memory, for each rank, for KV blocks that the pool evicts (preempted sequences, cached prefixes); "
        "0: recompute",
        minimum=0,
    )
    swap_policy: str = option(
        "auto",
        "auto: load blocks from host memory if that is faster than recomputing them; always: load whenever possible",
        choices=("auto", "always"),
    )
    disk_cache: str | None = option(
        None, "folder that keeps KV blocks of prefixes across restarts; blocks pass through host memory (swap_space)"
    )
    disk_cache_size: str = option("4GiB", "maximum size of disk_cache, of each rank", size=True)
    max_num_seqs: int | None = option(None, "most sequences in one step; default 256, 128 on a CPU", minimum=1)
    max_num_batched_tokens: int | None = option(
        None, "most tokens in one step; default 2048, 8192 from 70 GiB of GPU memory", minimum=1
    )
    enable_prefix_caching: bool = option(True, "share the KV blocks of common prompt prefixes")
    watermark: float = option(
        0.01,
        "share of the blocks that stay free when a waiting request is admitted; prevents thrashing",
        minimum=0,
        maximum=0.5,
    )
    admission: str = option(
        "plain",
        "predict: a request waits if the running requests and this one would soon outgrow the pool, estimated from the "
        "output lengths so far",
        choices=("plain", "predict"),
    )
    fair_step_seconds: float | None = option(
        0.03,
        "most seconds of a step of keys that hold much KV cache, while a key that holds little has requests; at least "
        "three times a step with an empty prompt. Less: faster first tokens for the light key; more: more throughput "
        "for the heavy keys; none: no bound",
        above=0,
    )
    itl_target: float | None = option(
        None,
        "most seconds of a step while an answer is being streamed: prompts are computed in chunks that fit beside the "
        "streams. Streams stay smooth, long prompts take longer; default: no target, one chunk takes up to "
        "max_num_batched_tokens",
        above=0,
    )
    async_scheduling: bool | None = option(
        None,
        "plan the next step while this one computes; default: on for a GPU, on a CPU while at most 64 sequences run",
    )
    speculative: str | None = option(
        None,
        "ngram:K: guess up to K next tokens of a sequence from earlier text and compute them in one step; MODEL:K: a "
        "small model of the same vocabulary (folder or hub id) guesses; output stays the same; fewer than K "
        "where guesses were wrong, down to none where that would be slower",
    )
    pooling: str = option(
        "auto",
        "pooling of embeddings; auto: as in the modules.json of sentence-transformers, else last (decoder), mean "
        "(encoder)",
        choices=("auto", "last", "mean", "cls"),
    )
    batch_invariant: bool = option(
        False,
        "greedy output and its logprobs are bitwise the same for every batch, chunking of a prompt, preemption and "
        "prefix hit; slower",
    )
    attention_backend: str = option(
        "auto",
        "on a GPU, the attention kernels of prompts in steps that run without a CUDA graph; auto: triton; flashinfer: "
        "the package flashinfer-python, which must be installed (not measured yet)",
        choices=("auto", "triton", "flashinfer"),
    )
    cuda_graphs: bool = option(
        True, "on a GPU, launch a step of up to 2048 tokens as a recorded graph; off: kernel by kernel, for debugging"
    )
    cuda_graph_max_num_seqs: int = option(
        512, "most sequences in a step that runs as a graph: the graph of each step size takes memory", minimum=1
    )
    tensor_parallel_size: int = option(
        1,
        "number of GPUs, or of processes on a CPU, that compute each layer together, each with a part of its heads and "
        "of its width",
        minimum=1,
        maximum=64,
    )
    data_parallel_size: int = option(
        1,
        "number of replicas of the model in this server, each with a Worker, a KV cache and tensor_parallel_size GPUs "
        "of its own; a request goes to the one that holds most of its prompt, or has least to do",
        minimum=1,
        maximum=64,
    )
    lora: tuple[str, ...] = option(
        (), "LoRA adapters in PEFT's form to load at the start, each NAME=DIR; `model` of a request names one"
    )
    max_loras: int = option(
        8, "most LoRA adapters in one step, and on the device; further ones wait in host memory", minimum=1, maximum=256
    )
    max_lora_rank: int = option(
        16, "largest rank of a LoRA adapter; on a GPU every slot takes memory for it", minimum=1, maximum=256
    )
    allow_runtime_lora: bool = option(
        False, "administrators may load and unload LoRA adapters: POST /v1/load_lora_adapter, /v1/unload_lora_adapter"
    )
    lora_root: str | None = option(None, "folder that holds every adapter that may be loaded at run time")
    cpu_threads: int | None = option(
        None,
        "threads of a CPU Worker, or of each of its ranks; default: OMP_NUM_THREADS, else the number of cores that the "
        "server may use, divided among all ranks and replicas",
        minimum=1,
        maximum=1024,
    )
    step_timeout: float | None = option(
        None,
        "most seconds without a finished step, while there is work, before the Worker is killed and restarted; shorter "
        "for steps whose usual duration is known; default 60, 300 on a CPU",
        above=0,
    )
    sleep_after: float | None = option(
        None,
        "seconds without a request after which the model sleeps: the Worker ends and its memory is free (level 2); the "
        "next request wakes the model and waits meanwhile; default: never",
        above=0,
    )
    max_worker_restarts: int = option(
        6,
        "how often a dead Worker is restarted within worker_restart_window; after that the server exits",
        minimum=0,
    )
    worker_restart_window: float = option(600.0, "seconds over which max_worker_restarts counts restarts", above=0)
    grammar_timeout: float = option(
        3.0, "seconds of processor time that a schema, regex or grammar of a client may take to compile", above=0
    )
    chat_template_timeout: float = option(
        2.0, "seconds of processor time that the chat template may take for one conversation", above=0
    )
    seed: int = option(0, "seed of dummy weights", minimum=0, maximum=2**63 - 1)

    def __post_init__(self) -> None:
        check_config(self)
        if self.swap_space and not self.enable_prefix_caching:
            raise ConfigError("swap_space: the prefix cache keeps the blocks; leave enable_prefix_caching on.")
        self._check_lora()
        if self.disk_cache is not None and self.swap_space == 0:
            raise ConfigError(
                "disk_cache: blocks pass through host memory; reserve GiB with swap_space (--swap-space 4)."
            )
        self._check_speculation()

    @property
    def num_processes(self) -> int:
        """Worker processes in all: the ranks of all replicas."""
        return self.tensor_parallel_size * self.data_parallel_size

    @property
    def serves_adapters(self) -> bool:
        """True if the model has slots for LoRA adapters."""
        return bool(self.lora) or self.allow_runtime_lora

    @property
    def lora_slots(self) -> tuple[int, int] | None:
        """Slots for LoRA adapters on the device, and the largest rank that they hold; None: served without adapters."""
        return (self.max_loras, self.max_lora_rank) if self.serves_adapters else None

    @property
    def adapters(self) -> dict[str, str]:
        """The folders of the adapters to load at the start, by name."""
        return dict(entry.split("=", 1) for entry in self.lora)

    def _check_lora(self) -> None:
        for entry in self.lora:
            name, _, folder = entry.partition("=")
            if not ADAPTER_NAME.fullmatch(name) or not folder:
                raise ConfigError(f"lora: {entry!r} is not NAME=DIR; a name has letters, digits and . : @ / _ -.")
        if len(self.adapters) < len(self.lora):
            raise ConfigError("lora: two adapters have the same name.")
        if self.allow_runtime_lora and self.lora_root is None:
            raise ConfigError("allow_runtime_lora: name the folder of the adapters with lora_root (--lora-root DIR).")
        if self.serves_adapters and self.batch_invariant:
            raise ConfigError(
                "lora: batch_invariant is not served with adapters; the number of rows of an adapter chooses the "
                "kernel of its product."
            )

    @property
    def draft_model(self) -> str:
        """The folder or hub id of the draft model in `speculative`; "" without one."""
        method, _, _ = (self.speculative or "").rpartition(":")
        return "" if method == NGRAM else method

    @property
    def max_draft_tokens(self) -> int:
        """K of `speculative`, 0 without it. Raises ConfigError."""
        if self.speculative is None:
            return 0
        method, _, number = self.speculative.rpartition(":")
        if not method:
            raise ConfigError(f"speculative: {self.speculative!r} is not ngram:K or MODEL:K, such as ngram:8.")
        if not (number.isascii() and number.isdecimal() and 1 <= int(number) <= MAX_DRAFT_TOKENS):
            raise ConfigError(f"speculative: K of {method}:K must be from 1 to {MAX_DRAFT_TOKENS}, not {number!r}.")
        return int(number)

    def _check_speculation(self) -> None:
        if self.max_draft_tokens and self.serves_adapters:
            raise ConfigError("speculative: drafts are not served with LoRA adapters; leave one of the two out.")
        for name in ("max_num_seqs", "max_num_batched_tokens"):
            if self.max_draft_tokens and getattr(self, name) == 1:
                least = 1 + self.max_draft_tokens
                raise ConfigError(f"speculative: drafts take rows of other sequences; set {name} to {least} or more.")
        if not self.draft_model:
            return
        if self.tensor_parallel_size > 1:
            raise ConfigError("speculative: a draft model is served on one device; use ngram:K with several ranks.")
        if self.disk_cache is not None:
            raise ConfigError("speculative: disk_cache keeps no blocks of a draft model; use ngram:K with it.")
