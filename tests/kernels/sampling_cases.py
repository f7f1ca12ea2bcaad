"""The sampling kernels against the numpy reference of the sampler's tests, and against the CPU's sampler. Run like
triton_cases.py: on a CUDA device as they are, elsewhere by test_triton.py in the interpreter."""

import numpy as np
import pytest
import torch

from engine.worker.sampling import sampler
from engine.worker.sampling.sampler import SamplerOutput, sample
from engine.worker.sampling.sampling_rows import EVERYTHING_ON, WARM_UP, uniforms
from kernels.dispatch import INTERPRET
from kernels.sampling import cuts
from kernels.sampling import draw as sampling_draw
from kernels.sampling.logits import CHUNK, largest_logits
from tests.engine.worker.sampling.reference import (
    CASES,
    EOS,
    GENERATED,
    PROMPT,
    Batch,
    random_logits,
    reference_draw,
    reference_logits,
    sampling,
    with_logprobs,
)

DEVICE = "cpu" if INTERPRET else "cuda"
DTYPES = [torch.float32, torch.float16] if INTERPRET else [torch.float32, torch.float16, torch.bfloat16]
NAMES = list(CASES)
# numpy's remarks on what is meant: rows of NaN and infinity, and weights that become 0
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")


def make_batch(params, vocab_size=1000, **more):
    n = len(params)
    more = {"one_draw": True, "sparse": False, **more}  # a host does not know the newest tokens of a GPU
    return Batch(params, prompts=[PROMPT] * n, generated=[GENERATED] * n, vocab_size=vocab_size, **more)


def draw(batch, logits, rows=None, positions=None):
    """SamplerOutput on the CPU; the logits are not to be written."""
    rows = np.arange(len(batch.lengths)) if rows is None else np.array(rows)
    positions = batch.lengths[rows] if positions is None else np.array(positions)
    inputs = batch.rows.build(rows, positions, lambda array: torch.from_numpy(np.array(array)).to(DEVICE))
    batch.counts.generated, batch.counts.in_prompt = (
        t.to(DEVICE) for t in (batch.counts.generated, batch.counts.in_prompt)
    )
    batch.counts.recent.token_ids = batch.counts.recent.token_ids.to(DEVICE)
    device_logits = torch.as_tensor(logits).clone().to(DEVICE)
    before = device_logits.clone()
    output = sample(device_logits, inputs, batch.counts)
    assert torch.equal(device_logits.view(torch.uint8), before.view(torch.uint8))
    fields = (output.token_ids, output.failed, output.logprobs, output.top_ids)
    return SamplerOutput(*(None if field is None else field.cpu() for field in fields))


def expected_ids(batch, params, logits):
    return [
        reference_draw(reference_logits(row, one, PROMPT, GENERATED), u)
        for row, one, u in zip(logits, params, uniforms(np.arange(len(params)), batch.lengths), strict=True)
    ]


def boosted(logits):
    logits[:, [*EOS, 8, 9, 4, 17]] += 6.0  # so that masks and penalties decide something
    return logits


@pytest.mark.slow
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("vocab_size", [1000, 2 * CHUNK + 903])
def test_every_case_side_by_side(vocab_size, dtype):
    """A mixed batch: several rows of every kind of request. In 16 bits many logits are tied."""
    params = [CASES[name] for name in NAMES] * (2 if vocab_size == 1000 else 1)
    logits = torch.from_numpy(boosted(random_logits(len(params), vocab_size))).to(dtype)
    batch = make_batch(params, vocab_size)
    drawn = draw(batch, logits)
    assert not drawn.failed.any()
    assert drawn.token_ids.tolist() == expected_ids(batch, params, logits.float().numpy())


FLAT_AND_STEEP = [
    sampling(top_p=0.9), sampling(top_k=3000, top_p=0.95), sampling(top_p=1 - 1e-12), sampling(min_p=0.9),
    sampling(top_p=1e-6), sampling(top_k=2),
]  # fmt: skip


