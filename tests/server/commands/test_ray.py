"""The parts of `pageserve ray` that need no Ray. `make ray` tests the rest on a cluster."""

import json
import re
from importlib.util import find_spec

import pytest

from engine.config import EngineConfig
from engine.errors import ConfigError
from engine.settings import load_settings
from engine.worker.cache.disk_cache import BlockFile
from server.cli import main
from server.commands.ray.config import RayConfig, bundle_of, replica_settings
from server.commands.ray.counted_stream import CountedStream
from server.commands.ray.disk_folders import DiskFolders
from server.commands.ray.prefixes import CHUNK_CHARACTERS, PrefixMemory, prefix_hashes, ranked
from server.commands.ray.replica import gauges_of, with_key
from server.commands.ray.scaling import replicas_for
from server.config import ServerConfig


def hashes_of(key: str = "", **body: object) -> list[int]:
    return prefix_hashes(json.dumps({"model": "m", **body}).encode(), key)


def test_prompts_share_as_many_hashes_as_whole_chunks_of_their_text():
    start, other = "a" * 3 * CHUNK_CHARACTERS, "b" * 3 * CHUNK_CHARACTERS
    first, second = hashes_of(prompt=start + "x" * 300), hashes_of(prompt=start + other)
    assert len(first) == 4 and len(second) == 6
    assert first[:3] == second[:3] and first[3] != second[3]
    assert hashes_of(prompt="short") == []


def test_a_conversation_begins_with_the_hashes_of_its_earlier_turns():
    turns = [{"role": "user", "content": "tell me " * 100}, {"role": "assistant", "content": "no " * 200}]
    earlier, later = hashes_of(messages=turns), hashes_of(messages=[*turns, {"role": "user", "content": "why? " * 99}])
    assert later[: len(earlier)] == earlier and len(later) > len(earlier) >= 5


@pytest.mark.parametrize("change", [{"key": "other"}, {"model": "n"}, {"cache_salt": "s"}], ids=str)
def test_tenants_models_and_salts_share_no_hash(change):
    prompt = "word " * 500
    assert not set(hashes_of(prompt=prompt)) & set(hashes_of(**{"prompt": prompt, **change}))


@pytest.mark.parametrize("body", [b"", b"{", b"[]", b'"x"', b"[" * 5000, b'{"messages": 5}', b'{"prompt": [[1], [2]]}'])
def test_any_other_body_has_no_hashes(body):
    assert prefix_hashes(body, "") == []


def test_the_memory_knows_the_longest_prefix_of_each_replica():
    memory = PrefixMemory()
    memory.add([1, 2, 3], "a")
    memory.add([1, 9], "b")
    assert [memory.held([1, 2, 4], each) for each in "abc"] == [2, 1, 0]
    memory.keep_only(["b"])
    assert [memory.held([1, 2, 4], each) for each in "abc"] == [0, 1, 0]


def test_the_memory_forgets_the_longest_prefixes_of_old_prompts_first():
    memory = PrefixMemory(capacity=4)
    memory.add([1, 2, 3], "a")
    memory.add([7, 8], "a")
    assert memory.held([1, 2, 3], "a") == 2 and memory.held([7, 8], "a") == 2


def test_the_holder_of_the_longest_prefix_comes_first_then_the_least_loaded():
    assert ranked([0, 4, 2], [0, 5, 9]) == [1, 2, 0]
    assert ranked([0, 0, 0], [3, 1, 2]) == [1, 2, 0]
    assert ranked([4, 0], [17, 0], max_imbalance=16) == [1, 0]  # the holder is overloaded
    assert ranked([4, 0], [16, 0], max_imbalance=16) == [0, 1]
    assert ranked([], []) == []


@pytest.mark.parametrize(
    "queued, usage, replicas",
    [([0, 0], [0.0, 0.0], 0), ([1], [0.1], 1), ([2500, 1500], [1, 1], 4), ([0, 0], [0.9, 0.8], 3), ([0], [0.5], 1)],
)
def test_replicas_follow_queued_tokens_and_blocks_in_use(queued, usage, replicas):
    assert replicas_for(queued, usage, queued_tokens_per_replica=1000) == replicas


def test_a_replica_gets_the_settings_that_differ_as_serve_reads_them(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "model").mkdir()
    engine = EngineConfig(model="model", device="cpu", max_num_seqs=7)
    server = ServerConfig(host="0.0.0.0", port=80, api_key=("k1", "k2"), max_stop=9)
    settings = replica_settings(engine, server)
    assert settings["model"] == str(tmp_path / "model") and "host" not in settings and "port" not in settings
    (tmp_path / "replica.yaml").write_text(json.dumps(settings))
    read_engine, read_server = load_settings((EngineConfig, ServerConfig), {"config": "replica.yaml"}, {})
    assert (read_engine.max_num_seqs, read_engine.device) == (7, "cpu")
    assert read_server == ServerConfig(
        api_key=("k1", "k2"), max_stop=9, allow_unauthenticated=True, served_model_name=("model",)
    )


