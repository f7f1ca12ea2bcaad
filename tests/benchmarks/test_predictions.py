"""The replay of edits in benchmarks/predictions.py."""

import pytest

from benchmarks.predictions import DEVICES, SOURCES, Replay
from engine.scheduling.speculation.drafts import make_drafts

TEXT = [i * i % 97 for i in range(400)]
OTHER = list(range(100, 300))


def run(source, device, edits, streams):
    replay = Replay(make_drafts(16, SOURCES[source], DEVICES[device].bounds), source, DEVICES[device])
    replay.run(edits, streams)
    return replay


@pytest.mark.parametrize("source", SOURCES)
@pytest.mark.parametrize("device", DEVICES)
def test_a_repeated_text_takes_few_steps_and_another_one_each_of_its_tokens(source, device):
    replay = run(source, device, [(TEXT, TEXT)], 1)
    assert len(TEXT) / 17 - 1 <= replay.num_decodes < len(TEXT) / 5
    assert replay.seconds < 0.5 * len(TEXT) * DEVICES[device].seconds(1)
    assert run(source, device, [([1], OTHER)], 1).num_decodes >= 199  # the step of the prompt brings the first token
    assert run(source, device, [(TEXT, [*OTHER, *TEXT])], 1).num_decodes < 200 + len(TEXT) / 5


@pytest.mark.parametrize("source", SOURCES)
def test_a_gpu_makes_drafts_for_more_answers_at_a_time_than_a_cpu(source):
    edits = [(TEXT, TEXT)] * 32
    assert run(source, "gpu", edits, 32).num_decodes < 32 * len(TEXT) / 4
    assert run(source, "cpu", edits, 32).num_decodes > 32 * len(TEXT) * 0.9


def test_one_answer_with_drafts_takes_little_time_from_seven_without():
    others = [([1], [100 * i + j for j in range(400)]) for i in range(7)]
    alone, among = (run("prediction", "cpu", edits, 8) for edits in ([(TEXT, TEXT)], [(TEXT, TEXT), *others]))
    assert alone.most_rows == 17
    assert 8 < among.most_rows <= 12  # a step of 8 + 8 units may take 16 / 4 * 8 / 7 more
