"""The loader: shards, dtypes, dummy weights, and every damaged or hostile checkpoint refused by name."""

import json
import os
import resource
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from engine.errors import ModelError
from engine.models.decoder import Decoder
from engine.models.families import read_model_config
from engine.models.loading.dummy import dummy_weights
from engine.models.loading.load import load_model
from engine.models.loading.loader import load_weights
from tests.engine.models.paged import PagedRunner, Sequence
from tests.engine.models.tiny_models import VOCAB, load_oracle, oracle_logits, save_model

PROMPT = [5, 17, 3, 88, 41, 9, 60, 2, 2, 31]
CPU = torch.device("cpu")
NAMES_AND_PREFIXES = [("gpt2", "transformer."), ("opt", "model."), ("llama", "model."), ("gpt_neox", "gpt_neox.")]


def load(folder: Path, dtype: torch.dtype = torch.float32, load_format: str = "auto", seed: int = 0) -> Decoder:
    config = read_model_config(folder)
    return load_model(folder, config, dtype=dtype, device=CPU, load_format=load_format, seed=seed)


def logits_of(model: Decoder, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return PagedRunner(model, dtype=dtype).step([(Sequence(PROMPT), len(PROMPT))])[0]


def rewrite(folder: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> None:
    """Change the tensors of a checkpoint of one file."""
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors")


def edit_config(folder: Path, **fields: object) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | fields))


def test_shards(tmp_path: Path) -> None:
    oracle = save_model("llama", tmp_path, max_shard_size="60KB")
    assert len(list(tmp_path.glob("model-*.safetensors"))) > 2
    torch.testing.assert_close(logits_of(load(tmp_path)), oracle_logits(oracle, PROMPT), atol=2e-5, rtol=2e-5)


@pytest.mark.parametrize("name", ["llama", "qwen3", "gpt2", "opt_350m", "mixtral", "gemma2", "gemma3", "phi3_longrope"])
def test_bf16(tmp_path: Path, name: str) -> None:
    """No further from the fp32 truth than transformers' bf16, give or take the luck of rounding."""
    oracle = save_model(name, tmp_path)
    truth = oracle_logits(oracle, PROMPT)
    model = load(tmp_path, torch.bfloat16)
    ours = (logits_of(model, torch.bfloat16) - truth).abs().mean()
    theirs = (oracle_logits(load_oracle(tmp_path, torch.bfloat16), PROMPT) - truth).abs().mean()
    assert 0 < ours < 1.5 * theirs < truth.abs().mean()


def test_checkpoint_in_bf16_says_so_and_loads_in_fp32(tmp_path: Path) -> None:
    save_model("llama_tied", tmp_path).to(torch.bfloat16).save_pretrained(tmp_path)
    assert read_model_config(tmp_path).dtype == "bfloat16"
    expected = oracle_logits(load_oracle(tmp_path, torch.float32), PROMPT)
    torch.testing.assert_close(logits_of(load(tmp_path)), expected, atol=2e-5, rtol=2e-5)


@pytest.mark.parametrize(("name", "prefix"), NAMES_AND_PREFIXES)
def test_names_without_the_base_models_prefix(tmp_path: Path, name: str, prefix: str) -> None:
    """The original GPT-2 checkpoint is such a one."""
    oracle = save_model(name, tmp_path)

    def strip(tensors: dict[str, torch.Tensor]) -> None:
        for key in list(tensors):
            tensors[key.removeprefix(prefix)] = tensors.pop(key)

    rewrite(tmp_path, strip)
    torch.testing.assert_close(logits_of(load(tmp_path)), oracle_logits(oracle, PROMPT), atol=2e-5, rtol=2e-5)


