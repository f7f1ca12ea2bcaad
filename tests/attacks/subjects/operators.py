"""The surroundings of a server: who should read its log, what signals it gets, which checkpoint it was given."""

import asyncio
import json
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from pathlib import Path

from benchmarks.processes import session_and_descendants
from tests.attacks.frame import Target, attack, forever

ROOT = Path(__file__).resolve().parents[3]
BUNDLED = ROOT / "engine/models/bundled"
SECRETS = {"PAGESERVE_API_KEY": "sk-in-the-environment", "HF_TOKEN": "hf-in-the-environment"}
MOST_WORKER_MB = 3000
NAN_TOKEN = 129
HELPER_SECONDS = 10.0  # for a form whose helper was stopped


def read(pid: int, name: str) -> bytes:
    """A file of /proc; empty for a process that has ended."""
    try:
        return Path(f"/proc/{pid}/{name}").read_bytes()
    except OSError:
        return b""


def pids_of(target: Target, module: bytes) -> list[int]:
    """The server's processes that run a module."""
    return [pid for pid in session_and_descendants(target.pid) if module in read(pid, "cmdline").split(b"\0")]


async def ask_for_form(target: Target, pattern: str) -> int:
    body = {"model": target.model, "prompt": "a", "max_tokens": 8, "structured_outputs": {"regex": pattern}}
    return (await target.post("/v1/completions", body)).status


@attack(21, seconds=8.0, log_pipe=True)
async def log_that_nobody_reads(target: Target) -> None:
    """SIGHUP and dumps of the Worker's stacks, some MB of log, into a pipe that nobody reads."""
    [worker] = pids_of(target, b"engine.worker.worker")
    while True:
        os.kill(target.pid, signal.SIGHUP)
        os.kill(worker, signal.SIGUSR1)
        await asyncio.sleep(0.02)


@attack(22, seconds=6.0, environment=SECRETS)
async def secrets_of_the_environment(target: Target) -> str | None:
    """Keys and tokens in the environment of the Worker and of helpers."""
    await ask_for_form(target, "[ab]{3}")
    for pid in session_and_descendants(target.pid):
        environment = read(pid, "environ")
        if pid != target.pid and any(secret.encode() in environment for secret in SECRETS.values()):
            return f"process {pid} has them: {read(pid, 'cmdline')[:80]!r}"
    return None


@attack(22, seconds=20.0)
async def links_out_of_a_checkpoint(target: Target) -> str | None:
    """Checkpoints whose files are links to others of this machine: none may be served."""
    for name in ("chat_template.jinja", "tokenizer_config.json", "config.json", "generation_config.json"):
        with tempfile.TemporaryDirectory() as folder:
            model = Path(shutil.copytree(BUNDLED, Path(folder) / "model"))
            (model / name).unlink(missing_ok=True)
            (model / name).symlink_to("/etc/passwd")
            command = [sys.executable, "-m", "server.cli", "serve", "--model", str(model), "--port", "0"]
            process = await asyncio.create_subprocess_exec(*command, cwd=ROOT, stderr=asyncio.subprocess.PIPE)
            try:
                _, errors = await process.communicate()
            finally:
                if process.returncode is None:
                    process.kill()
            if process.returncode != 2 or b"leaves the model's folder" not in errors:
                return f"{name}: status {process.returncode}, {errors[-200:]!r}"
    return None


def with_claims(folder: Path) -> list[str]:
    """The bundled model, with a hundred million positions."""
    model = Path(shutil.copytree(BUNDLED, folder / "model"))
    config = json.loads((model / "config.json").read_text()) | {"max_position_embeddings": 10**8}
    (model / "config.json").write_text(json.dumps(config))
    return ["--model", str(model)]


@attack(22, seconds=4.0, prepare=with_claims)
async def claims_of_a_checkpoint(target: Target) -> str | None:
    """max_position_embeddings of 10^8: the Worker takes no more memory than with another checkpoint."""
    [worker] = pids_of(target, b"engine.worker.worker")
    lines = read(worker, "status").splitlines()
    peak = next(int(line.split()[1]) for line in lines if line.startswith(b"VmHWM:")) >> 10
    return None if peak < MOST_WORKER_MB else f"the Worker took {peak} MB"


def with_nan(folder: Path) -> list[str]:
    """The bundled model with an output matrix of its own, and NaN in the input row of one token."""
    from safetensors.torch import load_file, save_file

    model = Path(shutil.copytree(BUNDLED, folder / "model"))
    weights = load_file(model / "model.safetensors")
    rows = weights["model.embed_tokens.weight"]
    weights["lm_head.weight"] = rows.clone()
    rows[NAN_TOKEN] = float("nan")
    save_file(weights, model / "model.safetensors")
    config = json.loads((model / "config.json").read_text()) | {"tie_word_embeddings": False}
    (model / "config.json").write_text(json.dumps(config))
    return ["--model", str(model)]


@attack(22, seconds=10.0, prepare=with_nan)
async def nan_weights(target: Target) -> str | None:
    """Weights with NaN for a token of the attacker's prompts: blocks that held NaN must not harm other requests."""
    statuses, texts = set[int](), set[str]()

    async def poison() -> None:
        prompt = [*random.choices(range(300, 400), k=random.randint(1, 40)), NAN_TOKEN]
        statuses.add((await target.post("/v1/completions", {"model": target.model, "prompt": prompt})).status)

    async def compare() -> None:
        body = {"model": target.model, "prompt": [*range(300, 340)], "max_tokens": 40, "temperature": 0}
        body["cache_salt"] = str(random.random())  # no prefix hit: it gets blocks that others used
        answer = await target.post("/v1/completions", body)
        texts.add(json.loads(answer.body)["choices"][0]["text"])

    try:
        await asyncio.wait_for(forever(*[poison] * 3, compare), 8.0)
    except asyncio.TimeoutError:
        pass
    if statuses != {500}:
        return f"prompts with NaN had the statuses {sorted(statuses)}"
    return None if len(texts) == 1 else f"a greedy answer had {len(texts)} different texts"


@attack(22, seconds=25.0)
async def stopped_grammar_helpers(target: Target) -> str | None:
    """SIGSTOP for every process that compiles grammars; new forms are to be answered soon."""
    await ask_for_form(target, "[ab]{3}")
    for number in range(2):
        for pid in pids_of(target, b"engine.grammars.checker_process"):
            os.kill(pid, signal.SIGSTOP)
        started = time.monotonic()
        statuses = await asyncio.gather(*(ask_for_form(target, f"[ab]{{{number + 4}}}{i}") for i in range(4)))
        seconds = time.monotonic() - started
        if seconds > HELPER_SECONDS or set(statuses) != {200}:
            return f"forms took {seconds:.1f} s, with the statuses {statuses}"
    return None
