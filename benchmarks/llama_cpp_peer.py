"""The llama.cpp side of benchmarks.quantized: runs in an environment with llama-cpp-python and numpy.

    python llama_cpp_peer.py THREADS FILE...

Loads the GGUF files. Then it answers a line {"file", "prompt", "tokens"} on stdin with a line {"prefill_s", "decode_s"}
on stdout; decode_s is the time of the tokens after the first.
"""

import ctypes
import json
import sys
import time
from pathlib import Path
from typing import Any

import llama_cpp
import numpy as np

CONTEXT = 2048


class Model:
    """A GGUF file in llama.cpp, with one sequence."""

    def __init__(self, path: Path, threads: int) -> None:
        self.model = llama_cpp.llama_model_load_from_file(str(path).encode(), llama_cpp.llama_model_default_params())
        parameters = llama_cpp.llama_context_default_params()
        parameters.n_ctx = parameters.n_batch = parameters.n_ubatch = CONTEXT
        parameters.n_threads = parameters.n_threads_batch = threads
        self.context = llama_cpp.llama_init_from_model(self.model, parameters)
        self.vocab_size = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(self.model))

    def run(self, prompt: list[int], tokens: int) -> dict[str, float]:
        """Seconds of the prompt with its first token, and of the other tokens, greedily chosen."""
        llama_cpp.llama_memory_clear(llama_cpp.llama_get_memory(self.context), True)
        started = time.perf_counter()
        token = self._next(prompt)
        first = time.perf_counter()
        for _ in range(tokens - 1):
            token = self._next([token])
        return {"prefill_s": first - started, "decode_s": time.perf_counter() - first}

    def _next(self, ids: list[int]) -> int:
        array = (llama_cpp.llama_token * len(ids))(*ids)
        failed = llama_cpp.llama_decode(self.context, llama_cpp.llama_batch_get_one(array, len(ids)))
        assert failed == 0, "llama.cpp could not decode"
        logits = llama_cpp.llama_get_logits_ith(self.context, -1)
        return int(np.ctypeslib.as_array(logits, (self.vocab_size,)).argmax())


def main(threads: int, paths: list[Path]) -> None:
    log = llama_cpp.llama_log_callback(lambda level, text, data: None)
    llama_cpp.llama_log_set(log, ctypes.c_void_p(0))
    models = {str(path): Model(path, threads) for path in paths}
    for line in sys.stdin:
        order: dict[str, Any] = json.loads(line)
        print(json.dumps(models[order["file"]].run(order["prompt"], order["tokens"])), flush=True)


if __name__ == "__main__":
    main(int(sys.argv[1]), [Path(path) for path in sys.argv[2:]])
