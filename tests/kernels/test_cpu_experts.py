"""Mixtures of experts packed for a CPU: the grouped products against the reference, and the kernels around them."""

import ctypes

import pytest
import torch

from kernels.cpu.experts.pairs import gather_pairs, sort_pairs, sum_pairs
from kernels.cpu.experts.routing import pack_router, router
from kernels.cpu.linear.places import BLOCKS_BEFORE, END, ENTRY, EXPERT, FIRST, HEADER
from kernels.cpu.parallel import recording_to
from kernels.dispatch import cpu_kernels
from kernels.linear.moe import SILU, Experts, experts_reference
from kernels.linear.moe_kernels import ExpertFormula
from kernels.linear.moe_routing import RoutingRule, route, route_reference
from kernels.quantized.weight import QuantizedWeight
from tests.kernels.moe_cases import GPT_OSS, LLAMA4, close, make, quantize

pytestmark = pytest.mark.skipif(not cpu_kernels().features.MULTIPLIES_PAIRS, reason="needs pairs of bf16")
RULE = RoutingRule(2, True)
# (tokens, experts, top_k, hidden, inner): one row, few rows, experts without rows, several blocks of an expert, and
# matrices that end inside a panel or cannot be gated in it.
SHAPES = [(1, 8, 2, 64, 96), (7, 5, 3, 96, 48), (5, 60, 4, 64, 32), (300, 3, 2, 64, 64), (40, 4, 1, 80, 16)]


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("compresses", [False, True], ids=("plain", "compressed"))
def test_plain_experts(shape, compresses):
    x, gate_up, down, logits = make(*shape, torch.bfloat16)
    routing = route(logits, RoutingRule(shape[2], True))
    experts = Experts(gate_up.clone(), down.clone(), compresses=compresses)
    assert experts.packed is not None and not experts.layers
    close(experts(x, routing), experts_reference(x, gate_up, down, routing))


@pytest.mark.parametrize("formula", [SILU, GPT_OSS, LLAMA4], ids=("biases", "clamped", "weights on the input"))
@pytest.mark.parametrize("inner", [32, 48], ids=("gated in its panel", "gated apart"))
@pytest.mark.parametrize("tokens", [2, 50])
def test_formulas_and_biases(formula, inner, tokens):
    x, gate_up, down, logits = make(tokens, 4, 2, 80, inner, torch.bfloat16)
    biases = torch.randn(4, 2 * inner).bfloat16(), torch.randn(4, 80).bfloat16()
    routing = route(logits, RULE)
    expected = experts_reference(x, gate_up, down, routing, formula, *biases)
    for compresses in (False, True):
        experts = Experts(gate_up.clone(), down.clone(), formula, *biases, compresses=compresses)
        assert experts.packed is not None
        close(experts(x, routing), expected)


@pytest.mark.parametrize("kind", ["int8", "fp8", "int4", "offsets", "permutation"])
@pytest.mark.parametrize("tokens", [1, 9, 130])
def test_experts_in_codes(kind, tokens):
    gate_up, down = quantize(3, 2 * 64, 128, kind, 32), quantize(3, 128, 64, kind, 32)
    x, logits = torch.randn(tokens, 128).bfloat16(), torch.randn(tokens, 3)
    biases = torch.randn(3, 128).bfloat16(), torch.randn(3, 128).bfloat16()
    routing = route(logits, RULE)
    experts = Experts(gate_up, down, SILU, *biases, dtype=torch.bfloat16)
    assert experts.packed is not None
    close(experts(x, routing), experts_reference(x, gate_up.dequantize(), down.dequantize(), routing, SILU, *biases))


def test_what_is_not_packed_is_computed_one_by_one():
    """Orders of each expert's own, matrices of codes that end inside a panel, and rows of no whole vectors."""
    own = quantize(3, 2 * 64, 128, "permutation of each", 32), quantize(3, 128, 64, "permutation of each", 32)
    small = quantize(3, 2 * 16, 48, "int4", 16), quantize(3, 48, 16, "int4", 16)
    odd = make(1, 3, 2, 40, 24, torch.bfloat16)[1:3]
    for gate_up, down in (own, small, odd):
        experts = Experts(gate_up, down, dtype=torch.bfloat16)
        assert experts.packed is None and len(experts.layers) == 3
        x, logits = torch.randn(4, gate_up.shape[2]).bfloat16(), torch.randn(4, 3)
        plain = [part.dequantize() if isinstance(part, QuantizedWeight) else part for part in (gate_up, down)]
        close(experts(x, route(logits, RULE)), experts_reference(x, *plain, route_reference(logits, RULE)))


def test_weights_in_12_bits_give_the_same_bits():
    x, gate_up, down, logits = make(11, 4, 2, 64, 96, torch.bfloat16)
    plain, few = (Experts(gate_up.clone(), down.clone(), compresses=compresses) for compresses in (False, True))
    assert few.packed.are_compressed and not plain.packed.are_compressed
    for tokens in (1, 3, 11):  # 11 tokens: 5 or 6 rows for an expert on average, and more for one
        routing = route(logits[:tokens], RULE)
        assert torch.equal(few(x[:tokens], routing), plain(x[:tokens], routing))


