"""Statistics and table, against numbers worked out by hand (and numpy for percentiles)."""

import json
import random

import numpy as np
import pytest

from server.commands.bench.answers import Answer
from server.commands.bench.figures import COLUMNS, heading, make_figures, medians, percentile, ratio_row, ratios, row
from server.commands.bench.report import describe, machine, write_json
from server.commands.bench.workloads import Call


def answer(started, *samples, tokens=3):
    call = Call((1, 2), tokens, n=len(samples))
    return Answer(call, started, samples, prompt_tokens=2, output_tokens=tokens * len(samples))


def figures(**changes):
    answers = [answer(10.0, (10.1, 10.2, 10.4)), answer(10.0, (10.3, 10.5, 10.7))]
    values = {"answers": answers, "failures": [], "wall_s": 2.0, "client_cpu_s": 0.1} | changes
    return make_figures("uniform", **values)


def test_figures_by_hand():
    result = figures()
    assert (result.requests, result.failed, result.prompt_tokens, result.output_tokens) == (2, 0, 4, 6)
    assert (result.out_tok_s, result.req_s) == (3.0, 1.0)
    assert result.ttft_p50 == pytest.approx(200)  # 100 and 300
    assert result.ttft_p99 == pytest.approx(298)
    assert result.itl_p50 == pytest.approx(200)  # 100, 200, 200, 200
    assert result.tpot_p50 == pytest.approx((150 + 200) / 2)
    assert result.e2e_p50 == pytest.approx(550)


def test_gaps_are_within_a_sample_not_between_samples():
    two = make_figures("parallel", [answer(0.0, (1.0, 2.0, 3.0), (1.0, 2.0, 3.0))], [], 3.0, 0.0)
    assert two.itl_p50 == pytest.approx(1000)
    assert two.tpot_p50 == pytest.approx(1000)
    assert two.output_tokens == 6


def test_tpot_counts_tokens_where_a_chunk_holds_several():
    packed = make_figures("single", [answer(0.0, (1.0, 5.0), tokens=9)], [], 5.0, 0.0)
    assert packed.itl_p50 == pytest.approx(4000)
    assert packed.tpot_p50 == pytest.approx(500)


def test_one_token_has_no_tpot_and_no_gap():
    one = make_figures("single", [answer(0.0, (1.0,), tokens=1)], [], 1.0, 0.0)
    assert (one.tpot_p50, one.itl_p50, one.ttft_p50) == (None, None, 1000)


def test_failures_count_as_requests_and_as_nothing_else():
    result = figures(failures=["late", "late", "lost"])
    assert (result.requests, result.failed, result.failures) == (5, 3, ("late", "lost"))
    assert result.out_tok_s == 3.0
    nothing = make_figures("uniform", [], ["lost"], 1.0, 0.0)
    assert (nothing.out_tok_s, nothing.ttft_p50, nothing.e2e_p99) == (None, None, None)


@pytest.mark.parametrize("count", [1, 2, 7, 100])
@pytest.mark.parametrize("percent", [0, 50, 99, 100])
def test_percentile_is_numpys(count, percent):
    values = [random.Random(count).random() for _ in range(count)]
    assert percentile(values, percent) == pytest.approx(np.percentile(values, percent))


def test_percentile_of_nothing():
    assert percentile([], 50) is None


def test_medians_skip_runs_without_a_figure():
    runs = [figures(wall_s=1.0), figures(wall_s=2.0), figures(wall_s=6.0), figures(answers=[], failures=["lost"])]
    assert medians(runs)["out_tok_s"] == 3.0
    assert medians([])["out_tok_s"] is None


def test_a_ratio_above_one_is_always_better_for_ours():
    fast, slow = medians([figures(wall_s=1.0)]), medians([figures(wall_s=2.0)])
    assert ratios(fast, slow)["out_tok_s"] == 2.0
    late = medians([figures(answers=[answer(9.0, (10.1, 10.2, 10.4)), answer(9.0, (10.3, 10.5, 10.7))])])
    assert ratios(fast, late)["ttft_p50"] == pytest.approx(1200 / 200)
    assert ratios(late, fast)["ttft_p50"] == pytest.approx(200 / 1200)
    assert ratios(fast, medians([]))["ttft_p50"] is None


def test_the_table_lines_up():
    lines = [heading(), row("uniform", "ours", [figures()]), ratio_row(ratios(medians([figures()]), medians([])))]
    assert len({len(line) for line in lines}) == 1
    assert lines[1].split() == ["uniform", "ours", "3.0", "1.00", "200.0", "298.0", "200.0", "200.0", "175.0", "550",
                                "697", "0/2"]  # fmt: skip
    assert lines[2].split() == ["ratio", *["-"] * len(COLUMNS)]


def test_json_holds_every_run_and_the_machine(tmp_path):
    path = tmp_path / "new" / "result.json"
    write_json(path, {"n": 2}, {"ours": {"model": "m"}}, [{"server": "ours", **figures().as_dict()}])
    document = json.loads(path.read_text())
    assert document["machine"] == machine()
    assert document["machine"]["cores"] >= 1 and document["machine"]["cpu"] in describe(machine())
    assert document["runs"][0]["server"] == "ours" and document["runs"][0]["out_tok_s"] == 3.0
    assert (document["settings"], document["servers"]) == ({"n": 2}, {"ours": {"model": "m"}})
