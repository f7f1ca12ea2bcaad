"""Models from GGUF files against the transformers model that the file was written from."""

from pathlib import Path

import gguf as gguf_package
import pytest
import torch
from transformers import AutoModelForCausalLM, Gemma2Config, Gemma3TextConfig, PreTrainedConfig, Qwen3Config

from benchmarks.formats.gguf_writer import write_gguf
from engine.checkpoint.gguf import read_gguf
from engine.checkpoint.gguf_config import gguf_config
from engine.checkpoint.locate import resolve_model
from engine.checkpoint.weight_files import existing_weight_files
from engine.config import EngineConfig
from engine.errors import ModelError
from engine.models.families import model_config, read_model_config
from engine.models.loading.load import weight_bytes
from engine.models.loading.loader import load_weights
from kernels.quantized.weight import QuantizedWeight
from tests.engine.checkpoint.gguf_bytes import gguf, key, text, write
from tests.engine.models.family_checks import check_logits, compare, load, make_prompts
from tests.engine.models.paged import PagedRunner, Sequence
from tests.engine.models.tiny_models import CASES, VOCAB, randomize, save_model

SIZES = {"vocab_size": VOCAB, "hidden_size": 48, "intermediate_size": 64, "num_attention_heads": 6, "head_dim": 16}
SIZES |= {"num_key_value_heads": 2, "max_position_embeddings": 128}
GEMMA = {**SIZES, "sliding_window": 11, "query_pre_attn_scalar": 16}
CONFIGS: dict[str, PreTrainedConfig] = {
    "gemma2": Gemma2Config(**GEMMA, num_hidden_layers=2, attn_logit_softcapping=2.0, final_logit_softcapping=4.0),
    "gemma3": Gemma3TextConfig(**GEMMA, num_hidden_layers=7, rope_parameters={
        "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 3e4},
        "sliding_attention": {"rope_type": "default", "rope_theta": 500.0},
    }),
}  # fmt: skip
PLAIN = (
    "llama_tied", "llama_head_dim", "llama_rope_llama3", "llama_rope_linear", "llama_rope_yarn", "mixtral",
    "qwen2", "qwen3", "qwen3_moe", "granite", "granite4", "smollm3", "gemma", "phi3", "phi3_longrope", "gpt2", *CONFIGS,
)  # fmt: skip


def save(name: str, folder: Path) -> torch.nn.Module:
    """The model of a case, saved in the folder."""
    if name not in CONFIGS:
        return save_model(name, folder)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(CONFIGS[name], attn_implementation="eager").eval()
    randomize(model)
    model.save_pretrained(folder)
    return model


@pytest.mark.parametrize("name", PLAIN)
def test_family_has_the_logits_of_its_checkpoint(name: str, tmp_path: Path) -> None:
    assert name in CONFIGS or name in CASES
    oracle = save(name, tmp_path / "plain")
    check_logits(oracle, load(write_gguf(tmp_path / "plain", tmp_path / "model.gguf")))


def test_a_model_in_several_files(tmp_path: Path) -> None:
    oracle = save("qwen2", tmp_path / "plain")
    write_gguf(tmp_path / "plain", tmp_path / "split.gguf", tensors_per_file=7)
    files = sorted(tmp_path.glob("*.gguf"))
    assert len(files) > 2 and resolve_model(EngineConfig(model=str(tmp_path))) == files[0]
    assert list(existing_weight_files(files[0])) == files
    check_logits(oracle, load(files[0]))
    with pytest.raises(ModelError, match="Give --model the first of them"):
        read_gguf(files[1])
    lost = files[-1].rename(tmp_path / "lost")
    with pytest.raises(ModelError, match=f"lacks the weight file '{files[-1].name}'"):
        read_gguf(files[0])
    lost.rename(files[-1])
    files[2].write_bytes(files[1].read_bytes())
    with pytest.raises(ModelError, match=r"split\.no and split\.count must be 2 and"):
        read_gguf(files[0])