def test_buffers_of_old_checkpoints_are_skipped(tmp_path: Path) -> None:
    save_model("gpt2", tmp_path / "gpt2")
    expected = logits_of(load(tmp_path / "gpt2"))
    rewrite(tmp_path / "gpt2", lambda t: t.update({"transformer.h.0.attn.bias": torch.ones(1, 1, 8, 8).bool()}))
    torch.testing.assert_close(logits_of(load(tmp_path / "gpt2")), expected)
    save_model("llama", tmp_path / "llama")
    rewrite(tmp_path / "llama", lambda t: t.update({"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4)}))
    load(tmp_path / "llama")
    save_model("gpt_neox", tmp_path / "neox")
    old = {
        "bias": torch.ones(1, 1, 8, 8).bool(),
        "masked_bias": torch.tensor(-1e9),
        "rotary_emb.inv_freq": torch.ones(2),
    }
    old = {f"gpt_neox.layers.2.attention.{name}": tensor for name, tensor in old.items()}
    rewrite(tmp_path / "neox", lambda t: t.update(old))
    load(tmp_path / "neox")


@pytest.mark.parametrize(
    ("name", "embedding", "head"),
    [
        ("llama_tied", "model.embed_tokens", "lm_head"),
        ("gpt_neox_sequential", "gpt_neox.embed_in", "embed_out"),
    ],
)
def test_tied_head_may_be_repeated_but_not_differ(tmp_path: Path, name: str, embedding: str, head: str) -> None:
    save_model(name, tmp_path)
    rewrite(tmp_path, lambda t: t.update({f"{head}.weight": t[f"{embedding}.weight"].clone()}))
    load(tmp_path)
    rewrite(tmp_path, lambda t: t[f"{head}.weight"][3, 4].add_(1))
    with pytest.raises(ModelError, match=rf"'{head}\.weight' differs from the embedding.*tie_word_embeddings"):
        load(tmp_path)
    edit_config(tmp_path, tie_word_embeddings=False)
    load(tmp_path)


def test_dummy_weights(tmp_path: Path) -> None:
    """The same seed gives the same model, another seed another; no weight file is read; nothing overflows."""
    save_model("qwen2", tmp_path)
    (tmp_path / "model.safetensors").unlink()
    first, again, other = (logits_of(load(tmp_path, load_format="dummy", seed=seed)) for seed in (1, 1, 2))
    assert torch.equal(first, again)
    assert not torch.allclose(first, other)
    assert first.isfinite().all() and 0.1 < first.std() < 10


def test_dummy_matrices_are_random_throughout(tmp_path: Path) -> None:
    """A pool of random numbers is reused: no two rows of a matrix that is larger than the pool may be alike."""
    save_model("llama", tmp_path)
    edit_config(tmp_path, vocab_size=40_000, tie_word_embeddings=True)  # 1.9 M values
    table = load(tmp_path, load_format="dummy").embedding.weight
    assert len({row.numpy().tobytes() for row in table}) == 40_000
    assert table.std().item() == pytest.approx(48**-0.5, rel=0.01)
    assert abs(table.mean().item()) < 1e-3


def test_dummy_experts_are_as_large_as_other_matrices(tmp_path: Path) -> None:
    """Uniform numbers of variance 1 / in_features."""
    save_model("mixtral", tmp_path)
    weights = dummy_weights(read_model_config(tmp_path), torch.float32, CPU, 0)
    assert weights["layers.0.experts_in.weight"].std().item() == pytest.approx(48**-0.5, rel=0.02)
    assert weights["layers.0.experts_out.weight"].std().item() == pytest.approx(36**-0.5, rel=0.02)
    assert load(tmp_path, load_format="dummy").config.moe is not None


def test_progress_is_reported(tmp_path: Path) -> None:
    save_model("llama", tmp_path)
    phases: list[str] = []
    config = read_model_config(tmp_path)
    load_model(tmp_path, config, dtype=torch.float32, device=CPU, load_format="auto", seed=0, progress=phases.append)
    assert phases[-1] == "loading weights 100%"
    assert 2 < len(phases) <= 11 and len(set(phases)) == len(phases)


def test_max_model_len_bounds_the_rotary_table(tmp_path: Path) -> None:
    save_model("llama", tmp_path)
    config = read_model_config(tmp_path)
    model = load_model(tmp_path, config, dtype=torch.float32, device=CPU, load_format="dummy", seed=0, max_model_len=40)
    assert model.positions.cos_sin is not None and model.positions.cos_sin.shape == (40, config.head_dim)


def test_max_model_len_bounds_both_rotary_tables(tmp_path: Path) -> None:
    """Of a model whose layers with a window have their own, shared among them."""
    save_model("gemma3", tmp_path)
    config = read_model_config(tmp_path)
    model = load_model(tmp_path, config, dtype=torch.float32, device=CPU, load_format="dummy", seed=0, max_model_len=40)
    assert isinstance(model, Decoder)
    tables = [layer.attention.heads.cos_sin_cache for layer in model.layers]
    assert [table is model.positions.cos_sin for table in tables] == [config.window(i) == 0 for i in range(len(tables))]
    assert len({id(table) for table in tables}) == 2
    assert all(table is not None and table.shape == (40, config.head_dim) for table in tables)


def test_scaled_embeddings_in_bf16_are_those_of_transformers(tmp_path: Path) -> None:
    """The scale is rounded to bf16 before it is used: sqrt(48) to 6.9375."""
    save_model("gemma", tmp_path)
    oracle, model = load_oracle(tmp_path, torch.bfloat16), load(tmp_path, torch.bfloat16)
    ids = torch.arange(VOCAB)
    with torch.no_grad():
        assert torch.equal(model.embedding(ids, ids), oracle.get_input_embeddings()(ids))


def test_dummy_norms_multiply_by_1(tmp_path: Path) -> None:
    for name, weight in {"llama": 1.0, "gemma3": 0.0, "cohere_qk_norm": 1.0}.items():
        save_model(name, tmp_path / name)
        weights = dummy_weights(read_model_config(tmp_path / name), torch.float32, CPU, 0)
        norms = [weights[key] for key in weights if "norm" in key]
        assert norms and all(bool((norm == weight).all()) for norm in norms)


def test_weights_are_consumed(tmp_path: Path) -> None:
    """Every tensor finds its place in the decoder: one left over would mean a parameter without effect."""
    for name in (
        "llama_biases",
        "qwen3",
        "gpt2",
        "opt_350m",
        "mixtral",
        "qwen3_moe_plain_layers",
        "gemma3",
        "phi3",
        "gpt_neox",
        "phi_tied",
        "apertus",
        "olmo2",
        "stablelm_12b",
    ):
        save_model(name, tmp_path / name)
        config = read_model_config(tmp_path / name)
        weights = dummy_weights(config, torch.float32, CPU, 0)
        Decoder(config, weights, CPU)
        assert not weights


# Refusals


def test_no_weight_file(tmp_path: Path) -> None:
    save_model("llama", tmp_path)
    (tmp_path / "model.safetensors").rename(tmp_path / "model.pt")
    with pytest.raises(ModelError, match=r"holds no weights: none of .*model\.pt is not read.*save_pretrained"):
        load(tmp_path)


@pytest.mark.parametrize(
    "name", ["../outside.safetensors", "/etc/outside.safetensors", "sub/../../outside.safetensors", "model.bin"]
)
def test_index_may_not_leave_the_folder(tmp_path: Path, name: str) -> None:
    save_model("llama", tmp_path / "model")
    (tmp_path / "model" / "model.safetensors").rename(tmp_path / "outside.safetensors")
    (tmp_path / "model" / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"x": name}}))
    with pytest.raises(ModelError, match="inside the model's folder"):
        load(tmp_path / "model")


