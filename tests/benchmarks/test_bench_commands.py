"""`pageserve bench` and benchmarks/serve.py from end to end, against servers in processes of their own."""

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from benchmarks.processes import ServerProcess, session_and_descendants
from benchmarks.serve import main as compare
from server.cli import main as pageserve
from server.commands.bench import main as bench
from server.commands.bench.client import Endpoint

ROOT = Path(__file__).resolve().parent.parent.parent
STUB = f"{sys.executable} {Path(__file__).with_name('stub_server.py')} {{port}}"


@pytest.fixture
def stub(tmp_path):
    process = ServerProcess(STUB, tmp_path / "stub.log")
    wait_for_port(process)
    yield process
    process.stop()


def wait_for_port(process):
    for _ in range(200):
        process.check_alive()
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", process.port)) == 0:
                return
        time.sleep(0.05)
    raise TimeoutError


def wait_for(condition):
    for _ in range(200):
        if condition():
            return True
        time.sleep(0.02)
    return False


def state_of(pid):
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


def test_bench_prints_a_table_and_writes_json(stub, tmp_path, capsys):
    path = tmp_path / "bench.json"
    assert bench(["--base-url", stub.base_url, "--n", "4", "--rate", "100", "--seed", "3", "--json", str(path)]) == 0
    out = capsys.readouterr().out
    rows = {line.split()[0]: line for line in out.splitlines() if line.endswith("/4") or line.endswith("/1")}
    assert list(rows) == ["uniform", "mixed", "chatbot", "parallel", "single"]
    assert "seed 3" in out
    document = json.loads(path.read_text())
    assert [run["failed"] for run in document["runs"]] == [0] * 5
    assert document["settings"]["seed"] == 3
    assert document["servers"]["stub"]["max_model_len"] == 4096


def test_bench_draws_every_workload(stub, tmp_path):
    pytest.importorskip("matplotlib", reason="the extra `bench` is not installed")
    url = f"http://127.0.0.1:{stub.port}"  # without /v1, as `pageserve chat` takes it
    assert bench(["--base-url", url, "--n", "4", "--workload", "mixed", "--plot", str(tmp_path / "new" / "p.svg")]) == 0
    drawn = (tmp_path / "new" / "p.svg").read_text()
    assert "mixed" in drawn and "time to first token" in drawn and "uniform" not in drawn


def test_bench_says_before_it_runs_that_it_cannot_draw(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("server.commands.bench.command.find_spec", lambda name: None)
    assert bench(["--plot", str(tmp_path / "p.png")]) == 2
    assert "pip install '.[bench]'" in capsys.readouterr().err


@pytest.mark.parametrize("flag", ["--json", "--plot"])
def test_bench_says_before_it_runs_that_it_cannot_write(tmp_path, capsys, monkeypatch, flag):
    monkeypatch.setattr("server.commands.bench.command.find_spec", lambda name: True)
    (tmp_path / "file").write_text("old")
    for path, reason in ((tmp_path, "Is a directory"), (tmp_path / "file" / "x", "File exists|Not a directory")):
        assert bench(["--base-url", "http://127.0.0.1:9", flag, str(path)]) == 2
        assert re.search(f"{flag}: cannot write {re.escape(str(path))}: ({reason})", capsys.readouterr().err)
    for name in ("file", "new"):
        assert bench(["--base-url", "http://127.0.0.1:9", flag, str(tmp_path / name)]) == 2
        assert "Start a server" in capsys.readouterr().err
    assert [path.read_text() for path in tmp_path.iterdir()] == ["old"]


def test_bench_gives_advice_if_no_server_answers(capsys):
    assert bench(["--base-url", "http://127.0.0.1:9/v1"]) == 2
    assert "Start a server with `pageserve serve`" in capsys.readouterr().err


def test_bench_refuses_a_bad_url(capsys):
    assert pageserve(["bench", "--base-url", "localhost"]) == 2
    assert "--base-url must look like http" in capsys.readouterr().err


@pytest.mark.parametrize("flags", [("--n", "0"), ("--n", "x"), ("--rate", "nan"), ("--timeout", "-1"), ("--seed", "a")])
def test_bench_refuses_bad_numbers(flags, capsys):
    assert pageserve(["bench", *flags]) == 2
    assert flags[0] in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("{", "no JSON"),
        ("[1]", "no JSON object"),
        ('{"n": 2, "top_k": 3, "stream": false}', "the load sets n, stream itself"),
    ],
)
def test_bench_refuses_fields_that_it_cannot_send(text, error, capsys):
    assert pageserve(["bench", "--extra-body", text]) == 2
    message = capsys.readouterr().err
    assert "--extra-body" in message and error in message


def test_bench_sends_further_fields_and_names_them(stub, tmp_path, capsys):
    path = tmp_path / "bench.json"
    fields = {"temperature": 0.7, "top_k": 20}
    flags = ["--base-url", stub.base_url, "--workload", "single", "--extra-body", json.dumps(fields)]
    assert bench([*flags, "--json", str(path)]) == 0
    assert f"with {json.dumps(fields)}" in capsys.readouterr().out
    assert json.loads(path.read_text())["settings"]["extra_body"] == fields