@pytest.mark.parametrize(
    "scale, vocab_size", [(0.0, 900), pytest.param(0.05, 9001, marks=pytest.mark.slow), (2.5, 5000), (100.0, 5000)]
)
@pytest.mark.parametrize("capacity", [None, 16])
def test_flat_and_steep_distributions(scale, vocab_size, capacity, monkeypatch):
    """Also without room for lists: the last step then searches the row itself."""
    if capacity is not None:
        monkeypatch.setattr(cuts, "CAPACITY", capacity)
    logits = random_logits(len(FLAT_AND_STEEP), vocab_size, scale=scale)
    batch = make_batch(FLAT_AND_STEEP, vocab_size)
    assert draw(batch, logits).token_ids.tolist() == expected_ids(batch, FLAT_AND_STEEP, logits)


def head_and_tail(rng, rows, vocab_size):
    """60 likely tokens hold half of the weight of a nearly flat rest."""
    logits = rng.standard_normal((rows, vocab_size)) * 2.0
    logits[:, rng.permutation(vocab_size)[:60]] += 13.0
    return logits


LONG_ROWS = {
    "normal": lambda rng, rows, vocab_size: rng.standard_normal((rows, vocab_size)) * 3.0,
    "four values": lambda rng, rows, vocab_size: rng.integers(0, 4, (rows, vocab_size)) * 0.5,
    "head and tail": head_and_tail,
    "mostly banned": lambda rng, rows, vocab_size: np.where(
        rng.random((rows, vocab_size)) < 0.8, -np.inf, rng.standard_normal((rows, vocab_size))
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", LONG_ROWS)
def test_long_flat_rows(name, monkeypatch):
    """No row is searched by one program: every cut is enclosed by a short list, or known without one."""
    params = [
        sampling(temperature=2.0, top_p=0.99), sampling(top_k=30_000), sampling(top_p=0.9999, temperature=1.3),
        sampling(temperature=50.0, min_p=0.002, top_p=0.5), sampling(top_k=20_000, top_p=0.9), sampling(top_p=0.8),
    ]  # fmt: skip
    sizes, choose = [], cuts.window_kernel

    class Recorder:
        def __getitem__(self, grid):
            def launch(*args, **meta):
                choose[grid](*args, **meta)
                windows = args[-1]
                sizes.extend(windows[:, 4].tolist())

            return launch

    monkeypatch.setattr(cuts, "window_kernel", Recorder())
    monkeypatch.setattr(sampling_draw, "DRAW_BLOCK", 4096)  # the interpreter's time is that of its calls
    vocab_size = 40_000
    dtype = torch.float16 if name == "normal" else torch.float32
    logits = LONG_ROWS[name](np.random.default_rng(7), len(params), vocab_size).astype(np.float32)
    logits = torch.from_numpy(logits).to(dtype)
    batch = make_batch(params, vocab_size)
    drawn = draw(batch, logits)
    assert len(sizes) == len(params) and min(sizes) >= 0, sizes
    assert drawn.token_ids.tolist() == expected_ids(batch, params, logits.float().numpy())


def test_equals_the_cpu_sampler_with_logprobs(monkeypatch):
    params = [with_logprobs(CASES[name]) for name in NAMES]
    logits = boosted(random_logits(len(params), seed=5))
    by_kernels = draw(make_batch(params), logits)
    monkeypatch.setattr(sampler, "use_triton", lambda x: False)
    on_cpu = make_batch(params, one_draw=False).sample(logits)
    assert torch.equal(by_kernels.token_ids, on_cpu.token_ids)
    assert torch.equal(by_kernels.failed, on_cpu.failed)
    torch.testing.assert_close(by_kernels.logprobs, on_cpu.logprobs)


def test_the_batch_does_not_matter():
    """Alone, among all, and in a shuffled half: the same token."""
    params = [CASES[name] for name in NAMES]
    logits = random_logits(len(params))
    together = draw(make_batch(params), logits).token_ids
    half = np.random.default_rng(1).permutation(len(params))[: len(params) // 2]
    assert torch.equal(draw(make_batch(params), logits[half], rows=half).token_ids, together[half])
    for i in half[:4]:
        assert draw(make_batch(params), logits[i : i + 1], rows=[i]).token_ids[0] == together[i]


@pytest.mark.parametrize("poison", [np.nan, pytest.param(np.inf, marks=pytest.mark.slow), "all -inf"])
def test_a_row_that_is_not_finite_fails_alone(poison):
    params = [CASES[name] for name in ("greedy", "plain", "top_p", "large top_k", "everything")] * 2
    logits = random_logits(len(params))
    clean = draw(make_batch(params), logits)
    if poison == "all -inf":
        logits[:5] = -np.inf
    else:
        logits[:5, EOS[0]] = poison
    drawn = draw(make_batch(params), logits)
    assert drawn.failed.tolist() == [True] * 5 + [False] * 5
    assert drawn.token_ids[:5].tolist() == [0] * 5
    assert torch.equal(drawn.token_ids[5:], clean.token_ids[5:])


def test_tokens_of_weight_zero_are_never_drawn():
    """Uniform numbers at the ends of the unit interval and between them draw the other tokens."""
    logits = np.full((3, 5000), -np.inf, np.float32)
    logits[:, [10, 640, 4999]] = 0.0
    params = [CASES[name] for name in ("plain", "top_p", "large top_k")]
    seen = set()
    for position in range(8):
        seen |= set(draw(make_batch(params, 5000), logits, positions=[position] * 3).token_ids.tolist())
    assert seen <= {10, 640, 4999} and len(seen) > 1
    for uniform, token in ((0.0, 10), (1 - 2.0**-53, 4999)):
        batch = make_batch(params, 5000)
        inputs = batch.rows.build(
            np.arange(3), batch.lengths, lambda array: torch.from_numpy(np.array(array)).to(DEVICE)
        )
        inputs.draws[0].uniform.fill_(uniform)
        ids = sample(torch.from_numpy(logits).to(DEVICE), inputs, batch.counts).token_ids
        assert ids.tolist() == [token] * 3


def test_a_mask_that_leaves_no_token_fails_the_row():
    logits = np.full((2, 1000), -np.inf, np.float32)
    logits[:, EOS] = 1.0
    params = [sampling(temperature=0.0), sampling(temperature=0.0, min_tokens=9)]
    assert draw(make_batch(params), logits).failed.tolist() == [False, True]


@pytest.mark.parametrize("vocab_size", [1, 63, CHUNK, CHUNK + 1])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_largest_logit(vocab_size, dtype):
    """The first of tied ones, in rows with gaps between them."""
    logits = torch.from_numpy(random_logits(5, vocab_size + 3)).to(dtype)[:, :vocab_size]
    logits[0, vocab_size // 2 :] = logits[0].max()
    logits[1] = -7.0
    token_ids, largest, failed = largest_logits(logits.to(DEVICE))
    assert token_ids.tolist() == logits.numpy().argmax(-1).tolist() if dtype != torch.bfloat16 else True
    assert torch.equal(largest.cpu(), logits.float().amax(-1)) and not failed.any()


def test_what_warming_up_compiles_is_all_that_can_be_launched(monkeypatch):
    """Each launch has a kernel per set of absent arguments: the warm-up meets every set that any batch can."""
    launches = set()

    def recorder(kernel):
        class Recorder:
            def __getitem__(self, grid):
                def launch(*args, **meta):
                    launches.add((kernel.fn.__name__, tuple(arg is None for arg in args)))
                    return kernel[grid](*args, **meta)

                return launch

        return Recorder()

    for module in (sampling_draw, cuts, largest_logits.__globals__):
        names = module if isinstance(module, dict) else vars(module)
        for name in [name for name in names if name.endswith("_kernel")]:
            monkeypatch.setitem(names, name, recorder(names[name]))
    logits = random_logits(1)
    for params in WARM_UP:
        draw(make_batch([params]), logits)
    draw(make_batch([EVERYTHING_ON]), logits)
    warm = set(launches)
    assert len(warm) == 19  # kernels, those that read logits twice, with and without changed rows, and so on
    for name in NAMES:
        draw(make_batch([CASES[name]]), logits)
    draw(make_batch([CASES["greedy"], CASES["bias"], CASES["plain"], CASES["top_k"]]), random_logits(4))
    assert launches == warm
