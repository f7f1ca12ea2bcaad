"""The npm client of OpenAI against a live server. `make test` installs it into .cache where npm is found."""

import json
import os
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
CLIENT_FOLDER = ROOT / ".cache" / "node"
SCRIPT = Path(__file__).with_name("openai_node_client.mjs")


@pytest.mark.skipif(not (CLIENT_FOLDER / "node_modules/openai").is_dir(), reason="npm's openai is not installed")
def test_chat_streams_through_the_npm_client(bundled_server):
    environment = {**os.environ, "NODE_CLIENT_FOLDER": str(CLIENT_FOLDER)}
    command = ["node", str(SCRIPT), bundled_server]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, env=environment)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["role"] == "assistant"
    assert found["text"].strip()
    assert found["finish"] in ("stop", "length")
    assert found["usage"]["completion_tokens"] <= 12
    assert found["chunks"] >= 4
    assert found["completion"]
    assert found["error"]["status"] == 400
    assert found["error"]["param"] == "temperature"
