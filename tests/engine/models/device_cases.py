"""Every family in bf16 and fp16 through the paged cache, against transformers in fp32 on the CPU: on a CUDA device,
else on the CPU. Not collected by default: `make gpu-check` runs it (see tests/kernels/device_cases.py)."""

import copy

import pytest
import torch

from engine.models.families import read_model_config
from engine.models.loading.load import load_model
from tests.engine.models.paged import PagedRunner, Sequence
from tests.engine.models.tiny_models import CASES, VOCAB, oracle_logits, save_model

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
# fp32: sums in another order. In 16 bits what transformers itself loses is the measure; a router that rounds to another
# expert loses more than rounding does.
MAX_FP32_ERROR, TIMES_AS_LOSSY = 2e-4, 3.0


@pytest.fixture(scope="module", params=CASES)
def checkpoint(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp(request.param)
    return folder, save_model(request.param, folder)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_logits_of_prompts_chunks_and_decodes(checkpoint, dtype):
    folder, oracle = checkpoint
    model = load_model(folder, read_model_config(folder), dtype=dtype, device=torch.device(DEVICE), load_format="auto",
                       seed=0)  # fmt: skip
    generator = torch.Generator().manual_seed(1)
    prompts = [torch.randint(VOCAB, (n,), generator=generator).tolist() for n in (40, 33, 21)]
    sequences, runner = [Sequence(prompt) for prompt in prompts], PagedRunner(model, dtype=dtype, device=DEVICE)
    collected = [[], [], []]
    for sizes in [(40, 1, 9), (0, 1, 11), (0, 31, 1)]:
        work = [(i, n) for i, n in enumerate(sizes) if n]
        for (i, _), logits in zip(work, runner.step([(sequences[i], n) for i, n in work]), strict=True):
            collected[i].append(logits.float().cpu())  # a GPU leaves them in the dtype of the model
    ours = torch.cat([torch.cat(parts) for parts in collected])
    exact = torch.cat([oracle_logits(oracle, prompt) for prompt in prompts])
    assert ours.isfinite().all()
    allowed = MAX_FP32_ERROR if dtype == torch.float32 else TIMES_AS_LOSSY * loss_of(oracle, dtype, prompts, exact)
    assert relative(ours, exact) < allowed


def loss_of(oracle, dtype, prompts, exact):
    """The error of transformers' own logits in this dtype."""
    narrow = copy.deepcopy(oracle).to(dtype)
    return relative(torch.cat([oracle_logits(narrow, prompt) for prompt in prompts]), exact)


def relative(values, exact):
    return float((values - exact).norm() / exact.norm())