def test_the_models_of_a_replica_have_absolute_paths(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "folder").mkdir()
    models = ("a=folder", {"name": "b", "model": "some/hub-id", "max_num_seqs": 3})
    settings = replica_settings(EngineConfig(), ServerConfig(models=models))
    assert settings["models"] == [{"name": "a", "model": str(tmp_path / "folder")}, models[1]]


def test_every_path_of_a_replica_is_absolute(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("model", "sql", "draft"):
        (tmp_path / name).mkdir()
    (tmp_path / "chat.jinja").write_text("{{ messages }}")
    adapters = EngineConfig(model="org/name", lora=("a=sql", "b=missing"), allow_runtime_lora=True, lora_root="loras")
    settings = replica_settings(adapters, ServerConfig())
    assert settings["lora"] == [f"a={tmp_path}/sql", "b=missing"] and settings["lora_root"] == f"{tmp_path}/loras"
    assert settings["model"] == "org/name" and "served_model_name" not in settings
    cache = {"disk_cache": "cache", "swap_space": 1.0}
    drafts = replica_settings(EngineConfig(speculative="draft:4"), ServerConfig(served_model_name=("n",)))
    assert drafts["speculative"] == f"{tmp_path}/draft:4" and drafts["served_model_name"] == ["n"]
    ngram = replica_settings(EngineConfig(model="model", speculative="ngram:4", **cache), ServerConfig())
    assert (ngram["speculative"], ngram["disk_cache"]) == ("ngram:4", f"{tmp_path}/cache")
    assert (ngram["model"], ngram["served_model_name"]) == (f"{tmp_path}/model", ["model"])
    own = {"name": "x", "model": "model", "chat-template": "chat.jinja", "lora": "a=sql"}
    text = {"name": "y", "model": "z", "chat_template": "{{ messages }}" * 500}
    entry, other = replica_settings(EngineConfig(), ServerConfig(models=(own, text)))["models"]
    assert entry["chat_template"] == f"{tmp_path}/chat.jinja" and entry["lora"] == [f"a={tmp_path}/sql"]
    assert other == text


def test_a_replica_adds_a_key_only_where_none_can_be_sent():
    """With a second key the first one would lose the routes and priorities that an only key may use."""
    assert with_key({"port": 1}) == ({"port": 1}, "")
    assert with_key({"api_key": ["k"]}) == ({"api_key": ["k"]}, "k")
    digest = "sha256:" + "0" * 64
    for settings in ({"api_key": [digest]}, {"api_key_file": "keys"}):
        with_another, key = with_key(settings)
        assert with_another == settings | {"api_key": [*settings.get("api_key", []), key]} and len(key) > 40
    assert with_key({"api_key": [digest, "k"], "api_key_file": "keys"})[1] == "k"


def test_the_bundle_of_a_replica():
    assert bundle_of(EngineConfig(model="m", device="cpu"), RayConfig(replica_cpus=2.0)) == {"CPU": 2.0}
    assert bundle_of(EngineConfig(model="m"), RayConfig()) == {"CPU": 1.0, "GPU": 1.0}
    assert bundle_of(EngineConfig(model="m", tensor_parallel_size=2), RayConfig()) == {"CPU": 2.0, "GPU": 2.0}
    assert bundle_of(EngineConfig(model="m"), RayConfig(replica_gpus=4)) == {"CPU": 1.0, "GPU": 4.0}


def test_more_replicas_at_least_than_at_most_are_refused():
    with pytest.raises(ConfigError, match="min_replicas must be at most max_replicas"):
        RayConfig(min_replicas=3, max_replicas=2)


def test_the_command_needs_a_port(capsys):
    assert main(["ray", "some-model", "--port", "0"]) == 2
    assert "port: every node of the cluster listens on the same port" in capsys.readouterr().err


@pytest.mark.skipif(find_spec("ray") is not None, reason="Ray is installed here")
def test_without_ray_the_command_names_the_extra(capsys):
    assert main(["ray", "some-model", "--max-replicas", "2"]) == 2
    assert "pip install '.[ray]'" in capsys.readouterr().err


def test_autoscaling_reads_the_gauges_of_a_metrics_page():
    page = '# HELP\nvllm:kv_cache_usage_perc{a="m",b="0"} 0.25\npageserve:num_tokens_waiting{a="b"} 12.0\n'
    assert gauges_of(page) == {"queued_tokens": 12.0, "kv_usage": 0.25}
    assert gauges_of(page + page.replace("12", "30").replace("0.25", "0.5")) == {"queued_tokens": 42.0, "kv_usage": 0.5}
    assert gauges_of("") == {"queued_tokens": 0.0, "kv_usage": 0.0}


EVENTS = [b'data: {"n":1}\n\n', b'data: {"n":2}\n\ndata: {"n":3}\n\n', b'data: {"n":"\\n\\n: tokens 9"}\n\n']
WIRE = b"event: opening\ndata: {}\n\n" + b"".join(
    body + b": tokens %d\n\n" % count for body, count in zip(EVENTS, (1, 4, 5), strict=True)
)


@pytest.mark.parametrize("size", [1, 7, 64, 1000])
def test_counts_are_taken_out_however_the_bytes_are_cut(size):
    stream = CountedStream()
    wire = WIRE + b"data: [DONE]\n\n"
    passed = b"".join(stream.feed(wire[i : i + size]) for i in range(0, len(wire), size)) + stream.end()
    assert passed == b"event: opening\ndata: {}\n\n" + b"".join(EVENTS) + b"data: [DONE]\n\n"
    assert stream.num_tokens == 5


@pytest.mark.parametrize("cut", range(0, len(WIRE), 5))
def test_what_was_passed_on_has_as_many_tokens_as_the_count(cut):
    stream = CountedStream()
    passed = stream.feed(WIRE[:cut])
    whole = {0: b"", 1: EVENTS[0], 4: b"".join(EVENTS[:2]), 5: b"".join(EVENTS)}[stream.num_tokens]
    assert passed == (b"event: opening\ndata: {}\n\n" + whole if whole else b"")


def test_nothing_but_comments_is_passed_on_before_the_first_token():
    stream = CountedStream()
    assert stream.feed(b"data: opening\n\n") == b""
    assert stream.feed(b": keep-alive\n\n") == b": keep-alive\n\n"
    stream.restart()
    assert stream.feed(b"data: opening\n\ndata: a\n\n: tokens 1\n\n") == b"data: opening\n\ndata: a\n\n"


def test_the_error_of_a_dead_replica_counts_the_tokens_in_the_form_of_each_api():
    stream = CountedStream()
    stream.feed(b'data: {"sequence_number":41}\n\n: tokens 3\n\ndata: {"sequence_number":42}\n\n')
    error = json.loads(stream.failure("/v1/completions").removeprefix(b"data: "))["error"]
    assert error["code"] == "replica_died" and re.search("after 3 tokens", error["message"])
    assert stream.failure("/v1/messages").startswith(b'event: error\ndata: {"type":"error","error":{')
    event = stream.failure("/v1/responses")
    assert event.startswith(b"event: error\n") and b'"sequence_number": 42' in event


def test_replicas_of_a_node_have_folders_of_their_own_in_the_disk_cache(tmp_path):
    """The Worker of the second one refused the folder of the first: "in use by another server"."""
    entry = {"name": "small", "model": "a", "disk_cache": str(tmp_path / "small")}
    settings = {"disk_cache": str(tmp_path / "all"), "models": ["other=b", entry], "block_size": 16}
    first, second = DiskFolders(settings), DiskFolders(settings)
    assert first.settings["disk_cache"] == str(tmp_path / "all" / "replica-0")
    assert second.settings["disk_cache"] == str(tmp_path / "all" / "replica-1")
    assert second.settings["models"] == ["other=b", entry | {"disk_cache": str(tmp_path / "small" / "replica-1")}]
    first.close()
    third = DiskFolders(settings)
    assert third.settings == first.settings, "the next one finds the blocks of the one before"
    third.close()
    second.close()
    assert DiskFolders({"block_size": 16}).settings == {"block_size": 16}


def test_a_replica_leaves_a_folder_alone_while_a_worker_that_is_ending_has_its_file(tmp_path):
    folder = tmp_path / "replica-0" / "model"
    folder.mkdir(parents=True)
    worker = BlockFile(folder, 1 << 20, 64, b"")
    folders = DiskFolders({"disk_cache": str(tmp_path)})
    assert folders.settings["disk_cache"] == str(tmp_path / "replica-1")
    worker.close()
    folders.close()


def test_a_disk_cache_that_is_no_folder_is_named(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"disk_cache: cannot use .*replica-0.*; name another folder"):
        DiskFolders({"disk_cache": str(tmp_path / "file")})
