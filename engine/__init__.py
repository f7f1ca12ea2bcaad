"""The engine: scheduler, paged memory and the worker that computes.

`from engine import LLM, SamplingParams` is offline use; the names load on first use, so that importing a single driver
module stays cheap and free of torch.
"""

from typing import Any

__all__ = ["LLM", "BeamSearchParams", "CompletionOutput", "RequestOutput", "SamplingParams"]


def __getattr__(name: str) -> Any:
    if name == "LLM":
        from engine.llm import LLM

        return LLM
    if name == "SamplingParams":
        from engine.sampling_params import SamplingParams

        return SamplingParams
    if name == "BeamSearchParams":
        from engine.beam_search import BeamSearchParams

        return BeamSearchParams
    if name in ("RequestOutput", "CompletionOutput"):
        import engine.outputs

        return getattr(engine.outputs, name)
    raise AttributeError(f"module 'engine' has no attribute {name!r}")
