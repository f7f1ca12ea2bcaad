"""Coding agents do a scripted task with a tool call: in a scratch folder, against a live server, from their packages.

The server has the bundled weights with a longer rotary table, for an agent's prompt has tens of thousands of tokens.
tests/clients/forcing_proxy.py makes the model say what the script says; everything else of a request is the agent's.
"""

import json
import os
import shutil
import subprocess
import time
from pathlib import Path

import pytest

from engine.checkpoint.locate import BUNDLED_MODEL
from tests.clients.agents import AGENTS, FILE, ISOLATED, MODEL, SAID, TEXT
from tests.clients.forcing_proxy import ForcingProxy
from tests.server.serving import serving_process

CONTEXT = 131072
SECONDS = 300.0


def lengthened_checkpoint(folder: Path) -> Path:
    """The bundled model for prompts of up to CONTEXT tokens; it says nothing sensible after its own 2,048."""
    shutil.copytree(BUNDLED_MODEL, folder)
    for name, key in (("config.json", "max_position_embeddings"), ("tokenizer_config.json", "model_max_length")):
        path = folder / name
        path.write_text(json.dumps(json.loads(path.read_text()) | {key: CONTEXT}))
    return folder


@pytest.fixture(scope="module")
def url(tmp_path_factory):
    folder = lengthened_checkpoint(tmp_path_factory.mktemp("long") / "model")
    with serving_process("--model", str(folder), "--served-model-name", MODEL) as (url, _):
        yield url


@pytest.mark.parametrize("name", AGENTS)
def test_a_scripted_task(name, url, tmp_path):
    agent, home, scratch = AGENTS[name], tmp_path / "home", tmp_path / "scratch"
    home.mkdir()
    scratch.mkdir()
    executable = Path(os.environ["CLIENTS_AGENTS_FOLDER"]) / agent.executable
    with ForcingProxy(url, agent.script(scratch)) as proxy:
        places = {"url": proxy.url, "scratch": str(scratch), "home": str(home)}
        for path, text in agent.files.items():
            (home / path).parent.mkdir(parents=True, exist_ok=True)
            (home / path).write_text(text.format(**places))
        environment = {key: value.format(**places) for key, value in (ISOLATED | agent.environment).items()}
        start = time.monotonic()
        ended = subprocess.run(
            [executable, *(part.format(**places) for part in agent.command)],
            cwd=scratch,
            env={"PATH": os.environ["PATH"], "HOME": str(home), "LANG": "C.UTF-8"} | environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=SECONDS,
        )
    told = f"{ended.stdout[-2000:]}\n{ended.stderr[-2000:]}"
    for exchange in proxy.exchanges:
        print(exchange.method, exchange.url, exchange.status, "forced" if exchange.forced else "")
        refused = exchange.answer[:300].decode(errors="replace")
        assert exchange.status < 400, f"{exchange.method} {exchange.url}: {exchange.status} {refused}\n{told}"
    print(f"{name}: {time.monotonic() - start:.1f} s")
    assert ended.returncode == 0, told
    assert (scratch / FILE).read_text().strip() == TEXT, told
    assert SAID in agent.says(ended.stdout), told
    forced = [exchange for exchange in proxy.exchanges if exchange.forced]
    assert len(forced) > len(agent.script(scratch).calls), "each call is a request, and the text after them"
    assert {exchange.url.partition("?")[0] for exchange in forced} == {agent.route}
