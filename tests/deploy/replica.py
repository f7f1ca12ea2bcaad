"""A `pageserve serve` process over a tiny model with random weights."""

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import httpx

ROOT = Path(__file__).parents[2]
START_SECONDS = 300.0  # a Worker imports torch and may compile kernels; the machine may be busy
LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 1024,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "tie_word_embeddings": True,
    "torch_dtype": "float32",
    "vocab_size": 260,
    "eos_token_id": 257,
}


def free_ports(count: int) -> list[int]:
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [each.getsockname()[1] for each in sockets]


class Replica:
    """One `pageserve serve` process on a port that it keeps over restarts."""

    def __init__(self, model: Path, port: int, log: Path, *options: str) -> None:
        self.port = port
        self._log = log
        names = f"--served-model-name m --port {port}"
        engine = "--load-format dummy --device cpu --cpu-threads 1 --num-blocks 512 --max-num-seqs 8 --drain-timeout 60"
        serve = [sys.executable, "-m", "server.cli", "serve", str(model)]
        self._command = [*serve, *names.split(), *engine.split(), *options]
        self.start()

    def start(self) -> None:
        environ = {name: value for name, value in os.environ.items() if not name.startswith("PAGESERVE_")}
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(self._command, cwd=ROOT, env=environ, stdout=log, stderr=log)

    def wait_ready(self) -> None:
        deadline = time.monotonic() + START_SECONDS
        while time.monotonic() < deadline:
            assert self._process.poll() is None, self._log.read_text()
            with contextlib.suppress(httpx.HTTPError):
                if httpx.get(f"http://127.0.0.1:{self.port}/ready", timeout=5).status_code == 200:
                    return
            time.sleep(0.1)
        raise AssertionError(f"not ready after {START_SECONDS} s:\n{self._log.read_text()}")

    def restart(self) -> None:
        assert self.stop() == 0, self._log.read_text()
        self.start()
        self.wait_ready()

    def stop(self) -> int:
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGTERM)
        return self._process.wait(90)
