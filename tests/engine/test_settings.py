"""Settings: every source, every kind of mistake."""

import argparse
import dataclasses
from dataclasses import dataclass

import pytest

from engine.config import EngineConfig
from engine.errors import ConfigError
from engine.settings import (
    add_flags,
    check_config,
    from_keywords,
    load_settings,
    option,
    parse_size,
    settings_of,
    shown,
)
from server.config import ServerConfig, resolve_files
from server.http.api_keys import ApiKeys

CLASSES = (EngineConfig, ServerConfig)


@pytest.fixture
def yaml_file(tmp_path):
    def write(text: str) -> str:
        path = tmp_path / "settings.yaml"
        path.write_text(text)
        return str(path)

    return write


def load(flags=None, environ=None):
    return load_settings(CLASSES, flags or {}, environ or {})


def parse_flags(*arguments: str) -> dict:
    parser = argparse.ArgumentParser(allow_abbrev=False)
    add_flags(parser, *CLASSES)
    return vars(parser.parse_args(arguments))


def test_no_source_gives_the_defaults():
    assert load() == [EngineConfig(), ServerConfig()]


def test_later_sources_win(yaml_file):
    path = yaml_file("max_num_seqs: 1\nblock_size: 32\nport: 1111\nwatermark: 0.1\n")
    environ = {"PAGESERVE_MAX_NUM_SEQS": "2", "PAGESERVE_PORT": "2222", "HOME": "/", "PAGESERVE_CONFIG": "not read"}
    engine, server = load(parse_flags("--config", path, "--max-num-seqs", "3"), environ)
    assert (engine.max_num_seqs, server.port, engine.block_size, engine.watermark) == (3, 2222, 32, 0.1)


def test_config_file_by_variable(yaml_file):
    _, server = load(environ={"PAGESERVE_CONFIG": yaml_file("max-n: 7")})
    assert server.max_n == 7


@pytest.mark.parametrize("name", [name for cls in CLASSES for name in settings_of(cls)])
def test_every_default_survives_every_source(name, yaml_file):
    """A default written out, as configs/default.yaml does, means the same as leaving it out."""
    from server.commands.config_docs import yaml_template

    lines = [line for line in yaml_template().splitlines() if line.startswith(f"{name}:")]
    assert len(lines) == 1
    assert load({"config": yaml_file(lines[0])}) == load()


def test_flags_of_every_kind():
    flags = parse_flags(
        *("--no-enable-prefix-caching", "--kv-cache-memory", "1.5GiB", "--gpu-memory-utilization", "1"),
        *("--served-model-name", "a", "b", "--served-model-name", "c", "--max-body-bytes", "2MiB"),
        *("--max-num-seqs", "none", "--device", "cpu"),
    )
    engine, server = load(flags, {"PAGESERVE_MAX_NUM_SEQS": "9"})
    assert engine == EngineConfig(
        enable_prefix_caching=False, kv_cache_memory="1.5GiB", gpu_memory_utilization=1.0, device="cpu"
    )
    assert server == ServerConfig(served_model_name=("a", "b", "c"), max_body_bytes=2 << 20)


def test_environment_of_every_kind():
    engine, server = load(
        environ={
            "PAGESERVE_ASYNC_SCHEDULING": "off",
            "PAGESERVE_API_KEY": "one, two",
            "PAGESERVE_DRAIN_TIMEOUT": "2.5",
            "PAGESERVE_REVISION": "",  # compose's ${REVISION:-}
        }
    )
    assert engine == EngineConfig(async_scheduling=False)
    assert (server.api_key, server.drain_timeout) == (("one", "two"), 2.5)


def test_variables_of_a_kubernetes_service_called_pageserve_are_not_settings():
    links = {
        "PAGESERVE_SERVICE_HOST": "10.0.0.1",
        "PAGESERVE_SERVICE_PORT": "8000",
        "PAGESERVE_SERVICE_PORT_HTTP": "8000",
        "PAGESERVE_PORT": "tcp://10.0.0.1:8000",
        "PAGESERVE_PORT_8000_TCP": "tcp://10.0.0.1:8000",
        "PAGESERVE_PORT_8000_TCP_ADDR": "10.0.0.1",
        "PAGESERVE_CANARY_SERVICE_HOST": "10.0.0.1",
    }
    assert load(environ=links) == load()


