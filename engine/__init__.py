"""The engine: scheduler, paged memory and the worker that computes.

`from engine import LLM, SamplingParams` is offline use; the names load on first use, so that importing a single driver
module stays cheap and free of torch.
"""

from importlib import import_module
from typing import Any

__all__ = ["LLM", "BeamSearchParams", "CompletionOutput", "RequestOutput", "SamplingParams"]

MODULES = {
    "LLM": "engine.llm",
    "BeamSearchParams": "engine.scheduling.beam_search",
    "CompletionOutput": "engine.outputs",
    "RequestOutput": "engine.outputs",
    "SamplingParams": "engine.sampling_params",
}


def __getattr__(name: str) -> Any:
    if name in MODULES:
        return getattr(import_module(MODULES[name]), name)
    raise AttributeError(f"module 'engine' has no attribute {name!r}")
