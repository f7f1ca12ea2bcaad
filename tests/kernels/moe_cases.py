"""The mixture of experts against its torch reference. Run like triton_cases.py: on a CUDA device as it is, elsewhere
by test_triton.py in the interpreter, and by test_moe.py on the CPU's own path."""

import pytest
import torch

from kernels.card import A100, T4
from kernels.dispatch import use_triton
from kernels.linear.moe import TILE_FP32, TILES, TILES_FMA, Experts, Tile, choose_tile, experts_reference
from kernels.linear.moe_routing import MAX_EXPERTS, Routing, max_tiles, route, route_reference, sort_by_expert

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


def check(x, gate_up, down, logits, top_k, normalize=True, activation="silu"):
    experts = Experts(gate_up.clone().to(DEVICE), down.clone().to(DEVICE), activation)
    out = experts(x.to(DEVICE), logits.to(DEVICE), top_k, normalize)
    close(out, experts_reference(x, gate_up, down, route_reference(logits, top_k, normalize), activation))
    return experts, out


@pytest.mark.filterwarnings("ignore:overflow encountered in exp")
@pytest.mark.parametrize("normalize", [True, False])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_experts(dtype, shape, normalize):
    check(*make(*shape, dtype), shape[2], normalize)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_another_activation(dtype):
    check(*make(5, 4, 2, 40, 24, dtype), 2, activation="gelu_new")


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
    experts = Experts(gate_up.to(DEVICE), down.to(DEVICE), "silu")
    out = experts._grouped(x.to(DEVICE), route(logits.to(DEVICE), 1, True), tile[1])
    close(out, experts_reference(x, gate_up, down, route_reference(logits, 1, True)))


def test_no_tokens():
    x, gate_up, down, logits = make(0, 4, 2, 32, 32, torch.float32)
    assert (
        Experts(gate_up.to(DEVICE), down.to(DEVICE), "silu")(x.to(DEVICE), logits.to(DEVICE), 2, True).shape == x.shape
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_a_row_does_not_depend_on_the_batch(dtype):
    """With one tile, as here, to the bit: sums of a row have one order."""
    x, gate_up, down, logits = make(9, 6, 3, 64, 64, dtype)
    experts, together = check(x, gate_up, down, logits, 3)
    again = experts(x.to(DEVICE), logits.to(DEVICE), 3, True)
    assert torch.equal(again, together)
    if not KERNELS:
        return  # the CPU's GEMMs have an order for each number of rows
    for i in range(9):
        alone = experts(x[i : i + 1].to(DEVICE), logits[i : i + 1].to(DEVICE), 3, True)
        assert torch.equal(alone[0], together[i])


@only_kernels
def test_warm_up_leaves_the_weights():
    _, gate_up, down, _ = make(4, 6, 3, 64, 64, torch.float16)
    experts = Experts(gate_up.clone().to(DEVICE), down.clone().to(DEVICE), "silu")
    experts.warm_up(3, True)
    assert torch.equal(experts.gate_up.cpu(), gate_up) and torch.equal(experts.down.cpu(), down)


@pytest.mark.parametrize("normalize", [True, False])
@pytest.mark.parametrize("num_tokens, num_experts, top_k", [(1, 8, 2), (70, 8, 8), (130, 60, 5), (9, 200, 1)])
def test_routes(num_tokens, num_experts, top_k, normalize):
    logits = torch.randn(num_tokens, num_experts) * 3
    logits[0] -= 1e4
    found, expected = route(logits.to(DEVICE), top_k, normalize), route_reference(logits, top_k, normalize)
    assert found.weights.dtype == torch.float32 and found.experts.dtype == torch.int32
    assert torch.equal(found.experts.cpu(), expected.experts)
    torch.testing.assert_close(found.weights.cpu(), expected.weights)
    if normalize:
        torch.testing.assert_close(found.weights.sum(1).cpu(), torch.ones(num_tokens))
    if KERNELS:
        assert found.counts.sum(0).tolist() == expected.experts.flatten().bincount(minlength=num_experts).tolist()


def test_normalised_is_the_softmax_of_the_chosen():
    logits = torch.randn(20, 12)
    values, experts = logits.topk(4)
    found = route(logits.to(DEVICE), 4, True)
    assert torch.equal(found.experts.cpu(), experts.int())
    torch.testing.assert_close(found.weights.cpu(), values.softmax(-1))


@only_kernels
@pytest.mark.filterwarnings("ignore:invalid value encountered in subtract")
def test_ties_nan_and_infinity_choose_experts_that_exist():
    nan, inf = float("nan"), float("inf")
    rows = [[0.0] * 5, [nan] * 5, [nan, 1.0, 2.0, nan, 0.0], [-inf, 0.0, -inf, -inf, -inf]]
    routing = route(torch.tensor(rows, device=DEVICE), 3, True)
    assert routing.experts[0].tolist() == [0, 1, 2], "the lower expert first"
    assert routing.experts[2].tolist() == [2, 1, 4]
    assert routing.experts.min() >= 0 and routing.experts.max() < 5
    assert routing.weights[1].isnan().all() and routing.weights[[0, 2, 3]].isfinite().all()


@only_kernels
def test_too_many_experts_are_refused():
    with pytest.raises(ValueError, match="top_k 9 of 8 experts"):
        route(torch.zeros(1, 8, device=DEVICE), 9, True)
    with pytest.raises(ValueError, match=f"more than {MAX_EXPERTS}"):
        route(torch.zeros(1, MAX_EXPERTS + 1, device=DEVICE), 2, True)


@only_kernels
@pytest.mark.parametrize("block_m", [16, 64])
@pytest.mark.parametrize("num_tokens, num_experts, top_k", [(1, 8, 2), (150, 8, 2), (700, 60, 4), (40, 300, 2)])
def test_order(num_tokens, num_experts, top_k, block_m):
    """Every pair once, an expert's pairs together; tiles cover them without overlap and none reaches into another's."""
    logits = torch.randn(num_tokens, num_experts)
    logits[:, num_experts // 2 :] -= 100 * (num_tokens > 1)  # experts without tokens
    routing = route(logits.to(DEVICE), top_k, True)
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
    routing = route_reference(logits, 2, False)
    dense = torch.zeros(6, 4).scatter(1, routing.experts.long(), routing.weights)
    gate, up = torch.einsum("th,eih->tei", x, gate_up).chunk(2, dim=-1)
    expected = torch.einsum("tei,ehi,te->th", torch.nn.functional.silu(gate) * up, down, dense)
    torch.testing.assert_close(experts_reference(x, gate_up, down, Routing(routing.weights, routing.experts)), expected)
