"""pageserve beside vLLM's CPU build and llama.cpp on this machine, in one run: make bench.

    python -m benchmarks.peers [--only vllm llama.cpp] [--models llama-90m] [--workloads uniform single]
                               [--repeats 3] [--json PATH] [--plot PATH]

vLLM runs as a server, under the workloads of `pageserve bench` (server/commands/bench/workloads.py). The two servers of
a model take turns, and the one that waits is stopped with SIGSTOP. llama.cpp runs as a library, in a process of its
own, on the same weights as a bf16 GGUF file: llama-cpp-python's server computes one request at a time and takes no
token ids, while the library decodes many sequences in one batch. Each repeat has other prompts, so that no prefix cache
answers. Figures are medians of the repeats.

`make bench` installs the peers into environments of their own, below .cache/bench, and makes the models.
Each row has an aim; the last column says whether it was reached.
"""

import argparse
import contextlib
import json
import operator
import shlex
import sys
import tempfile
from dataclasses import asdict, dataclass
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from benchmarks import quantized, serve
from engine.models.families import read_model_config
from server.commands.bench.figures import Figures, medians
from server.commands.bench.report import describe, machine, write_json

MODELS = Path(".cache/models")
ENVIRONMENTS = Path(".cache/bench")
VLLM, LLAMA_CPP = "vllm", "llama.cpp"
VLLM_SETTINGS = "VLLM_CPU_KVCACHE_SPACE=2 VLLM_NO_USAGE_STATS=1 DO_NOT_TRACK=1 HF_HUB_OFFLINE=1"
MAX_MODEL_LEN = 2048


@dataclass(frozen=True)
class Aim:
    """A figure of ours divided by the peer's. `at_most`: it is a time, so the ratio should be small."""

    peer: str
    model: str
    workload: str
    figure: str
    ratio: float
    at_most: bool = False
    n: int = 64  # requests of a server's workload

    def held(self, ratio: float) -> bool:
        """True if `ratio` reaches the aim."""
        return (operator.le if self.at_most else operator.ge)(ratio, self.ratio)

    def advantage(self, ratio: float) -> float:
        """How many times better we are."""
        return 1 / ratio if self.at_most else ratio


AIMS = (
    Aim(VLLM, "llama-90m", "uniform", "out_tok_s", 1.5),
    Aim(VLLM, "llama-90m", "parallel", "out_tok_s", 2.5),
    Aim(VLLM, "llama-90m", "chatbot", "out_tok_s", 2.2),
    Aim(VLLM, "llama-90m", "mixed", "e2e_p50", 0.55, at_most=True),
    Aim(VLLM, "llama-90m", "single", "tpot_p50", 0.4, at_most=True),
    Aim(VLLM, "llama-tiny", "uniform", "out_tok_s", 2.0),
    Aim(VLLM, "llama-tiny", "uniform", "out_tok_s", 2.0, n=128),
    Aim(VLLM, "llama-500m", "uniform", "out_tok_s", 1.3),
    Aim(LLAMA_CPP, "llama-90m", "single", "decode", 1.0),
    Aim(LLAMA_CPP, "llama-90m", "prompt of 1000", "prefill", 1.0),
    Aim(LLAMA_CPP, "llama-90m", "16 streams", "streams", 2.0),
)


@dataclass(frozen=True)
class Row:
    """A measured aim: medians of the repeats."""

    aim: Aim
    ours: float
    peer: float

    @property
    def ratio(self) -> float:
        return self.ours / self.peer


def main(arguments: list[str]) -> int:
    """Exit status: 0 if all was measured, whatever the figures; 1 if a request failed; 2 if a server did not start."""
    options = _parser().parse_args(arguments)
    aims = [aim for aim in AIMS if aim.peer in options.only and aim.model in options.models]
    aims = [aim for aim in aims if not options.workloads or aim.workload in options.workloads]
    if not aims:
        print("benchmarks.peers: --only, --models and --workloads leave nothing to measure", file=sys.stderr)
        return 2
    if options.plot is not None and find_spec("matplotlib") is None:  # fail before the run, not after it
        print("benchmarks.peers: --plot needs matplotlib: pip install '.[bench]' here", file=sys.stderr)
        return 2
    rows, runs, status = [], [], 0
    for model, n in dict.fromkeys((aim.model, aim.n) for aim in aims if aim.peer == VLLM):
        found, document, failed = measure_vllm([aim for aim in aims if (aim.model, aim.n) == (model, n)], options)
        status = max(status, failed)
        rows += found
        runs += document
    for model in dict.fromkeys(aim.model for aim in aims if aim.peer == LLAMA_CPP):
        found, figures = measure_llama_cpp(model, [aim for aim in aims if aim.model == model], options)
        rows += found
        runs.append({"peer": LLAMA_CPP, "model": model, "figures": figures})
    print_table(rows)
    if options.json is not None:
        settings = {key: str(value) for key, value in vars(options).items() if key not in ("json", "plot")}
        write_json(options.json, settings, {"rows": [_as_dict(row) for row in rows]}, runs)
    if options.plot is not None:
        draw(rows, options.plot)
    return status


