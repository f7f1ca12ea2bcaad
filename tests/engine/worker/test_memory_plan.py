"""`pageserve plan`, as the command runs it."""

import json
import re
from dataclasses import replace

import pytest

from engine.config import EngineConfig
from engine.worker import memory_plan
from engine.worker.memory_plan import Machine, make_plan, nearest_settings

GIB = 1 << 30
LLAMA_8B = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 128256,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "hidden_act": "silu",
    "torch_dtype": "bfloat16",
    "tie_word_embeddings": False,
}


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(LLAMA_8B))
    return str(tmp_path)


@pytest.fixture
def model(folder):
    from pathlib import Path

    return memory_plan.read_model_config(Path(folder))


def test_an_8b_model_on_an_80_gib_card(folder, capsys):
    assert memory_plan.main([folder, "--memory", "80GiB"]) == 0
    text = capsys.readouterr().out
    assert "8,030.3 M parameters in bfloat16" in text
    assert "128.0 KiB" in text  # KV per token: 2 * 32 layers * 8 heads * 128 * 2 bytes
    assert "16.0 GiB  of max_model_len 131072" in text
    assert "at 8192 tokens a step" in text
    assert "3 sequences of 131,072 tokens fit at once" in text


@pytest.mark.parametrize(("name", "per_token"), [("int8", "66.0 KiB"), ("fp8", "66.0 KiB"), ("int4", "34.0 KiB")])
def test_a_quantised_cache(folder, capsys, name, per_token):
    """2 * 32 layers * 8 heads * (128 codes of 8 or 4 bits, and 4 bytes)."""
    assert memory_plan.main([folder, "--memory", "80GiB", "--kv-cache-dtype", name]) == 0
    text = capsys.readouterr().out
    assert f"{per_token}  in {name}, scales included" in text
    sequences = {"int8": 6, "fp8": 6, "int4": 12}[name]
    assert f"{sequences} sequences of 131,072 tokens fit at once" in text


def test_what_does_not_fit_comes_with_settings_that_do(folder, model, capsys):
    arguments = [folder, "--memory", "24GiB", "--max-model-len", "131072"]
    assert memory_plan.main(arguments) == 1
    text = capsys.readouterr().out
    assert "Does not fit. max_model_len: 131072" in text
    changes = [line.split() for line in text.splitlines() if line.startswith("  --")]
    assert any(change[0] == "--max-model-len" for change in changes)
    assert ["--kv-cache-dtype", "int8"] not in changes, "16 GiB of weights leave too little for that, too"
    for change in changes:
        assert memory_plan.main([*arguments, *change]) == 0, change


def test_a_model_too_large_for_any_setting(folder, capsys):
    assert memory_plan.main([folder, "--memory", "4GiB"]) == 1
    text = capsys.readouterr().out
    assert "a larger machine is needed" in text and "Raise" not in text and "Use" not in text, (
        "no hint that does not help"
    )
    (size,) = re.findall(r"As it is, it fits (.*) GiB and more", text)
    assert memory_plan.main([folder, "--memory", f"{float(size) + 0.1}GiB"]) == 0
    assert memory_plan.main([folder, "--memory", f"{float(size) - 0.2}GiB"]) == 1


def test_quantised_weights_are_proposed(folder, capsys):
    arguments = [folder, "--memory", "21000MiB", "--max-model-len", "32768", "--gpu-memory-utilization", "0.85"]
    assert memory_plan.main(arguments) == 1
    assert "\n  --quantization int8\n" in capsys.readouterr().out
    assert memory_plan.main([*arguments, "--quantization", "int8"]) == 0


def test_two_settings_are_named_where_no_single_one_helps(folder, capsys):
    arguments = [folder, "--memory", "12500MiB", "--max-model-len", "32768", "--gpu-memory-utilization", "0.85"]
    arguments += ["--quantization", "int8"]
    assert memory_plan.main(arguments) == 1
    changes = [line.split() for line in capsys.readouterr().out.splitlines() if line.startswith("  --")]
    assert changes and all(sum(word.startswith("--") for word in change) >= 2 for change in changes)
    for change in changes:
        assert memory_plan.main([*arguments, *change]) == 0, change


def test_graphs_are_given_up_where_that_is_enough(capsys):
    assert memory_plan.main(["--memory", "1150MiB"]) == 1
    assert "\n  --no-cuda-graphs\n" in capsys.readouterr().out
    assert memory_plan.main(["--memory", "1150MiB", "--no-cuda-graphs"]) == 0


def test_flashinfer_takes_its_memory_from_the_kv_cache(model, folder, capsys):
    plans = [
        make_plan(EngineConfig(attention_backend=backend), model, Machine("cuda", 80 * GIB))
        for backend in ("auto", "flashinfer")
    ]
    assert plans[0].left_for_kv - plans[1].left_for_kv == (128 + 2 * 8) * 2**20 + 2 * 2**17
    assert memory_plan.main([folder, "--memory", "80GiB", "--attention-backend", "flashinfer"]) == 0
    assert "recorded graphs, FlashInfer: an estimate" in capsys.readouterr().out


def test_a_cpu_of_given_memory(folder, capsys):
    assert memory_plan.main([folder, "--device", "cpu", "--memory", "64GiB"]) == 0
    text = capsys.readouterr().out
    assert "at 2048 tokens a step" in text
    assert "max_model_len is cut from the model's 131072 to what the cache holds" in text
    assert memory_plan.main([folder, "--device", "cpu", "--memory", "8GiB"]) == 1