@pytest.mark.parametrize("name", ["model.safetensors", "a.safetensors"])
def test_links_may_not_leave_the_folder(tmp_path: Path, name: str) -> None:
    save_model("llama", tmp_path / "model")
    (tmp_path / "model" / "model.safetensors").rename(tmp_path / "outside.safetensors")
    (tmp_path / "model" / name).symlink_to(tmp_path / "outside.safetensors")
    (tmp_path / "model" / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"x": name}}))
    with pytest.raises(ModelError, match=rf"'{name}' .* is a link that leaves"):
        load(tmp_path / "model")


def test_links_of_a_hub_cache_are_followed(tmp_path: Path) -> None:
    repo = tmp_path / "models--org--name"
    (repo / "blobs").mkdir(parents=True)
    oracle = save_model("llama", repo / "snapshots" / "0123")
    shard = repo / "snapshots" / "0123" / "model.safetensors"
    shard.rename(repo / "blobs" / "abcd")
    shard.symlink_to(Path("../../blobs/abcd"))
    torch.testing.assert_close(logits_of(load(shard.parent)), oracle_logits(oracle, PROMPT), atol=2e-5, rtol=2e-5)
    (tmp_path / "blobs").mkdir()  # a folder of that name elsewhere is no cache of this model
    (repo / "blobs" / "abcd").rename(tmp_path / "blobs" / "abcd")
    shard.unlink()
    shard.symlink_to(tmp_path / "blobs" / "abcd")
    with pytest.raises(ModelError, match="link that leaves"):
        load(shard.parent)


def test_a_shard_must_be_a_file(tmp_path: Path) -> None:
    save_model("llama", tmp_path)
    (tmp_path / "model.safetensors").unlink()
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"x": "a.safetensors"}}))
    with pytest.raises(ModelError, match=r"lacks the weight file 'a\.safetensors'"):
        load(tmp_path)
    os.mkfifo(tmp_path / "a.safetensors")  # opening one would block for ever
    with pytest.raises(ModelError, match=r"lacks the weight file 'a\.safetensors'"):
        load(tmp_path)


@pytest.mark.parametrize(
    "index", ["{", "[]", "{}", '{"weight_map": []}', '{"weight_map": {"x": 3}}', '{"weight_map": {"x": "\\u0000"}}']
)
def test_malformed_index(tmp_path: Path, index: str) -> None:
    save_model("llama", tmp_path)
    (tmp_path / "model.safetensors").unlink()
    (tmp_path / "model.safetensors.index.json").write_text(index)
    with pytest.raises(ModelError, match=r"model\.safetensors\.index\.json"):
        load(tmp_path)


