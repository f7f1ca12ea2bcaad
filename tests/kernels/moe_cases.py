"""The mixture of experts against its torch reference. Run like triton_cases.py: on a CUDA device as it is, elsewhere
by test_triton.py in the interpreter, and by test_moe.py on the CPU's own path."""

import pytest
import torch

from kernels.card import A100, T4
from kernels.dispatch import use_triton
from kernels.linear.moe import SILU, Experts, experts_reference
from kernels.linear.moe_kernels import TILE_FP32, TILES, TILES_FMA, ExpertFormula, Tile, choose_tile, grouped_experts
from kernels.linear.moe_routing import (
    MAX_EXPERTS,
    Routing,
    RoutingRule,
    max_tiles,
    route,
    route_reference,
    sort_by_expert,
)
from kernels.quantized.weight import INT4, QuantizedWeight, pack_4bit

CUDA = torch.cuda.is_available()
DEVICE = "cuda" if CUDA else "cpu"
KERNELS = use_triton(torch.empty(0, device=DEVICE))
# The interpreter computes bf16 from its bit pattern, silently wrong.
DTYPES = [torch.float32, torch.float16] if KERNELS and not CUDA else [torch.float32, torch.float16, torch.bfloat16]
only_kernels = pytest.mark.skipif(not KERNELS, reason="of the Triton kernels")
# (num_tokens, num_experts, top_k, hidden, inner)
SHAPES = [(1, 8, 2, 64, 96), (7, 5, 3, 100, 36), (70, 4, 1, 48, 65), (33, 60, 4, 33, 17), (3, 2, 2, 130, 70)]


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)


def close(out, expected):
    """Rounding of the two intermediate results, relative to the size of the whole."""
    assert out.dtype == expected.dtype and out.shape == expected.shape
    error = (out.cpu().double() - expected.double()).norm() / expected.double().norm()
    limit = {torch.float32: 1e-6, torch.float16: 1e-3, torch.bfloat16: 8e-3}[out.dtype]
    assert error < limit, error


def make(num_tokens, num_experts, top_k, hidden, inner, dtype):
    """x, gate_up, down and the logits, all on the CPU."""
    x = torch.randn(num_tokens, hidden).to(dtype)
    gate_up = (torch.randn(num_experts, 2 * inner, hidden) * hidden**-0.5).to(dtype)
    down = (torch.randn(num_experts, hidden, inner) * inner**-0.5).to(dtype)
    return x, gate_up, down, torch.randn(num_tokens, num_experts).to(dtype)


def check(x, gate_up, down, logits, top_k, normalize=True, formula=SILU, biases=(None, None)):
    rule = RoutingRule(top_k, normalize)
    given = [None if bias is None else bias.to(DEVICE) for bias in biases]
    experts = Experts(gate_up.clone().to(DEVICE), down.clone().to(DEVICE), formula, *given)
    out = experts(x.to(DEVICE), route(logits.to(DEVICE), rule))
    close(out, experts_reference(x, gate_up, down, route_reference(logits, rule), formula, *biases))
    return experts, out


@pytest.mark.filterwarnings("ignore:overflow encountered in exp")
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_experts(dtype, shape):
    check(*make(*shape, dtype), shape[2], normalize=shape[2] > 1)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_another_activation(dtype):
    check(*make(5, 4, 2, 40, 24, dtype), 2, formula=ExpertFormula("gelu_new"))


GPT_OSS, LLAMA4 = ExpertFormula("silu", clamp_limit=0.7), ExpertFormula("silu", weights_on_input=True)


@pytest.mark.parametrize("formula", [SILU, GPT_OSS, LLAMA4], ids=("biases", "clamped", "weights on the input"))
def test_other_formulas(formula):
    tensors = make(9, 4, 2, 40, 24, torch.float32)
    biases = torch.randn(4, 48), torch.randn(4, 40)
    check(*tensors, 2, False, formula, biases)
    x, gate_up, down, logits = tensors
    changed = experts_reference(x, gate_up, down, route_reference(logits, RoutingRule(2, False)))
    assert not torch.allclose(changed, check(x, gate_up, down, logits, 2, False, formula, biases)[1].cpu(), atol=0.1)


