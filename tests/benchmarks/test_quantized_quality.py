"""benchmarks/quantized_quality.py from end to end, on a few documents."""

import json

import pytest

from benchmarks import kv_cache_dtype, quantized_quality
from kernels.quantized.linear import multiplies_int8_inputs
from training.corpus import HELD_OUT_SEED, Corpus


def test_the_table_and_its_json(monkeypatch, tmp_path):
    corpus = Corpus(HELD_OUT_SEED, held_out=True)
    documents = [corpus.document(i) for i in range(4)]
    monkeypatch.setattr(kv_cache_dtype, "held_out_documents", lambda count: documents[:count])
    path = tmp_path / "out.json"
    quantized_quality.main(["--documents", "4", "--prompts", "2", "--tokens", "12", "--json", str(path)])
    rows = {row["weights"]: row for row in json.loads(path.read_text())["rows"]}
    assert list(rows) == [
        "bfloat16",
        "int8",
        "int4",
        "fp8",
        *(["w8a8"] if multiplies_int8_inputs() else []),
        "w8a8 gpu",
    ]
    plain = rows.pop("bfloat16")
    assert plain["same_token"] > 0.9
    for row in rows.values():
        assert row["perplexity"] == pytest.approx(plain["perplexity"], rel=0.1)
        assert row["perplexity"] != plain["perplexity"]
    assert len({row["perplexity"] for row in rows.values()}) == len(rows), "w8a8 differs from int8 by its inputs"
