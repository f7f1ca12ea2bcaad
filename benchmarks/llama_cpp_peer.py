"""The llama.cpp side of benchmarks.quantized: runs in an environment with llama-cpp-python and numpy.

    python llama_cpp_peer.py THREADS FILE...

Loads the GGUF files. Then it answers a line {"file", "prompts", "tokens"} on stdin with a line {"prefill_s",
"decode_s"} on stdout; decode_s is the time of the tokens after the first. Several prompts are computed one after the
other, then their sequences are decoded in one batch.
"""

import ctypes
import json
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import llama_cpp
import numpy as np

CONTEXT = 2048


MAX_SEQUENCES = 16


class Model:
    """A GGUF file in llama.cpp, with a context for one sequence and one for several."""

    def __init__(self, path: Path, threads: int) -> None:
        self.model = llama_cpp.llama_model_load_from_file(str(path).encode(), llama_cpp.llama_model_default_params())
        self.alone, self.together = self._context(threads, 1), self._context(threads, MAX_SEQUENCES)
        self.batch = llama_cpp.llama_batch_init(CONTEXT, 0, 1)
        self.vocab_size = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(self.model))

    def run(self, prompts: list[list[int]], tokens: int) -> dict[str, float]:
        """Seconds of the prompts with their first tokens, and of the other tokens, greedily chosen."""
        context = self.alone if len(prompts) == 1 else self.together
        llama_cpp.llama_memory_clear(llama_cpp.llama_get_memory(context), True)
        started = time.perf_counter()
        sampled = []
        for sequence, prompt in enumerate(prompts):
            rows = [(token, place, sequence) for place, token in enumerate(prompt)]
            sampled += self._compute(context, rows, [len(prompt) - 1])
        first = time.perf_counter()
        for step in range(tokens - 1):
            rows = [(token, len(prompts[i]) + step, i) for i, token in enumerate(sampled)]
            sampled = self._compute(context, rows, range(len(rows)))
        return {"prefill_s": first - started, "decode_s": time.perf_counter() - first}

    def _context(self, threads: int, sequences: int) -> Any:
        parameters = llama_cpp.llama_context_default_params()
        parameters.n_ctx, parameters.n_seq_max = CONTEXT * sequences, sequences
        parameters.n_batch = parameters.n_ubatch = CONTEXT
        parameters.n_threads = parameters.n_threads_batch = threads
        return llama_cpp.llama_init_from_model(self.model, parameters)

    def _compute(self, context: Any, rows: list[tuple[int, int, int]], sampled: Iterable[int]) -> list[int]:
        """Compute (token, place, sequence) of each row; the most likely next token of the rows in `sampled`."""
        batch, sampled = self.batch, list(sampled)
        batch.n_tokens = len(rows)
        for i, (token, place, sequence) in enumerate(rows):
            batch.token[i], batch.pos[i] = token, place
            batch.n_seq_id[i], batch.seq_id[i][0] = 1, sequence
            batch.logits[i] = i in sampled
        failed = llama_cpp.llama_decode(context, batch)
        assert failed == 0, "llama.cpp could not decode"
        logits = [llama_cpp.llama_get_logits_ith(context, i) for i in sampled]
        return [int(np.ctypeslib.as_array(row, (self.vocab_size,)).argmax()) for row in logits]


def main(threads: int, paths: list[Path]) -> None:
    log = llama_cpp.llama_log_callback(lambda level, text, data: None)
    llama_cpp.llama_log_set(log, ctypes.c_void_p(0))
    models = {str(path): Model(path, threads) for path in paths}
    for line in sys.stdin:
        order: dict[str, Any] = json.loads(line)
        print(json.dumps(models[order["file"]].run(order["prompts"], order["tokens"])), flush=True)


if __name__ == "__main__":
    main(int(sys.argv[1]), [Path(path) for path in sys.argv[2:]])