def quantize(experts, rows, columns, kind, group_size):
    """Random codes; scales in fp32, so that the interpreter multiplies as torch does."""
    shape = (experts, rows, columns)
    scales = torch.rand(experts, rows, columns // group_size) * 0.2 + 0.05
    if kind == "int8":
        return QuantizedWeight(torch.randint(-9, 9, shape, dtype=torch.int8), scales / 8, group_size)
    if kind == "fp8":
        return QuantizedWeight(torch.randn(shape).to(torch.float8_e4m3fn), scales, group_size)
    codes = pack_4bit(torch.randint(16, shape, dtype=torch.uint8))
    offsets = torch.randn_like(scales) * 0.1 if kind == "offsets" else None
    weight = QuantizedWeight(codes, scales / 8, group_size, offsets, codebook=INT4)
    if not kind.startswith("permutation"):
        return weight
    orders = torch.stack([torch.randperm(columns, dtype=torch.int32) for _ in range(experts)])
    order = orders if kind == "permutation of each" else orders[0]
    return QuantizedWeight(codes, scales, group_size, None, INT4, order)


@pytest.mark.parametrize("kind", ["int8", "fp8", "int4", "offsets", "permutation", "permutation of each"])
@pytest.mark.parametrize("group_size", [24, 4])
def test_quantised_experts(kind, group_size):
    """As with the dequantised weights. 48 columns are more than one tile and no whole number of tiles."""
    gate_up, down = quantize(5, 2 * 24, 48, kind, group_size), quantize(5, 48, 24, kind, group_size)
    x, logits, rule = torch.randn(7, 48), torch.randn(7, 5), RoutingRule(2, True)
    routing = route_reference(logits, rule)
    experts = Experts(gate_up.to(torch.device(DEVICE)), down.to(torch.device(DEVICE)))
    out = experts(x.to(DEVICE), route(logits.to(DEVICE), rule))
    close(out, experts_reference(x, gate_up.dequantize(), down.dequantize(), routing))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("tokens", [1, 40])
def test_all_tokens_to_the_same_experts(dtype, tokens):
    x, gate_up, down, logits = make(tokens, 9, 2, 48, 40, dtype)
    logits[:, [7, 3]] += 50
    check(x, gate_up, down, logits, 2)


@only_kernels
@pytest.mark.parametrize("tile", TILES, ids=str)
def test_every_tile(tile):
    """More rows of an expert than a tile has, a whole tile exactly, one row, and none."""
    block_m = tile[1].block_m
    x, gate_up, down, logits = make(2 * block_m + 8, 4, 1, 72, 70, torch.float16)
    chosen = torch.tensor([0] * (block_m + 7) + [1] * block_m + [3])
    chosen = chosen[torch.randperm(len(chosen))]
    logits.scatter_(1, chosen[:, None], 60.0)
    experts, rule = Experts(gate_up.to(DEVICE), down.to(DEVICE)), RoutingRule(1, True)
    out = grouped_experts(x.to(DEVICE), experts.gate_up, experts.down, route(logits.to(DEVICE), rule), SILU, tile[1])
    close(out, experts_reference(x, gate_up, down, route_reference(logits, rule)))


def test_no_tokens():
    x, gate_up, down, logits = make(0, 4, 2, 32, 32, torch.float32)
    routing = route(logits.to(DEVICE), RoutingRule(2, True))
    assert Experts(gate_up.to(DEVICE), down.to(DEVICE))(x.to(DEVICE), routing).shape == x.shape


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_a_row_does_not_depend_on_the_batch(dtype):
    """With one tile, as here, to the bit: sums of a row have one order."""
    x, gate_up, down, logits = make(9, 6, 3, 64, 64, dtype)
    experts, together = check(x, gate_up, down, logits, 3)
    rule = RoutingRule(3, True)
    again = experts(x.to(DEVICE), route(logits.to(DEVICE), rule))
    assert torch.equal(again, together)
    if not KERNELS:
        return  # the CPU's GEMMs have an order for each number of rows
    for i in (0, 4, 8):
        alone = experts(x[i : i + 1].to(DEVICE), route(logits[i : i + 1].to(DEVICE), rule))
        assert torch.equal(alone[0], together[i])


@only_kernels
def test_warm_up_leaves_the_weights():
    _, gate_up, down, _ = make(4, 6, 3, 64, 64, torch.float16)
    experts = Experts(gate_up.clone().to(DEVICE), down.clone().to(DEVICE))
    experts.warm_up(RoutingRule(3, True), None, torch.float32)
    assert torch.equal(experts.gate_up.codes.cpu(), gate_up) and torch.equal(experts.down.codes.cpu(), down)


@pytest.mark.parametrize("normalize", [True, False])
@pytest.mark.parametrize("num_tokens, num_experts, top_k", [(1, 8, 2), (70, 8, 8), (130, 60, 5), (9, 200, 1)])
def test_routes(num_tokens, num_experts, top_k, normalize):
    logits = torch.randn(num_tokens, num_experts) * 3
    logits[0] -= 1e4
    rule = RoutingRule(top_k, normalize)
    found, expected = route(logits.to(DEVICE), rule), route_reference(logits, rule)
    assert found.weights.dtype == torch.float32 and found.experts.dtype == torch.int32
    assert torch.equal(found.experts.cpu(), expected.experts)
    torch.testing.assert_close(found.weights.cpu(), expected.weights)
    if normalize:
        torch.testing.assert_close(found.weights.sum(1).cpu(), torch.ones(num_tokens))
    if KERNELS:
        assert found.counts.sum(0).tolist() == expected.experts.flatten().bincount(minlength=num_experts).tolist()


RULES = {
    "sigmoid": (12, RoutingRule(3, False, "sigmoid", scaling=2.5), False),
    "corrected sigmoid": (12, RoutingRule(3, True, "sigmoid"), True),
    "corrected softmax": (12, RoutingRule(3, True), True),
    "groups": (15, RoutingRule(4, True, "sigmoid", scaling=1.5, num_groups=5, groups_per_token=2), True),
    "groups of a softmax": (16, RoutingRule(2, False, num_groups=4, groups_per_token=2), False),
    "sparsemixer": (6, RoutingRule(2, False, "sparsemixer", jitter=0.2), False),
}


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy's, of infinities in the interpreter
@pytest.mark.parametrize("name", RULES)
def test_rules(name):
    num_experts, rule, corrected = RULES[name]
    logits, correction = torch.randn(70, num_experts) * 2, torch.randn(num_experts) if corrected else None
    logits[0, :] -= 200.0  # sigmoids of 0, so that any expert may be chosen
    expected = route_reference(logits, rule, correction)
    found = route(logits.to(DEVICE), rule, None if correction is None else correction.to(DEVICE))
    assert torch.equal(found.experts.cpu()[1:], expected.experts[1:])
    torch.testing.assert_close(found.weights.cpu(), expected.weights)
    assert found.weights.isfinite().all()
    plain = route_reference(logits, RoutingRule(rule.top_k, rule.normalize))
    assert not torch.allclose(plain.weights, expected.weights, atol=0.05)


def test_a_correction_changes_the_choice_and_not_the_weights():
    logits, correction = torch.zeros(1, 4), torch.tensor([0.0, 0.3, 0.0, 0.2])
    found = route(logits.to(DEVICE), RoutingRule(2, False, "sigmoid"), correction.to(DEVICE))
    assert found.experts.tolist() == [[1, 3]] and found.weights.tolist() == [[0.5, 0.5]]


def test_normalised_is_the_softmax_of_the_chosen():
    logits = torch.randn(20, 12)
    values, experts = logits.topk(4)
    found = route(logits.to(DEVICE), RoutingRule(4, True))
    assert torch.equal(found.experts.cpu(), experts.int())
    torch.testing.assert_close(found.weights.cpu(), values.softmax(-1))


@pytest.mark.filterwarnings("ignore:invalid value encountered in subtract")
def test_ties_nan_and_infinity_choose_experts_that_exist():
    nan, inf = float("nan"), float("inf")
    rows = [[0.0] * 5, [nan] * 5, [nan, 1.0, 2.0, nan, 0.0], [-inf, 0.0, -inf, -inf, -inf]]
    routing = route(torch.tensor(rows, device=DEVICE), RoutingRule(3, True))
    assert routing.experts[0].tolist() == [0, 1, 2], "the lower expert first"
    assert routing.experts[2].tolist() == [2, 1, 4]
    assert routing.experts.min() >= 0 and routing.experts.max() < 5
    assert routing.weights[1].isnan().all() and routing.weights[[0, 2, 3]].isfinite().all()


@only_kernels
def test_too_many_experts_are_refused():
    with pytest.raises(ValueError, match="top_k 9 of 8 experts"):
        route(torch.zeros(1, 8, device=DEVICE), RoutingRule(9, True))
    with pytest.raises(ValueError, match=f"more than {MAX_EXPERTS}"):
        route(torch.zeros(1, MAX_EXPERTS + 1, device=DEVICE), RoutingRule(2, True))


@only_kernels
@pytest.mark.parametrize("block_m", [16, 64])
@pytest.mark.parametrize("num_tokens, num_experts, top_k", [(1, 8, 2), (150, 8, 2), (700, 60, 4), (40, 300, 2)])
def test_order(num_tokens, num_experts, top_k, block_m):
    """Every pair once, an expert's pairs together; tiles cover them without overlap and none reaches into another's."""
    logits = torch.randn(num_tokens, num_experts)
    logits[:, num_experts // 2 :] -= 100 * (num_tokens > 1)  # experts without tokens
    routing = route(logits.to(DEVICE), RoutingRule(top_k, True))
    order = sort_by_expert(routing, block_m)
    pairs, experts = order.pairs.cpu().long(), routing.experts.flatten().cpu()
    assert sorted(pairs.tolist()) == list(range(num_tokens * top_k))
    by_order = experts[pairs]
    assert torch.equal(by_order, by_order.sort().values)
    covered, tiles = [], order.tiles.cpu().T.tolist()
    assert len(tiles) == max_tiles(num_tokens * top_k, num_experts, block_m)
    for expert, first, end in tiles:
        if expert >= 0:
            rows = range(first, min(first + block_m, end))
            assert len(rows) and (by_order[rows.start : rows.stop] == expert).all()
            covered += rows
    assert covered == list(range(num_tokens * top_k))


def test_max_tiles_is_the_worst_case():
    for pairs, experts, block_m in ((1, 8, 16), (40, 3, 16), (17, 17, 16), (100, 7, 8)):
        worst, last = 0, [pairs] + [0] * (experts - 1)
        while last:  # every split of the pairs over the experts, by moving one at a time from the largest
            worst = max(worst, sum(-(-n // block_m) for n in last))
            moved = sorted(last, reverse=True)
            moved[0], moved[-1] = moved[0] - 1, moved[-1] + 1
            last = moved if max(moved) - min(moved) > 1 else []
        assert worst <= max_tiles(pairs, experts, block_m) <= pairs


def test_choice_of_the_tile():
    few, some, many = (tile for _, tile in TILES)
    assert [choose_tile(torch.bfloat16, A100, n, 8) for n in (1, 128, 129, 512, 513)] == [few, few, some, some, many]
    assert choose_tile(torch.float32, A100, 10**6, 8) == TILE_FP32
    assert [choose_tile(torch.float16, T4, n, 8) for n in (128, 129)] == [tile for _, tile in TILES_FMA]
    assert all(isinstance(tile, Tile) for tile in (few, some, many))


def test_the_order_of_the_experts_does_not_matter_to_the_reference():
    """The oracle itself: a dense sum over all experts with weights of zero."""
    x, gate_up, down, logits = make(6, 4, 2, 16, 24, torch.float32)
    routing = route_reference(logits, RoutingRule(2, False))
    dense = torch.zeros(6, 4).scatter(1, routing.experts.long(), routing.weights)
    gate, up = torch.einsum("th,eih->tei", x, gate_up).chunk(2, dim=-1)
    expected = torch.einsum("tei,ehi,te->th", torch.nn.functional.silu(gate) * up, down, dense)
    torch.testing.assert_close(experts_reference(x, gate_up, down, Routing(routing.weights, routing.experts)), expected)