@pytest.mark.parametrize("keep", [0, 4, 100, -1])
def test_truncated_file(tmp_path: Path, keep: int) -> None:
    save_model("llama", tmp_path)
    data = (tmp_path / "model.safetensors").read_bytes()
    (tmp_path / "model.safetensors").write_bytes(data[:keep])
    with pytest.raises(ModelError, match=r"model\.safetensors is damaged or incomplete") as error:
        load(tmp_path)
    if keep == -1:
        assert f"ends at byte {len(data)}, the file at byte {len(data) - 1})" in str(error.value)


def test_wrong_shape(tmp_path: Path) -> None:
    save_model("llama", tmp_path)
    edit_config(tmp_path, vocab_size=VOCAB + 1)
    with pytest.raises(ModelError, match=r"model\.safetensors: tensor '.*' has shape \[97, 48\].*asks for \[98, 48\]"):
        load(tmp_path)


def test_missing_tensor(tmp_path: Path) -> None:
    save_model("llama", tmp_path)
    rewrite(tmp_path, lambda t: t.pop("model.layers.1.mlp.up_proj.weight"))
    with pytest.raises(
        ModelError, match=r"lacks model\.layers\.1\.mlp\.up_proj\.weight\..*asks for .* in shape \[\d+, 48\]"
    ):
        load(tmp_path)


@pytest.mark.parametrize(
    ("name", "tensor", "shapes"),
    [
        ("gpt_neox", "gpt_neox.layers.1.attention.query_key_value.weight", r"\[144, 47\]; .* \[144, 48\]"),
        ("phi3", "model.layers.1.mlp.gate_up_proj.weight", r"\[160, 47\]; .* \[160, 48\]"),
    ],
)
def test_missing_and_narrow_fused_matrices(tmp_path: Path, name: str, tensor: str, shapes: str) -> None:
    save_model(name, tmp_path)
    rewrite(tmp_path, lambda t: t.update({tensor: t[tensor][:, :-1]}))
    with pytest.raises(ModelError, match=rf"'{tensor}' has shape {shapes}"):
        load(tmp_path)
    rewrite(tmp_path, lambda t: t.pop(tensor))
    with pytest.raises(ModelError, match=rf"lacks {tensor}\."):
        load(tmp_path)


@pytest.mark.parametrize(
    ("name", "tensor"),
    [("mixtral", "block_sparse_moe.experts.4.w2"), ("qwen3_moe", "mlp.experts.5.up_proj"), ("qwen3_moe", "mlp.gate")],
)
def test_missing_and_narrow_experts(tmp_path: Path, name: str, tensor: str) -> None:
    save_model(name, tmp_path)
    full_name = f"model.layers.1.{tensor}.weight"
    rewrite(tmp_path, lambda t: t.update({full_name: t[full_name][:, :-1]}))
    with pytest.raises(ModelError, match=rf"{tensor}.weight' has shape \[\d+, \d+\]; config.json asks for"):
        load(tmp_path)
    rewrite(tmp_path, lambda t: t.pop(full_name))
    with pytest.raises(ModelError, match=rf"lacks {full_name}\."):
        load(tmp_path)


@pytest.mark.parametrize("name", ["mixtral", "qwen3_moe", "glm4_moe", "ernie4_5_moe", "granitemoeshared"])
def test_experts_as_transformers_has_them_in_memory(tmp_path: Path, name: str) -> None:
    """All experts of a layer in one tensor, under names of its own: the same weights as in the published layout."""
    for folder, original in (("published", True), ("memory", False)):
        save_model(name, tmp_path / folder, save_original_format=original)
    names = [set(load_file(tmp_path / folder / "model.safetensors")) for folder in ("published", "memory")]
    assert names[0] != names[1]
    config = read_model_config(tmp_path / "memory")
    published, memory = (
        load_weights(tmp_path / folder, config, torch.float32, torch.device("cpu"))
        for folder in ("published", "memory")
    )
    assert published.keys() == memory.keys()
    assert all(torch.equal(published[name], memory[name]) for name in published)


