"""benchmarks/kv_cache_dtype.py from end to end, on a few documents."""

import json

import pytest

from benchmarks import kv_cache_dtype
from training.corpus import HELD_OUT_SEED, Corpus


def test_the_table_and_its_json(monkeypatch, tmp_path, capsys):
    corpus = Corpus(HELD_OUT_SEED, held_out=True)
    monkeypatch.setattr(kv_cache_dtype, "held_out_documents", lambda count: [corpus.document(i) for i in range(count)])
    monkeypatch.setattr(kv_cache_dtype, "ROUNDS", 1)
    path = tmp_path / "out.json"
    kv_cache_dtype.main(["--documents", "4", "--prompts", "2", "--tokens", "12", "--json", str(path)])
    found = json.loads(path.read_text())
    rows = {row["cache_dtype"]: row for row in found["rows"]}
    assert list(rows) == ["float32", "int8", "fp8", "int4"] and "int4" in capsys.readouterr().out
    per_token = {name: row["bytes_per_token"] for name, row in rows.items()}
    assert per_token == {"float32": 4096, "int8": 1152, "fp8": 1152, "int4": 640}  # 2 * 4 layers * 4 heads * a row
    assert rows["int8"]["blocks_per_gib"] == (1 << 30) // (16 * 1152)
    plain = rows["float32"]
    assert plain["same_token"] == plain["until_different"] == 1.0, "decode and prefill of one cache must agree"
    for name, tolerance in (("int8", 0.01), ("fp8", 0.03), ("int4", 0.1)):
        assert rows[name]["perplexity"] == pytest.approx(plain["perplexity"], rel=tolerance)
        assert rows[name]["perplexity"] != plain["perplexity"]
        assert rows[name]["until_different"] <= rows[name]["same_token"]
