"""benchmarks/claims: its rows, and the claim that needs no time. The others: python -m benchmarks.claims."""

import json

import pytest

from benchmarks.claims import __main__ as claims
from benchmarks.claims.row import Row


def row(ours, other, aim=None, *, at_most=False):
    return Row("a claim", "tokens/s", ours, other, "the other", aim, at_most)


@pytest.mark.parametrize(
    "given, held, word",
    [
        (row(20, 10, 2.0), True, ">= 2 held"),
        (row(19, 10, 2.0), False, ">= 2 missed"),
        (row(19, 10, 2.0, at_most=True), True, "<= 2 held"),
        (row(21, 10, 2.0, at_most=True), False, "<= 2 missed"),
        (row(21, 10), None, ""),
    ],
)
def test_a_row_says_whether_its_aim_was_reached(given, held, word):
    assert given.held is held and word in given.line()


def test_memory_in_use_is_counted_and_written(tmp_path, capsys):
    path = tmp_path / "claims.json"
    assert claims.main(["--only", "memory", "--json", str(path)]) == 0
    used, wasted = json.loads(path.read_text())["runs"]
    assert used["held"] and used["ours"] > 90 and wasted["held"] and 0 < wasted["ours"] < 4
    assert capsys.readouterr().out.count("held") == 2


def test_a_missed_aim_is_the_exit_status(monkeypatch):
    monkeypatch.setitem(claims.CLAIMS, "users", lambda repeats: [row(1, 2, 1.0), row(2, 1, 1.0)])
    assert claims.main(["--only", "users"]) == 1