@pytest.mark.parametrize("tensor", ["gate_up_proj", "down_proj"])
def test_missing_and_narrow_tensors_of_all_experts(tmp_path: Path, tensor: str) -> None:
    save_model("qwen3_moe", tmp_path, save_original_format=False)
    full_name = f"model.layers.1.mlp.experts.{tensor}"
    rewrite(tmp_path, lambda t: t.update({full_name: t[full_name][:, :-1].contiguous()}))
    with pytest.raises(ModelError, match=rf"{full_name}' has shape \[6, \d+, \d+\]; config.json asks for \[6, "):
        load(tmp_path)
    rewrite(tmp_path, lambda t: t.pop(full_name))
    with pytest.raises(ModelError, match=rf"lacks .*model.layers.1.mlp.experts.0.{tensor.removeprefix('gate_')}"):
        load(tmp_path)


def test_shared_experts(tmp_path: Path) -> None:
    """A family that is not served may look like one that is: its additional weights are not dropped."""
    save_model("qwen3_moe", tmp_path)
    name = "model.layers.0.mlp.shared_expert.gate_proj.weight"
    rewrite(tmp_path, lambda t: t.update({name: torch.zeros(20, 48)}))
    with pytest.raises(ModelError, match=r"holds model\.layers\.0\.mlp\.shared_expert\.gate_proj\.weight, .*no place"):
        load(tmp_path)


def test_unexpected_tensors(tmp_path: Path) -> None:
    """A bias that config.json does not speak of would change the output: it must not be dropped in silence."""
    save_model("llama_biases", tmp_path)
    edit_config(tmp_path, attention_bias=False)
    with pytest.raises(ModelError, match=r"holds 12 tensors \(model\.layers\.0\.self_attn.*no place"):
        load(tmp_path)


def test_another_constant(tmp_path: Path) -> None:
    save_model("apertus", tmp_path)
    rewrite(tmp_path, lambda t: t.update({"model.layers.1.mlp.act_fn.beta": torch.tensor(0.6)}))
    with pytest.raises(ModelError, match=r"'model\.layers\.1\.mlp\.act_fn\.beta' is 0\.6.*; only 0\.5 is served"):
        load(tmp_path)


def test_quantised_tensor(tmp_path: Path) -> None:
    save_model("llama", tmp_path)
    rewrite(tmp_path, lambda t: t.update({"model.norm.weight": torch.ones(48, dtype=torch.int8)}))
    with pytest.raises(ModelError, match=r"'model\.norm\.weight' is of type I8"):
        load(tmp_path)


def test_no_room(tmp_path: Path) -> None:
    save_model("llama", tmp_path)
    edit_config(tmp_path, vocab_size=2**31 - 1, hidden_size=2**30)
    with pytest.raises(ModelError, match=r"no room on cpu for \d+\.\d GiB of weights in torch\.float32"):
        load(tmp_path, load_format="dummy")


def test_tensor_in_two_shards(tmp_path: Path) -> None:
    save_model("llama", tmp_path)
    shard = tmp_path / "model.safetensors"
    (tmp_path / "a.safetensors").write_bytes(shard.read_bytes())
    shard.rename(tmp_path / "b.safetensors")
    index = {"weight_map": {"x": "a.safetensors", "y": "b.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ModelError, match=r"is in a\.safetensors and again in b\.safetensors"):
        load(tmp_path)


def hostile_header(header: dict[str, object], data: bytes = b"", length: int | None = None) -> bytes:
    text = json.dumps(header).encode()
    return (len(text) if length is None else length).to_bytes(8, "little") + text + data


def tensor_header(shape: list[int], start: int, end: int) -> dict[str, object]:
    return {"dtype": "F32", "shape": shape, "data_offsets": [start, end]}


@pytest.mark.parametrize(
    "data",
    [
        hostile_header({}, length=2**62),
        hostile_header({"a": tensor_header([2**60, 2**60], 0, 8)}, bytes(8)),
        hostile_header({"a": tensor_header([2**60], 0, 2**62)}, bytes(8)),
        hostile_header({"a": tensor_header([2], 0, 8), "b": tensor_header([2], 4, 12)}, bytes(12)),
        hostile_header({"a": tensor_header([2], 8, 0)}, bytes(8)),
        hostile_header({"a": {"dtype": "F32"}}),
        hostile_header({"a": tensor_header([-1], 0, 8)}, bytes(8)),
        b"\x10\0\0\0\0\0\0\0" + b"[" * 16,
    ],
    ids=["length", "shape", "end", "overlap", "backwards", "no_shape", "negative", "no_json"],
)
def test_hostile_headers(tmp_path: Path, data: bytes) -> None:
    """Refused in one line before anything of the claimed size is allocated."""
    save_model("llama", tmp_path)
    (tmp_path / "model.safetensors").write_bytes(data)
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + (256 << 20), hard))
    try:
        with pytest.raises(ModelError, match=r"^model\.safetensors is damaged or incomplete: [^\n]+$"):
            load(tmp_path)
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))