class Calls:
    """Runs kernel calls, and keeps their arguments, whose first word counts the items that were given out."""

    def __init__(self):
        self.calls = []

    def add(self, kernel, packed):
        kernel.entry(packed)
        self.calls.append((kernel.fn.__name__, packed))

    def empty(self, shape, dtype):
        return torch.empty(shape, dtype=dtype)


@pytest.mark.parametrize("kind", ["plain", "compressed", "int4"])
def test_no_item_is_left_for_a_thread_that_comes_late(kind):
    """It would read the table of experts when other kernels have written over it."""
    x, gate_up, down, logits = make(3, 8, 2, 128, 64, torch.bfloat16)
    logits[:] = logits[0]  # two experts have rows, where there could be six
    if kind == "int4":
        gate_up, down = quantize(8, 2 * 64, 128, "int4", 32), quantize(8, 128, 64, "int4", 32)
    experts = Experts(gate_up, down, dtype=torch.bfloat16, compresses=kind == "compressed")
    calls = Calls()
    with recording_to(calls):
        experts(x, route(logits, RULE))
    for name, packed in calls.calls:
        given_out, items = (ctypes.c_int64.from_buffer(packed, place).value for place in (0, 8))
        assert given_out >= items, name
    assert len(calls.calls) >= 6


def test_a_row_has_the_same_bits_with_any_other_rows():
    x, gate_up, down, logits = make(130, 4, 2, 64, 96, torch.bfloat16)
    experts = Experts(gate_up, down)
    together = experts(x, route(logits, RULE))
    for first, end in ((0, 1), (5, 12), (100, 130)):
        assert torch.equal(experts(x[first:end], route(logits[first:end], RULE)), together[first:end])


@pytest.mark.parametrize("most_rows", [1, 6, 96])
def test_pairs_are_sorted_by_expert(most_rows):
    experts = torch.randint(0, 7, (50, 3), dtype=torch.int32)
    experts[experts == 4] = 5  # expert 4 has no rows
    pairs = sort_pairs(experts, 7, most_rows)
    expected = experts.flatten().argsort(stable=True)
    assert pairs.order.tolist() == expected.tolist()
    assert pairs.places[expected].tolist() == list(range(150))
    blocks, entries, most, *_ = pairs.groups.table.tolist()
    rows = pairs.groups.table[HEADER:].view(-1, ENTRY)[:entries]
    counts = experts.flatten().bincount(minlength=7)
    assert rows[:, EXPERT].tolist() == counts.nonzero()[:, 0].tolist() == [0, 1, 2, 3, 5, 6]
    assert (rows[:, END] - rows[:, FIRST]).tolist() == counts[counts > 0].tolist()
    needed = -(-counts[counts > 0] // most_rows)
    assert rows[:, BLOCKS_BEFORE].tolist() == (needed.cumsum(0) - needed).tolist()
    assert (blocks, most) == (needed.sum(), most_rows) and blocks <= pairs.groups.most_blocks


def test_gathered_and_summed():
    x, experts = torch.randn(9, 32).bfloat16(), torch.randint(0, 4, (9, 2), dtype=torch.int32)
    weights, pairs = torch.rand(9, 2), sort_pairs(experts, 4, 6)
    tokens = pairs.order // 2
    assert torch.equal(gather_pairs(x, pairs, 2, None), x[tokens])
    weighted = gather_pairs(x, pairs, 2, weights)
    assert torch.equal(weighted, (x[tokens].float() * weights.flatten()[pairs.order][:, None]).bfloat16())
    results = torch.randn(18, 32).bfloat16()
    by_token = results[pairs.places.long()].float().view(9, 2, 32)
    torch.testing.assert_close(sum_pairs(results, pairs, 9, None), by_token.sum(1).bfloat16())
    expected = (by_token * weights[:, :, None]).sum(1).bfloat16()
    torch.testing.assert_close(sum_pairs(results, pairs, 9, weights), expected)


@pytest.mark.parametrize("rows", [1, 2, 3, 4, 7])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_router_in_fp32(rows, dtype):
    x, weight = torch.randn(rows, 100).to(dtype), torch.randn(37, 100)
    torch.testing.assert_close(router(x, pack_router(weight), 37), x.float() @ weight.T)


def test_factors_of_experts_multiply_their_weights():
    logits, factors = torch.randn(9, 12), torch.rand(12)
    plain, found = route(logits, RULE), route(logits, RULE, None, factors)
    assert torch.equal(found.experts, plain.experts)
    torch.testing.assert_close(found.weights, plain.weights * factors[plain.experts.long()])


def test_far_logits_are_chosen_in_their_order():
    """All probabilities but one are 0 in fp64, too."""
    logits = torch.tensor([[-3e3, -1e3, 0.0, -2e3]])
    assert route(logits, RoutingRule(3, False)).experts.tolist() == [[2, 1, 3]]


def test_a_gate_that_another_function_computes():
    x, gate_up, down, logits = make(6, 4, 2, 64, 32, torch.bfloat16)
    routing = route(logits, RULE)
    for name in ("gelu", "gelu_new", "relu2"):
        formula = ExpertFormula(name)
        experts = Experts(gate_up.clone(), down.clone(), formula)
        assert experts.packed is not None
        close(experts(x, routing), experts_reference(x, gate_up, down, routing, formula))
