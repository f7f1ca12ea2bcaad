"""benchmarks.token_cost measures a real server, and notices a request that fails."""

import argparse
import asyncio

import pytest

from benchmarks.token_cost import ask_all, measure
from engine.checkpoint.locate import BUNDLED_MODEL
from tests.checkpoints import save_fake_checkpoint
from tests.server.live import LiveServer


def options(**changes):
    values = {"model": BUNDLED_MODEL, "requests": 3, "tokens": 6, "repeats": 1, "top_logprobs": None}
    return argparse.Namespace(**(values | changes))


@pytest.mark.parametrize("top_logprobs", [None, 2], ids=["text", "logprobs"])
@pytest.mark.parametrize("interval", [None, 2], ids=["whole", "streamed"])
def test_a_server_is_measured(interval, top_logprobs):
    row = measure(options(top_logprobs=top_logprobs), interval)
    assert 0 < row["us_per_token"] < 1e6 and row["tokens_per_s"] > 0


def test_a_failed_request_ends_the_measurement(tmp_path):
    with LiveServer(save_fake_checkpoint(tmp_path)) as live, pytest.raises(RuntimeError, match="model_not_found"):
        asyncio.run(ask_all(live.listener.getsockname()[1], options(), stream=True, repetition=0))
