"""The choice of a linear layer's kernel: a timer made of numbers decides, on the CPU."""

import json
import logging

import pytest
import torch
import torch.nn.functional as F

from engine.models.layers.operators import FastOperators
from kernels.linear import choice
from kernels.linear.choice import (
    ROW_BUCKETS,
    LayerKind,
    LinearChoices,
    candidates,
    cublas,
    cublaslt,
    read_choices,
    write_choices,
)
from kernels.linear.packed import PackedLinear

KIND = LayerKind(24, 64, torch.bfloat16, False)


def gemv(x, weight, bias):
    """Stands for the Triton kernel, which no CPU runs."""
    return F.linear(x, weight, bias)


@pytest.fixture(autouse=True)
def fake_gemv(monkeypatch):
    monkeypatch.setitem(choice.PRODUCTS, "gemv", gemv)


def make_choices():
    choices = LinearChoices()
    return choices, [choices.linear(torch.randn(24, 64).bfloat16(), None) for _ in range(3)]


class FakeTimer:
    """Seconds by the name of the product, or by its name and the number of rows."""

    def __init__(self, **seconds):
        self.seconds = {"cublas": 1.0, "cublaslt": 1.0, "gemv": 1.0} | seconds
        self.asked = []

    def __call__(self, product, x, layers):
        name = next(name for name, known in choice.PRODUCTS.items() if known is product)
        self.asked.append((name, len(x), len(layers)))
        seconds = self.seconds[name]
        return seconds(len(x)) if callable(seconds) else seconds


def test_the_fastest_is_used_for_its_bucket_alone():
    choices, layers = make_choices()
    timer = FakeTimer(gemv=lambda rows: 0.5 if rows <= 2 else 2.0, cublaslt=lambda rows: 0.9 if rows == 64 else 1.1)
    known = {}
    assert choices.choose(timer, known, 256)
    expected = {rows: "cublas" for rows in ROW_BUCKETS} | {1: "gemv", 2: "gemv", 64: "cublaslt"}
    assert choices.names(KIND) == expected
    assert known == {KIND.name: {str(rows): name for rows, name in expected.items()}}
    products = [layers[0].products[rows] for rows in (1, 2, 3, 32, 33, 64, 65, 256)]
    assert products == [gemv, gemv, cublas, cublas, cublaslt, cublaslt, cublas, cublas]
    assert {rows for name, rows, _ in timer.asked if name == "gemv"} == {1, 2, 4, 8}
    assert {count for _, _, count in timer.asked} == {3}, "the weights of every layer are read in turn"


@pytest.mark.parametrize("num_rows", [0, 1, 3, 8, 100, 256, 257, 1000])
def test_results_are_those_of_a_linear_layer(num_rows):
    choices, (layer, *_) = make_choices()
    choices.choose(FakeTimer(gemv=0.1, cublaslt=0.5), {}, 256)
    x = torch.randn(num_rows, 64).bfloat16()
    torch.testing.assert_close(layer(x), F.linear(x, layer.weight))


def test_a_bias_is_added_by_every_product():
    weight, bias, x = torch.randn(8, 16), torch.randn(8), torch.randn(4, 16)
    assert list(candidates(weight, bias, 4)) == ["cublas"], "torch gives a layer with a bias to cuBLASLt already"
    for product in (cublas, cublaslt):
        torch.testing.assert_close(product(x, weight, bias), x @ weight.T + bias)
        torch.testing.assert_close(product(x, weight, None), x @ weight.T)


def test_a_gain_within_the_noise_keeps_cublas():
    choices, _ = make_choices()
    choices.choose(FakeTimer(gemv=0.99, cublaslt=0.985), {}, 256)
    assert set(choices.names(KIND).values()) == {"cublas"}


def test_a_product_that_fails_or_is_wrong_is_not_used(monkeypatch, caplog):
    def broken(x, weight, bias):
        raise RuntimeError("out of resource: shared memory")

    monkeypatch.setitem(choice.PRODUCTS, "gemv", broken)
    monkeypatch.setitem(choice.PRODUCTS, "cublaslt", lambda x, weight, bias: F.linear(x, weight) * 1.1)
    choices, _ = make_choices()
    timer = FakeTimer(gemv=0.1, cublaslt=0.1)
    with caplog.at_level(logging.WARNING):
        choices.choose(timer, {}, 4)
    assert set(choices.names(KIND).values()) == {"cublas"}
    assert {name for name, _, _ in timer.asked} == {"cublas"}
    assert "out of resource" in caplog.text and "differs by" in caplog.text


def test_a_spent_budget_leaves_cublas_and_is_measured_at_the_next_start():
    choices, _ = make_choices()
    known = {}
    assert not choices.choose(FakeTimer(gemv=0.1), known, 256, budget_s=-1.0)
    assert known == {KIND.name: {}} and set(choices.names(KIND).values()) == {"cublas"}
    assert choices.choose(FakeTimer(gemv=0.1), known, 256)
    assert choices.names(KIND)[8] == "gemv"


def test_known_choices_are_not_timed_again():
    known = {
        KIND.name: {str(rows): "cublas" for rows in ROW_BUCKETS} | {"1": "gemv", "2": "a kernel of another release"}
    }
    choices, _ = make_choices()
    timer = FakeTimer(gemv=0.1)
    assert choices.choose(timer, known, 256)
    assert {rows for _, rows, _ in timer.asked} == {2}
    assert known[KIND.name]["2"] == "gemv"
    again, _ = make_choices()
    assert not again.choose(FakeTimer(), known, 256)
    assert again.names(KIND) == choices.names(KIND)


def test_only_buckets_that_steps_can_have_are_timed():
    choices, _ = make_choices()
    timer = FakeTimer()
    choices.choose(timer, {}, 48)
    assert {rows for _, rows, _ in timer.asked} == {1, 2, 4, 8, 16, 32, 64}


def test_choices_on_disk(tmp_path, caplog):
    path = tmp_path / "folder" / "choices.json"
    known = {KIND.name: {"1": "gemv"}}
    assert read_choices(path) == {} and not caplog.text
    write_choices(path, known)
    write_choices(path, known)
    assert read_choices(path) == known and [p.name for p in path.parent.iterdir()] == [path.name]
    for damaged in ("{", "[]", "3", '{"a": 3}', '{"a": {"1": 2}}', "\xff"):
        path.write_text(damaged)
        caplog.clear()
        with caplog.at_level(logging.WARNING):
            assert read_choices(path) == {}
        assert "is ignored" in caplog.text
    write_choices(path, known)
    assert json.loads(path.read_text()) == known
    (tmp_path / "file").write_text("")
    write_choices(tmp_path / "file" / "choices.json", known)  # no such folder can be made: logged alone
    assert "not kept" in caplog.text


def test_a_cpu_keeps_its_packed_weights():
    operators = FastOperators()
    layer = operators.linear(torch.randn(16, 32), None)
    assert isinstance(layer, PackedLinear)
    operators.choose_kernels(torch.device("cpu"), 256)
    assert not operators.choices.layers