def measure_vllm(aims: list[Aim], options: argparse.Namespace) -> tuple[list[Row], list[dict[str, Any]], int]:
    """(rows, every run, exit status) of the aims of one model and one number of requests."""
    aims = [aim for aim in aims if aim.peer == VLLM]
    model, workloads = MODELS / aims[0].model, [aim.workload for aim in aims]
    common = f"--host 127.0.0.1 --port {{port}} --max-model-len {MAX_MODEL_LEN} --dtype bfloat16"
    vllm = ENVIRONMENTS / "vllm" / "bin" / "vllm"
    threads = f"VLLM_CPU_OMP_THREADS_BIND=0-{torch.get_num_threads() - 1}"
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "runs.json"
        status = serve.main(
            [
                *("--command", f"{shlex.quote(sys.executable)} -m server.cli serve --model {model} {common}"),
                *("--peer-command", f"env {VLLM_SETTINGS} {threads} {vllm} serve {model} {common}"),
                *("--workload", ",".join(workloads), "--n", str(aims[0].n), "--repeats", str(options.repeats)),
                *("--json", str(path)),
            ]
        )
        runs = json.loads(path.read_text())["runs"] if path.exists() else []
    rows = []
    for aim in aims if runs else ():
        ours, peer = (_median(runs, name, aim) for name in ("ours", "peer"))
        rows.append(Row(aim, ours, peer))
    return rows, [{"model": aims[0].model, "n": aims[0].n, **run} for run in runs], status


def measure_llama_cpp(model: str, aims: list[Aim], options: argparse.Namespace) -> tuple[list[Row], dict[str, Any]]:
    """(rows, all figures) of the aims of one model."""
    aims = [aim for aim in aims if aim.peer == LLAMA_CPP]
    folder, threads = MODELS / model, torch.get_num_threads()
    file = quantized.gguf_file(folder, "BF16")
    settings = argparse.Namespace(prompt=1000, tokens=128, streams=16, repeats=options.repeats)
    with contextlib.ExitStack() as stack:
        peer = quantized.Peer(ENVIRONMENTS / "llama" / "bin" / "python", threads, [file])
        stack.callback(peer.close)
        engine = stack.enter_context(quantized.open_engine(file, None))
        runs = {"ours": partial(quantized.run_engine, engine), "peer": partial(peer.run, file)}
        figures = quantized.measure(runs, read_model_config(folder).vocab_size, settings)
    rows = [Row(aim, *(figures[name][f"{aim.figure}_tokens_per_s"] for name in ("ours", "peer"))) for aim in aims]
    return rows, figures


def _median(runs: list[dict[str, Any]], server: str, aim: Aim) -> float:
    own = [run for run in runs if run["server"] == server and run["workload"] == aim.workload]
    names = Figures.__dataclass_fields__
    value = medians([Figures(**{name: run[name] for name in names}) for run in own])[aim.figure]
    if value is None:
        raise RuntimeError(f"{aim.model}, {aim.workload}: the {server} server answered no request")
    return value


def print_table(rows: list[Row]) -> None:
    """Figures, ratios and aims."""
    print(describe(machine()))
    print(f"{'peer':10} {'model':11} {'workload':15} {'figure':10} {'ours':>9} {'peer':>9} {'ratio':>6}  aim")
    for row in rows:
        aim = row.aim
        workload = f"{aim.workload}, {aim.n}" if aim.n != Aim.n else aim.workload
        sign, held = "<=" if aim.at_most else ">=", "reached" if aim.held(row.ratio) else "missed"
        figures = f"{row.ours:9.1f} {row.peer:9.1f} {row.ratio:6.2f}"
        print(f"{aim.peer:10} {aim.model:11} {workload:15} {aim.figure:10} {figures}  {sign} {aim.ratio} {held}")


def draw(rows: list[Row], path: Path) -> None:
    """A bar per row: how many times better we are, with a line at the aim. Needs matplotlib (the extra `bench`)."""
    from matplotlib.figure import Figure as Drawing

    path.parent.mkdir(parents=True, exist_ok=True)
    figure = Drawing(figsize=(9, 0.9 + 0.4 * len(rows)), layout="constrained")
    axes = figure.subplots()
    places = range(len(rows))
    better = [row.aim.advantage(row.ratio) for row in rows]
    axes.barh(places, better, color="#2b6cb0", height=0.6)
    for place, row in zip(places, rows, strict=True):
        aim = row.aim.advantage(row.aim.ratio)
        axes.plot([aim, aim], [place - 0.4, place + 0.4], color="#dd6b20", linewidth=2, label=None if place else "aim")
    axes.axvline(1.0, color="#a0aec0", linewidth=0.8)
    axes.set_yticks(places, [f"{row.aim.peer}: {row.aim.model} {row.aim.workload} ({row.aim.n})" for row in rows])
    axes.invert_yaxis()
    axes.set(xlabel="times better than the peer")
    axes.set_title(describe(machine()), fontsize=9, loc="left")
    axes.legend(loc="lower right", bbox_to_anchor=(1, 1), fontsize=8, frameon=False)  # above the bars
    figure.savefig(path, dpi=100)


def _as_dict(row: Row) -> dict[str, Any]:
    held = row.aim.held(row.ratio)
    return {**asdict(row.aim), "ours": row.ours, "peer_value": row.peer, "measured": row.ratio, "held": held}


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.peers", description=(__doc__ or "").split("\n")[0])
    models, workloads = (list(dict.fromkeys(getattr(aim, name) for aim in AIMS)) for name in ("model", "workload"))
    parser.add_argument("--only", nargs="+", choices=(VLLM, LLAMA_CPP), default=[VLLM, LLAMA_CPP], metavar="PEER")
    parser.add_argument("--models", nargs="+", choices=models, default=models, metavar="MODEL")
    parser.add_argument("--workloads", nargs="+", choices=workloads, metavar="WORKLOAD")
    parser.add_argument("--repeats", type=int, default=3, help="runs of each workload on each side")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--plot", type=Path, help="draw the ratios (PNG)")
    return parser


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