@pytest.mark.parametrize(
    "text, message",
    [
        ("port: 8000\nmax_num_seq: 4\n", "line 2: there is no setting max_num_seq; did you mean max_num_seqs?"),
        ("\n\nport: '8000'\n", "line 3: port must be an integer from 0 to 65535, not '8000'."),
        ("max_num_seqs: 0", "line 1: max_num_seqs must be an integer of at least 1 (or none), not 0."),
        ("max_num_seqs: true", "line 1: max_num_seqs must be an integer of at least 1 (or none), not True."),
        ("enable_prefix_caching: 1", "line 1: enable_prefix_caching must be true or false, not 1."),
        ("device: tpu", "line 1: device must be one of auto, cuda, cpu, not 'tpu'."),
        ("revision: 17", "line 1: revision must be text (or none), not 17."),
        ("watermark: .nan", "line 1: watermark must be a number from 0 to 0.5, not nan."),
        ("kv_cache_memory: 2 gigs", "line 1: kv_cache_memory must be a size in bytes"),
        (
            "trust_remote_code: true",
            "line 1: there is no setting trust_remote_code: code from a checkpoint is never run.",
        ),
        ("swap_space: -1", "line 1: swap_space must be a number of at least 0, not -1."),
        ("port: 1\nport: 2", "line 2: port is set twice."),
        ("a:\n  b: [1", "not valid YAML"),
        ("port: 1\n  host: x", "line 2: not valid YAML"),
        ("- port", "line 1: must hold lines of `name: value`."),
        ("port: !!python/object:os.system {}", "line 1: not valid YAML"),
        ("revision: 2026-13-40", "not valid YAML"),
        ("api_key: [secret-1, 7]", "line 1: api_key must be a list of non-empty texts."),
    ],
)
def test_yaml_mistakes_are_named_with_their_line(text, message, yaml_file):
    with pytest.raises(ConfigError) as caught:
        load({"config": yaml_file(text)})
    assert message in str(caught.value)
    assert "settings.yaml" in str(caught.value)
    assert "secret-1" not in str(caught.value)


def test_missing_and_empty_files(tmp_path, yaml_file):
    with pytest.raises(ConfigError, match=r"nowhere\.yaml: No such file"):
        load({"config": str(tmp_path / "nowhere.yaml")})
    (tmp_path / "binary.yaml").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigError, match="not valid YAML"):
        load({"config": str(tmp_path / "binary.yaml")})
    assert load({"config": yaml_file("# nothing\n")}) == load()


@pytest.mark.parametrize(
    "variable, text, message",
    [
        (
            "PAGESERVE_MAX_NUM_SEQ",
            "4",
            "there is no setting PAGESERVE_MAX_NUM_SEQ; did you mean PAGESERVE_MAX_NUM_SEQS?",
        ),
        ("PAGESERVE_PORT", "http", "PAGESERVE_PORT: port must be an integer from 0 to 65535, not 'http'."),
        ("PAGESERVE_ASYNC_SCHEDULING", "maybe", "PAGESERVE_ASYNC_SCHEDULING: async_scheduling must be true or false"),
    ],
)
def test_environment_mistakes(variable, text, message):
    with pytest.raises(ConfigError) as caught:
        load(environ={variable: text})
    assert message in str(caught.value)


def test_flag_mistakes_name_the_flag():
    with pytest.raises(ConfigError, match=r"^--max-num-seqs: max_num_seqs must be an integer of at least 1"):
        load(parse_flags("--max-num-seqs", "1e3"))


DTYPES = [("half", "float16"), ("fp16", "float16"), ("bf16", "bfloat16"), ("float", "float32"), ("FLOAT16", "float16")]


