"""The replay of edits in benchmarks/predictions.py."""

import pytest

from benchmarks.predictions import Replay
from engine.scheduling.speculation.drafts import DraftSource

TEXT = [i * i % 97 for i in range(400)]


@pytest.mark.parametrize("source", [DraftSource.NONE, DraftSource.TEXT], ids=str)
def test_a_repeated_text_takes_few_steps_and_another_one_each_of_its_tokens(source):
    replay = Replay(source, longest=16)
    replay.run(TEXT, TEXT)
    assert len(TEXT) / 17 <= replay.num_steps < len(TEXT) / 5
    assert replay.seconds < 0.5 * len(TEXT) * 9
    replay = Replay(source, longest=16)
    replay.run([1], list(range(100, 300)))
    assert replay.num_steps >= 199  # the step of the prompt brings the first token
    replay = Replay(source, longest=16)
    replay.run(TEXT, [*range(100, 300), *TEXT])
    assert replay.num_steps < 200 + len(TEXT) / 5
