"""The llama.cpp side of benchmarks.quantized: runs in an environment with llama-cpp-python, gguf and numpy.

    python llama_cpp_peer.py CHECKPOINT FOLDER THREADS FORM...

Writes CHECKPOINT (a llama in safetensors, one bf16 or fp32 file) as GGUF into FOLDER once for each form (BF16, Q8_0,
Q4_0), every matrix in that form. Then it answers a line {"form", "prompt", "tokens"} on stdin with a line
{"prefill_s", "decode_s"} on stdout; decode_s is the time of the tokens after the first. The first line says the bytes
of each file.
"""

import ctypes
import json
import sys
import time
from pathlib import Path
from typing import Any

import gguf
import llama_cpp
import numpy as np

CONTEXT = 2048
NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def read_safetensors(path: Path) -> dict[str, np.ndarray]:
    """All tensors in fp32."""
    data = path.read_bytes()
    length = int.from_bytes(data[:8], "little")
    tensors = {}
    for name, entry in json.loads(data[8 : 8 + length]).items():
        if name == "__metadata__":
            continue
        begin, end = (8 + length + offset for offset in entry["data_offsets"])
        raw = data[begin:end]
        if entry["dtype"] == "BF16":
            values = (np.frombuffer(raw, np.uint16).astype(np.uint32) << 16).view(np.float32)
        else:
            assert entry["dtype"] == "F32", f"{name} is of type {entry['dtype']}"
            values = np.frombuffer(raw, np.float32)
        tensors[name] = values.reshape(entry["shape"])
    return tensors


def gguf_name(name: str) -> str:
    """ "model.layers.3.mlp.up_proj.weight" -> "blk.3.ffn_up.weight" """
    module = name.removesuffix(".weight")
    if not module.startswith("model.layers."):
        return f"{NAMES[module]}.weight"
    _, _, layer, inner = module.split(".", 3)
    return f"blk.{layer}.{NAMES[inner]}.weight"


def write_gguf(checkpoint: Path, target: Path) -> None:
    """The checkpoint in fp32. Rows of q and k are put into llama.cpp's order, in which rotary pairs are neighbours."""
    config = json.loads((checkpoint / "config.json").read_text())
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    writer = gguf.GGUFWriter(str(target), "llama")
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(heads)
    writer.add_head_count_kv(kv_heads)
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(config["rope_parameters"]["rope_theta"])
    writer.add_rope_dimension_count(config["head_dim"])
    writer.add_vocab_size(config["vocab_size"])
    writer.add_tokenizer_model("no_vocab")
    for name, values in read_safetensors(checkpoint / "model.safetensors").items():
        for part, count in (("q_proj", heads), ("k_proj", kv_heads)):
            if part in name:
                rows = values.reshape(count, 2, -1, values.shape[1])
                values = rows.swapaxes(1, 2).reshape(values.shape)
        writer.add_tensor(gguf_name(name), np.ascontiguousarray(values))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def quantize(source: Path, target: Path, form: str) -> None:
    """Write `source` with every matrix in `form`."""
    parameters = llama_cpp.llama_model_quantize_default_params()
    parameters.ftype = getattr(llama_cpp, f"LLAMA_FTYPE_MOSTLY_{form}")
    parameters.pure = True
    failed = llama_cpp.llama_model_quantize(str(source).encode(), str(target).encode(), ctypes.byref(parameters))
    assert failed == 0, f"llama.cpp could not write {form}"


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


def main(checkpoint: Path, folder: Path, threads: int, forms: list[str]) -> None:
    log = llama_cpp.llama_log_callback(lambda level, text, data: None)
    llama_cpp.llama_log_set(log, ctypes.c_void_p(0))
    folder.mkdir(parents=True, exist_ok=True)
    source, paths = folder / "F32.gguf", {form: folder / f"{form}.gguf" for form in forms}
    for form, path in paths.items():
        if not path.exists():
            if not source.exists():
                write_gguf(checkpoint, source)
            quantize(source, path, form)
    models = {form: Model(path, threads) for form, path in paths.items()}
    print(json.dumps({form: path.stat().st_size for form, path in paths.items()}), flush=True)
    for line in sys.stdin:
        order: dict[str, Any] = json.loads(line)
        print(json.dumps(models[order["form"]].run(order["prompt"], order["tokens"])), flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3]), sys.argv[4:])
