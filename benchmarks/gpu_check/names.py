"""Names that parts and their reports share: models, workloads, and the ways in which transformers runs them."""

LLAMA, QWEN, LLAMA_2 = "Llama-3-8B", "Qwen3-0.6B", "Llama-2-7B"
NANO = f"{QWEN}: nano-vllm workload"
# How transformers serves the same prompts, and how many times faster the engine must be.
WAYS = (("one by one", 24.0), ("static batch", 4.0), ("continuous", 1.0))