@pytest.mark.parametrize("kind", ["Q8_0", "Q4_K"])
def test_quantised_model_has_the_logits_of_its_dequantised_weights(kind: str, tmp_path: Path) -> None:
    config = Qwen3Config(**{**SIZES, "hidden_size": 256, "intermediate_size": 256}, num_hidden_layers=1)
    torch.manual_seed(0)
    oracle = AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    randomize(oracle)
    oracle.save_pretrained(tmp_path / "plain")
    path = write_gguf(tmp_path / "plain", tmp_path / "model.gguf", kind)
    ours = load(path)
    stored = {tensor.name: tensor for tensor in gguf_package.GGUFReader(path).tensors}
    names = gguf_package.get_tensor_name_map(gguf_package.MODEL_ARCH.QWEN3, 1)
    for name, parameter in oracle.state_dict().items():
        tensor = stored[names.get_name(name, try_suffixes=(".weight",)) or ""]
        values = gguf_package.quants.dequantize(tensor.data, tensor.tensor_type)
        parameter.copy_(torch.from_numpy(values.copy()))
    prompt = make_prompts(20)[0]
    (logits,) = PagedRunner(ours).step([(Sequence(prompt), len(prompt))])
    with torch.no_grad():
        expected = oracle(torch.tensor([prompt])).logits[0]
    compare(logits, expected)
    loaded = load_weights(path, ours.config, torch.float32, torch.device("cpu"))
    weights = [weight for weight in loaded.values() if isinstance(weight, QuantizedWeight)]
    assert len(weights) >= 4
    total = sum(w.num_bytes if isinstance(w, QuantizedWeight) else w.numel() * 4 for w in loaded.values())
    assert weight_bytes(read_model_config(path), 4) == total


def test_refuses_an_unknown_architecture_and_a_field_it_does_not_follow(tmp_path: Path) -> None:
    path = write(tmp_path, gguf(keys=[key("general.architecture", 8, text("rwkv7"))]))
    with pytest.raises(ModelError, match=r"model\.gguf: general\.architecture 'rwkv7' is not served"):
        gguf_config(read_gguf(path))
    save_model("llama", tmp_path / "plain")
    path = write_gguf(tmp_path / "plain", tmp_path / "a.gguf")
    header = read_gguf(path)
    header.metadata["llama.attention.key_scale"] = 2.0
    with pytest.raises(ModelError, match=r"a\.gguf: llama\.attention\.key_scale = 2\.0 is not served"):
        gguf_config(header)


def test_granite_without_rope_is_refused_and_its_factors_have_defaults(tmp_path: Path) -> None:
    save_model("granite", tmp_path / "plain")
    header = read_gguf(write_gguf(tmp_path / "plain", tmp_path / "a.gguf"))
    for name in ("attention.scale", "embedding_scale", "residual_scale", "logit_scale"):
        del header.metadata[f"granite.{name}"]
    config = model_config(gguf_config(header))
    assert (config.attn_scale, config.embedding_scale, config.logits_scale) == (8**-0.5, 1.0, 1.0)
    header.metadata["granite.rope.scaling.finetuned"] = False
    with pytest.raises(ModelError, match=r"granite\.rope\.scaling\.finetuned = False is not served"):
        gguf_config(header)


def test_fields_of_embedding_models(tmp_path: Path) -> None:
    """Pooling by the last token is the default; attention to later tokens is refused."""
    save_model("qwen3", tmp_path / "plain")
    header = read_gguf(write_gguf(tmp_path / "plain", tmp_path / "a.gguf"))
    plain = model_config(gguf_config(header))
    header.metadata.update({"qwen3.pooling_type": 3, "qwen3.attention.causal": True})
    assert model_config(gguf_config(header)) == plain
    header.metadata["qwen3.attention.causal"] = False
    with pytest.raises(ModelError, match=r"qwen3\.attention\.causal = False is not served"):
        gguf_config(header)
    header.metadata["qwen3.attention.causal"] = True
    header.metadata["qwen3.pooling_type"] = 1
    with pytest.raises(ModelError, match=r"qwen3\.pooling_type = 1 is not served"):
        gguf_config(header)
