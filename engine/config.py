"""EngineConfig: every engine setting, declared once.

The help text and the limits travel with the field; the command line, the YAML check, the environment and the table
in docs/settings.md are all made from this declaration (engine/settings.py).
"""

from dataclasses import dataclass

from engine.errors import ConfigError
from engine.settings import check_config, option


@dataclass(frozen=True)
class EngineConfig:
    """Engine settings: flags carry vLLM's names where the thing is the same. None: chosen when the model is known.

    Checked when made: ConfigError names the field and what it must be.
    """

    model: str = option("", "folder or Hugging Face id of a safetensors checkpoint; empty: the bundled model")
    revision: str | None = option(None, "branch, tag or commit of a hub id")
    tokenizer: str | None = option(None, "folder or hub id of the tokenizer, where it is not the model's")
    load_format: str = option(
        "auto",
        "auto: safetensors; dummy: random weights for config.json alone",
        choices=("auto", "safetensors", "dummy"),
    )
    device: str = option("auto", "auto: cuda where there is a card, else cpu", choices=("auto", "cuda", "cpu"))
    dtype: str = option(
        "auto", "of weights and activations; auto: the checkpoint's", choices=("auto", "float32", "bfloat16", "float16")
    )
    quantization: str | None = option(
        None, "weight quantisation: none in this version", unsupported="this version serves unquantised weights only"
    )
    generation_config: str = option(
        "auto",
        "sampling of requests that leave it open; auto: as the model's generation_config.json says, openai: as OpenAI "
        "has it (temperature 1, no filters)",
        choices=("auto", "openai"),
    )
    max_model_len: int | None = option(
        None, "longest prompt + output in tokens; default: what the model and memory allow", minimum=1
    )
    block_size: int = option(16, "tokens per KV block", choices=(8, 16, 32, 64, 128))
    gpu_memory_utilization: float = option(
        0.9, "share of the card's memory that may be used in all", above=0, maximum=1
    )
    kv_cache_memory: str | None = option(
        None,
        'KV cache on a CPU, such as "2GiB"; default: what max_num_seqs of the longest sequences take, at most 4 GiB '
        "and a quarter of free memory",
        size=True,
    )
    num_blocks: int | None = option(None, "number of KV blocks, whatever the memory says", minimum=1)
    kv_cache_dtype: str = option(
        "auto",
        "what keys and values are stored as; auto: the model's dtype; int8, fp8 (e4m3), int4: quantised, with a scale "
        "for each token and head",
        choices=("auto", "int8", "fp8", "int4"),
    )
    swap_space: float = option(
        0.0,
        "GiB of host memory for KV blocks that the pool gives up (of preempted sequences, of prefixes); 0: recompute",
        minimum=0,
    )
    swap_policy: str = option(
        "auto",
        "auto: blocks come back from host memory where that is faster than computing them; always: whenever there",
        choices=("auto", "always"),
    )
    disk_cache: str | None = option(
        None, "folder where KV blocks of prefixes outlive the server; they pass through host memory (swap_space)"
    )
    disk_cache_size: str = option("4GiB", "most bytes that disk_cache may take", size=True)
    max_num_seqs: int | None = option(None, "most sequences in one step; default 256, 128 on a CPU", minimum=1)
    max_num_batched_tokens: int | None = option(
        None, "most tokens in one step; default 2048, 8192 from 70 GiB of GPU memory", minimum=1
    )
    enable_prefix_caching: bool = option(True, "share the KV blocks of common prompt prefixes")
    watermark: float = option(
        0.01,
        "share of the blocks kept free when a waiting request is admitted, against thrash",
        minimum=0,
        maximum=0.5,
    )
    admission: str = option(
        "plain",
        "predict: a waiting request that would soon outgrow the pool, by the output lengths seen, stays out",
        choices=("plain", "predict"),
    )
    fair_step_seconds: float | None = option(
        0.03,
        "while a key that holds little is there, a step of those that hold more takes at most so many seconds, or "
        "three times as long as one with an empty prompt, if more: less for faster first tokens of the former, "
        "more for throughput of the latter; none: no bound",
        above=0,
    )
    async_scheduling: bool | None = option(
        None, "plan the next step while this one computes; default: on a GPU, not where both share the cores"
    )
    pooling: str = option(
        "auto",
        "of embeddings; auto: as the modules.json of sentence-transformers says, else last (decoder), mean (encoder)",
        choices=("auto", "last", "mean", "cls"),
    )
    batch_invariant: bool = option(
        False,
        "greedy output and its logprobs have the same bits whatever the batch, the chunks of a prompt, preemption and "
        "prefix hits; slower",
    )
    cuda_graphs: bool = option(
        True, "on a GPU, launch a step of decodes as one recorded graph; off: kernel by kernel, for debugging"
    )
    cuda_graph_max_num_seqs: int = option(
        512, "most sequences of a step that runs from a graph: each size of step takes memory", minimum=1
    )
    tensor_parallel_size: int = option(
        1,
        "number of GPUs that share the model: 1 only in this version",
        unsupported="this version runs one Worker; start one server per GPU and put a proxy in front (deploy/)",
    )
    cpu_threads: int | None = option(
        None,
        "threads of a CPU Worker; default: as OMP_NUM_THREADS says, else the cores this process may use",
        minimum=1,
        maximum=1024,
    )
    step_timeout: float | None = option(
        None,
        "most seconds without a finished step, while there is work, before the Worker is killed and started again; "
        "less where steps of its kind have been seen; default 60, 300 on a CPU",
        above=0,
    )
    max_worker_restarts: int = option(
        6,
        "a Worker that died is started again this often within worker_restart_window; then the server ends",
        minimum=0,
    )
    worker_restart_window: float = option(600.0, "seconds over which max_worker_restarts counts", above=0)
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
            raise ConfigError("swap_space: blocks are kept by the prefix cache; leave enable_prefix_caching on.")
        if self.disk_cache is not None and self.swap_space == 0:
            raise ConfigError("disk_cache: blocks pass through host memory on their way; give it some with swap_space.")