@pytest.mark.parametrize(
    "keywords, message",
    [
        ({"quantization": "awq"}, "quantization must be one of int8, int4, fp8, w8a8 (or none), not 'awq'"),
        ({"tensor_parallel_size": 0}, "tensor_parallel_size must be an integer from 1 to 64"),
        ({"kv_cache_dtype": "fp4"}, "kv_cache_dtype must be one of auto, int8, fp8, int4, not 'fp4'."),
        ({"swap_space": 1.0, "enable_prefix_caching": False}, "swap_space: the prefix cache keeps the blocks"),
        ({"disk_cache": "/tmp/kv"}, "reserve GiB with swap_space (--swap-space 4)."),
        *[({"dtype": name}, f"bfloat16, float16, not '{name}'; did you mean {meant}?") for name, meant in DTYPES],
        ({"dtype": "int2"}, "dtype must be one of auto, float32, bfloat16, float16, not 'int2'."),
        ({"kv_cache_dtype": "fp8_e4m3"}, "did you mean fp8?"),
        ({"gpu_memory_utilization": 0}, "gpu_memory_utilization must be a number above 0 and at most 1, not 0."),
        ({"gpu_memory_utilisation": 0.5}, "did you mean gpu_memory_utilization?"),
        ({"pipeline_parallel_size": 2}, "pipeline parallelism is not served"),
        ({"zzz": 2}, "there is no setting zzz."),
    ],
)
def test_keywords_that_cannot_be_honoured(keywords, message):
    with pytest.raises(ConfigError) as caught:
        from_keywords(EngineConfig, keywords)
    assert message in str(caught.value)


def test_values_are_stored_in_their_final_type():
    assert type(EngineConfig(gpu_memory_utilization=1).gpu_memory_utilization) is float
    assert EngineConfig(kv_cache_memory=4096).kv_cache_memory == "4096"  # type: ignore[arg-type]
    assert ServerConfig(api_key="one").api_key == ("one",)  # type: ignore[arg-type]
    assert dataclasses.replace(EngineConfig(), device="cpu") == EngineConfig(device="cpu")


@pytest.mark.parametrize(
    "text, size",
    [("1", 1), (7, 7), ("2GiB", 2 << 30), ("2g", 2 << 30), ("1.5 MB", 3 << 19), ("64k", 65536), ("1TiB", 1 << 40)]
    + [(bad, None) for bad in ("", "0", 0, -1, "GiB", "-1", "1e9", "2 gigs", "1PiB", True, 1.5, None)],
)
def test_parse_size(text, size):
    assert parse_size(text) == size


def test_secrets_are_never_shown():
    config = ServerConfig(api_key=("hunter2",), port=1)
    assert "hunter2" not in repr(config)
    assert shown(config) == {"api_key": "***", "port": 1}


def test_names_are_unique_and_have_help():
    names = [name for cls in CLASSES for name in settings_of(cls)]
    assert len(names) == len(set(names))
    assert all(setting.help for cls in CLASSES for setting in settings_of(cls).values())


def test_a_declaration_is_all_it_takes():
    @dataclass(frozen=True)
    class Extra:
        """Extra settings."""

        depth: int | None = option(None, "how deep", minimum=1)

        def __post_init__(self) -> None:
            check_config(self)

    parser = argparse.ArgumentParser()
    add_flags(parser, Extra)
    (extra,) = load_settings((Extra,), vars(parser.parse_args(["--depth", "3"])), {})
    assert extra == Extra(depth=3)


def test_a_template_comes_from_a_file_or_as_it_is(tmp_path):
    (tmp_path / "chat.jinja").write_text("{{ messages }}")
    assert resolve_files(ServerConfig(chat_template=str(tmp_path / "chat.jinja"))).chat_template == "{{ messages }}"
    assert resolve_files(ServerConfig(chat_template="{% if x %}{% endif %}")).chat_template == "{% if x %}{% endif %}"


@pytest.mark.parametrize(("name", "read"), [("api_key_file", ApiKeys), ("chat_template", resolve_files)])
def test_files_that_cannot_be_read(name, read, tmp_path):
    with pytest.raises(ConfigError, match=rf"^{name}: cannot read .*missing: No such file"):
        read(ServerConfig(**{name: str(tmp_path / "missing")}))


def test_an_empty_key_file_does_not_open_the_server(tmp_path):
    (tmp_path / "keys").write_text("\n")
    with pytest.raises(ConfigError, match="holds no key"):
        ApiKeys(ServerConfig(api_key_file=str(tmp_path / "keys")))