def test_this_machine(model_dir, capsys):
    assert memory_plan.main([str(model_dir), "--device", "cpu"]) == 0
    assert "free host memory" in capsys.readouterr().out


def test_the_nearest_setting_is_the_largest_that_fits(model):
    config = EngineConfig(max_model_len=131072, max_num_batched_tokens=2048)
    machine = Machine("cuda", 24 * GIB)
    lengths = [change for change in nearest_settings(config, model, machine) if change.startswith("--max-model-len")]
    (length,) = [int(change.split()[1]) for change in lengths]
    fits = make_plan(EngineConfig(max_model_len=length, max_num_batched_tokens=2048), model, machine)
    assert fits.size is not None
    longer = EngineConfig(max_model_len=length + 131072 // 64, max_num_batched_tokens=2048)
    assert make_plan(longer, model, machine).size is None


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--memory", "lots"], "--memory must be a size"),
        (["--memory", "80"], "--memory 80 is 80 bytes, less than any model needs; write 80GiB or 80MiB."),
        (["--memory", "80KiB"], "--memory 80KiB is 81920 bytes, less than any model needs."),
        (["--max-model-len", "131073"], "--max-model-len 131072"),
        (["--block-size", "17"], "block_size must be one of"),
        (["--blocksize", "16"], "did you mean --block-size?"),
        (["--memory"], "argument --memory: expected one argument (`pageserve plan --help` lists the options)"),
        (["--model", "another"], "two models are named"),
    ],
)
def test_wrong_settings(folder, capsys, arguments, message):
    assert memory_plan.main([folder, "--device", "cpu", *arguments]) == 2
    said = capsys.readouterr().err
    assert said.startswith("pageserve: error: ") and message in said and said.count("\n") == 1


def test_a_folder_that_is_not_there(capsys):
    assert memory_plan.main(["/nowhere", "--device", "cpu"]) == 2
    assert "/nowhere" in capsys.readouterr().err


def test_environment_counts_as_for_serve(folder, capsys, monkeypatch):
    monkeypatch.setenv("PAGESERVE_MAX_MODEL_LEN", "4096")
    monkeypatch.setenv("PAGESERVE_PORT", "1234")  # the server's: not looked at
    assert memory_plan.main([folder, "--memory", "80GiB"]) == 0
    assert "of max_model_len 4096" in capsys.readouterr().out


def test_rotary_tables_count_as_weights(model):
    """fp32, one number for each position and element of a head; a second table where layers with a window have one."""
    config, machine = EngineConfig(max_model_len=4096), Machine("cuda", 80 * GIB)
    assert make_plan(config, model, machine).weights == model.weight_bytes(2) + 4096 * 128 * 4
    two = replace(model, sliding_window=512, window_rope_theta=1e4)
    assert make_plan(config, two, machine).weights == model.weight_bytes(2) + 2 * 4096 * 128 * 4
    learned = replace(model, position="learned")
    assert make_plan(config, learned, machine).weights == learned.weight_bytes(2)


def test_a_longer_sequence_than_is_served_unasked(tmp_path, capsys):
    long = {"rope_type": "longrope", "short_factor": [1.0] * 64, "long_factor": [2.0] * 64}
    fields = {"original_max_position_embeddings": 4096, "rope_scaling": long}
    (tmp_path / "config.json").write_text(json.dumps(LLAMA_8B | fields))
    assert memory_plan.main([str(tmp_path), "--memory", "80GiB"]) == 0
    text = capsys.readouterr().out
    assert "of max_model_len 4096" in text and "longer with --max-model-len, up to 131072" in text
    assert memory_plan.main([str(tmp_path), "--memory", "80GiB", "--max-model-len", "131072"]) == 0
    text = capsys.readouterr().out
    assert "of max_model_len 131072" in text and "longer with" not in text


def test_an_encoder_has_no_kv_cache(tmp_path, capsys):
    sizes = {"vocab_size": 97, "hidden_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    sizes |= {"intermediate_size": 80, "max_position_embeddings": 64}
    (tmp_path / "config.json").write_text(json.dumps({"architectures": ["BertModel"], "model_type": "bert", **sizes}))
    assert memory_plan.main([str(tmp_path)]) == 0
    assert "no KV cache" in capsys.readouterr().out


def test_a_second_copy_of_the_weights_is_shown_and_given_up_where_it_does_not_fit(folder, capsys, monkeypatch):
    monkeypatch.setattr(memory_plan, "keeps_compressed", lambda config, *_: config.compressed_weights is not False)
    assert memory_plan.main([folder, "--device", "cpu", "--memory", "64GiB"]) == 0
    assert re.search(r"compressed weights +10\.5 GiB  a second copy in 12 bits each", capsys.readouterr().out)
    fits = ["--device", "cpu", "--memory", "26GiB", "--max-model-len", "1024", "--kv-cache-memory", "1GiB"]
    assert memory_plan.main([folder, *fits, "--compressed-weights"]) == 1
    assert "  --no-compressed-weights\n" in capsys.readouterr().out
    assert memory_plan.main([folder, *fits, "--no-compressed-weights"]) == 0
    assert "compressed weights" not in capsys.readouterr().out
