"""`--batch-invariant` in what only some families have: a token's logits are the same bits in every batch, on a CPU."""

from collections.abc import Sequence as ListOf
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from engine.models.config import ModelConfig
from engine.models.families import model_config
from engine.models.layers.attention import BatchMetadata, KVCache
from engine.models.loading.load import load_model
from engine.worker.attention_warmup import make_attention_plan
from tests.engine.models.paged import PagedRunner, Sequence
from tests.engine.models.tiny_models import CASES, VOCAB

CPU = torch.device("cpu")
# The kernels that keep rows apart want sizes in 16s.
SIZES = {"hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}
FAMILIES = ["granite", "smollm3", "starcoder2", "stablelm", "stablelm_parallel", "phi", "gpt_neox"]


class Invariant:
    """A decoder as PagedRunner drives it, with the plan that a Worker gives its steps."""

    def __init__(self, config: ModelConfig, dtype: torch.dtype) -> None:
        self.decoder: Any = load_model(
            Path(), config, dtype=dtype, device=CPU, load_format="dummy", seed=0, batch_invariant=True
        )
        self.config, self.compute_logits = config, self.decoder.compute_logits
        self.plan = make_attention_plan(config, 8, CPU, batch_invariant=True)

    def forward(self, input_ids: Tensor, metadata: BatchMetadata, kv_caches: ListOf[KVCache]) -> Tensor:
        return self.decoder.forward(input_ids, replace(metadata, plan=self.plan), kv_caches)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", FAMILIES)
def test_bits_do_not_depend_on_the_batch(name: str, dtype: torch.dtype) -> None:
    raw = CASES[name]().to_dict() | SIZES
    model: Any = Invariant(model_config(raw), dtype)
    generator = torch.Generator().manual_seed(1)
    prompts = [torch.randint(VOCAB, (n,), generator=generator).tolist() for n in (40, 33, 21)]
    alone = [PagedRunner(model, dtype=dtype).step([(Sequence(prompt), len(prompt))])[0] for prompt in prompts]
    sequences, runner = [Sequence(prompt) for prompt in prompts], PagedRunner(model, dtype=dtype)
    collected: list[list[Tensor]] = [[], [], []]
    for sizes in [(7, 1, 9), (1, 1, 9), (13, 16, 1), (1, 1, 1), (1, 14, 1), (17, 0, 0)]:
        work = [(i, n) for i, n in enumerate(sizes) if n]
        for (i, _), logits in zip(work, runner.step([(sequences[i], n) for i, n in work]), strict=True):
            collected[i].append(logits)
    for expected, parts in zip(alone, collected, strict=True):
        assert torch.equal(torch.cat(parts), expected)