def test_bench_names_the_nearest_flag(capsys):
    assert pageserve(["bench", "--base-ur", "http://127.0.0.1:9/v1"]) == 2
    assert "--base-url" in capsys.readouterr().err


def test_bench_finds_its_key_where_the_other_commands_do(monkeypatch, capsys):
    sent = []
    monkeypatch.setattr(
        "server.commands.bench.command.Endpoint",
        lambda base_url, api_key: sent.append(api_key) or Endpoint(base_url, api_key),
    )
    for name, value in (("PAGESERVE_API_KEY", "sk-first,sk-second"), ("OPENAI_API_KEY", "sk-openai")):
        monkeypatch.setenv(name, value)
        assert bench(["--base-url", "http://127.0.0.1:9/v1"]) == 2
    assert bench(["--base-url", "http://127.0.0.1:9/v1", "--api-key", "sk-flag"]) == 2
    assert sent == ["sk-first", "sk-openai", "sk-flag"]


def test_serve_compares_two_servers_it_starts(tmp_path, capsys):
    path = tmp_path / "ab.json"
    arguments = ["--command", STUB, "--peer-command", STUB + " 3000", "--workload", "uniform", "--n", "3"]
    arguments += ["--repeats", "2", "--log-dir", str(tmp_path), "--json", str(path)]
    assert compare(arguments) == 0
    lines = capsys.readouterr().out.splitlines()
    table = lines[lines.index(next(line for line in lines if line.startswith("workload"))) + 1 :]
    assert [line.split()[0] for line in table] == ["uniform", "peer", "ratio", "ratio:"]
    document = json.loads(path.read_text())
    assert [run["server"] for run in document["runs"]] == ["ours", "ours", "peer", "peer"]
    assert all(run["failed"] == 0 for run in document["runs"])
    assert all(0 <= run["server_cpu_s"] <= 2 * run["wall_s"] + 0.1 for run in document["runs"])
    assert document["settings"]["max_token_id"] == 1999  # the limit of the smaller vocabulary, for both
    assert document["servers"]["ours"]["ready_s"] > 0 and document["servers"]["ours"]["memory_mib"] > 1


def test_serve_takes_servers_that_run_already(stub, capsys):
    arguments = ["--url", stub.base_url, "--peer", stub.base_url, "--workload", "single", "--n", "1", "--repeats", "1"]
    assert compare(arguments) == 0
    assert "ratio" in capsys.readouterr().out


def test_serve_shows_the_log_of_a_server_that_dies(tmp_path, capsys):
    command = f"{sys.executable} -c 'raise SystemExit(\"no such model {{port}}\")'"
    assert compare(["--command", command, "--log-dir", str(tmp_path)]) == 2
    assert "no such model" in capsys.readouterr().err


def test_a_command_needs_a_place_for_the_port(tmp_path):
    with pytest.raises(ValueError, match=r"must hold \{port\}"):
        ServerProcess("true", tmp_path / "log")


def test_pause_stops_every_process_and_resume_wakes_them(tmp_path):
    # A child in a session of its own, as an engine's worker may be.
    script = "import subprocess, sys; subprocess.Popen(['sleep', '60'], start_new_session=True); sys.stdin.close(); "
    script += "import time; print('{port}', flush=True); time.sleep(60)"
    process = ServerProcess(f'{sys.executable} -c "{script}"', tmp_path / "log")
    while not (tmp_path / "log").read_text():
        time.sleep(0.02)
    leader = process.pid
    members = session_and_descendants(leader)
    assert members[0] == leader and len(members) == 2
    process.pause()
    assert [state_of(pid) for pid in members] == ["T", "T"]
    before = process.cpu_seconds()
    time.sleep(0.05)
    assert process.cpu_seconds() == before
    process.resume()
    assert wait_for(lambda: "T" not in [state_of(pid) for pid in members])
    assert process.memory_mib() > 1
    process.pause()
    process.stop()
    assert wait_for(lambda: not any(os.path.exists(f"/proc/{pid}") and state_of(pid) != "Z" for pid in members))


def test_stop_kills_a_process_that_ignores_sigterm(tmp_path):
    script = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); "
    script += "print('{port}', flush=True); time.sleep(60)"
    process = ServerProcess(f'{sys.executable} -c "{script}"', tmp_path / "log")
    while not (tmp_path / "log").read_text():
        time.sleep(0.02)
    assert process.stop(timeout=0.2) == -signal.SIGKILL


def test_bench_needs_neither_torch_nor_the_engine():
    code = "import server.commands.bench, sys; print([m for m in ('torch', 'engine', 'fastapi') if m in sys.modules])"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert out.strip() == "[]"


def test_serve_stops_its_servers_when_it_is_ended(tmp_path):
    ready = tmp_path / "ready"
    script = (
        f"import pathlib, os, time; pathlib.Path('{ready}').write_text(str(os.getpid())); time.sleep(60)  # {{port}}"
    )
    arguments = [sys.executable, "benchmarks/serve.py", "--log-dir", str(tmp_path)]
    benchmark = subprocess.Popen([*arguments, "--command", f'{sys.executable} -c "{script}"'], cwd=ROOT)
    assert wait_for(lambda: ready.exists() and ready.read_text())
    benchmark.terminate()
    assert benchmark.wait(30) == 130
    assert not os.path.exists(f"/proc/{ready.read_text()}")
