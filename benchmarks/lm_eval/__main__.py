"""The same scores by lm-eval from a live server (`local-completions`) and from transformers (`hf`), sample by sample.

    python -m benchmarks.lm_eval --lm-eval BIN [--model DIR] [--dtype float32] [--json FILE]

BIN is the command of lm-eval in an environment of its own (`make lm-eval` makes it). Two tasks, which need no network:
stories by the grammar that wrote the bundled model's training texts, as multiple choice and as whole texts, some of
them not simple ASCII and one longer than the context. Exit status 1 where a score that lm-eval reports of a task
differs by more than 1e-3, or a loglikelihood of a sample (or by more than a millionth of it, since hf sums whole texts
in fp32, which holds no more of a sum of some thousands), or where one side takes for greedy what the other does not.
"""

import argparse
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import httpx

from benchmarks.processes import ServerProcess
from engine.checkpoint.locate import BUNDLED_MODEL
from training.stories import tell

TASKS = ("stories_choice", "stories_text")
SIDES = ("local-completions", "hf")
TOLERANCE, RELATIVE_TOLERANCE = 1e-3, 1e-6
# local-completions keeps a token for the one that it has generated, and one more of a whole text: hf is told the same,
# so that both cut a long text into the same windows.
CONTEXT, WINDOW = 2048, 2046
START_SECONDS = 120.0
ODD = (
    "The fox said: “Où est la forêt ?” 🦊 and laughed.",
    "漢字は、とても、むずかしい。",
    "Tabs\tand\n\nlines — and é.",
)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.lm_eval", description=__doc__.split("\n")[0])
    parser.add_argument("--lm-eval", required=True, type=Path, metavar="BIN", help="the lm_eval command")
    parser.add_argument(
        "--model", type=Path, default=BUNDLED_MODEL, help="a checkpoint folder; default: the bundled one"
    )
    parser.add_argument("--samples", type=int, default=24, help="of each task")
    parser.add_argument("--json", type=Path, help="write every score here")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="pageserve-lm-eval-") as name:
        folder = Path(name)
        shutil.copytree(Path(__file__).parent / "tasks", folder / "tasks")
        write_data(folder, options.samples)
        server = serve(options.model, folder)
        try:
            seconds = evaluate(options.lm_eval.absolute(), folder, "local-completions", ours_arguments(server, options))
        finally:
            server.stop()
        their_seconds = evaluate(options.lm_eval.absolute(), folder, "hf", their_arguments(options))
        ours, theirs = ({task: read_samples(folder / name, task) for task in TASKS} for name in SIDES)
        reported = [read_reported(folder / name) for name in SIDES]
    if options.json is not None:
        options.json.write_text(json.dumps({"pageserve": ours, "transformers": theirs}, indent=1) + "\n")
    print(f"lm-eval took {seconds:.1f} s with local-completions, {their_seconds:.1f} s with hf")
    return max(report(ours, theirs), report_tasks(*reported))


def write_data(folder: Path, num_samples: int) -> None:
    """Stories from a fixed seed: begun, with four sentences to go on with, one of them its own; and whole ones."""
    rng = random.Random(2026)
    stories = [tell(rng).replace("\n\n", "\n") for _ in range(4 * num_samples)]
    choices = []
    for i in range(num_samples):
        sentences = [story.split(". ") for story in stories[4 * i : 4 * i + 4]]
        middle = min(map(len, sentences)) // 2
        order = rng.sample(range(4), 4)
        begun = ". ".join(sentences[0][:middle]) + "."
        found = [sentences[j][middle].rstrip(".") + "." for j in order]
        choices.append({"context": begun, "choices": found, "answer": order.index(0)})
    choices += [{"context": text, "choices": [*ODD], "answer": i} for i, text in enumerate(ODD)]
    texts = [{"text": text} for text in (*stories[:num_samples], *ODD, "\n".join(stories[:12]))]
    for task, lines in zip(TASKS, (choices, texts), strict=True):
        (folder / f"{task}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


def serve(model: Path, folder: Path) -> ServerProcess:
    command = f"{sys.executable} -m server.cli serve --model {model} --dtype float32 --port {{port}}"
    server = ServerProcess(command, folder / "server.log")
    deadline = time.monotonic() + START_SECONDS
    while time.monotonic() < deadline:
        server.check_alive()
        try:
            if httpx.get(server.base_url.replace("/v1", "/ready")).status_code == 200:
                return server
        except httpx.TransportError:  # the port is not bound yet
            pass
        time.sleep(0.1)
    server.stop()
    raise SystemExit(f"the server was not ready within {START_SECONDS:.0f} s")


def ours_arguments(server: ServerProcess, options: argparse.Namespace) -> dict[str, Any]:
    name = httpx.get(f"{server.base_url}/models").json()["data"][0]["id"]
    return {
        "model": name,
        "base_url": f"{server.base_url}/completions",
        "tokenizer": options.model,
        "tokenizer_backend": "huggingface",
        "num_concurrent": 4,
        "max_length": CONTEXT,
    }


def their_arguments(options: argparse.Namespace) -> dict[str, Any]:
    return {"pretrained": options.model, "dtype": "float32", "max_length": WINDOW}


def evaluate(lm_eval: Path, folder: Path, model: str, arguments: dict[str, Any]) -> float:
    """Let lm-eval write its results below folder / model; the seconds that it took."""
    output = folder / model
    command = [str(lm_eval), "run", "--model", model, "--tasks", ",".join(TASKS), "--include_path", "tasks"]
    command += ["--model_args", ",".join(f"{name}={value}" for name, value in arguments.items())]
    command += ["--batch_size", "8", "--device", "cpu", "--output_path", str(output), "--log_samples"]
    started = time.monotonic()
    offline = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "HF_HOME": str(folder / "cache")}
    log = folder / f"{model}.log"
    with log.open("wb") as file:
        status = subprocess.run(command, cwd=folder, stdout=file, stderr=file, env={**os.environ, **offline}).returncode
    if status:
        raise SystemExit(f"lm-eval with {model} ended with status {status}:\n{log.read_text(errors='replace')[-4000:]}")
    return time.monotonic() - started


def read_reported(output: Path) -> dict[tuple[str, str], float]:
    """The report of lm-eval: (task, metric) -> score over all samples."""
    (path,) = output.rglob("results_*.json")
    results = json.loads(path.read_text(encoding="utf-8"))["results"]
    return {
        (task, key.removesuffix(",none")): value
        for task in TASKS
        for key, value in results[task].items()
        if isinstance(value, float) and "stderr" not in key
    }


def read_samples(output: Path, task: str) -> list[dict[str, Any]]:
    """Each with `scores`, a list of (loglikelihood, greedy or None)."""
    (path,) = output.rglob(f"samples_{task}_*.jsonl")
    samples = sorted(
        map(json.loads, path.read_text(encoding="utf-8").splitlines()), key=lambda sample: sample["doc_id"]
    )
    return [
        {"doc_id": sample["doc_id"], "scores": [score_of(each[0]) for each in sample["resps"]]} for sample in samples
    ]


def score_of(response: Any) -> tuple[float, bool | None]:
    """(loglikelihood, is greedy); a whole text has the first alone."""
    if isinstance(response, list):
        return float(response[0]), str(response[1]) == "True"
    return float(response), None


def report(ours: dict[str, list[dict[str, Any]]], theirs: dict[str, list[dict[str, Any]]]) -> int:
    """Print a line per task; 1 where they differ."""
    print(f"{'task':16} {'scores':>7} {'mean':>12} {'largest difference':>20} {'relative':>10} {'greedy':>12}")
    wrong = 0
    for task in TASKS:
        pairs = [
            (a, b)
            for mine, other in zip(ours[task], theirs[task], strict=True)
            for a, b in zip(mine["scores"], other["scores"], strict=True)
        ]
        differences = [abs(a[0] - b[0]) for a, b in pairs]
        relative = max(difference / abs(b[0]) for difference, (_, b) in zip(differences, pairs, strict=True))
        allowed = [max(TOLERANCE, RELATIVE_TOLERANCE * abs(b[0])) for _, b in pairs]
        greedy = sum(a[1] == b[1] for a, b in pairs)
        mean = sum(a[0] for a, _ in pairs) / len(pairs)
        largest = f"{max(differences):20.2e} {relative:10.1e}"
        print(f"{task:16} {len(pairs):7} {mean:12.4f} {largest} {greedy:5} of {len(pairs)}")
        wrong += sum(not a <= b for a, b in zip(differences, allowed, strict=True)) + len(pairs) - greedy
    limit = f"{TOLERANCE:g}, or {RELATIVE_TOLERANCE:g} of them"
    print(f"{wrong} scores differ by more than {limit}" if wrong else f"all scores are equal to {limit}")
    return 1 if wrong else 0


def report_tasks(ours: dict[tuple[str, str], float], theirs: dict[tuple[str, str], float]) -> int:
    """Print what lm-eval reports of each task, from both sides; 1 where they differ."""
    for (task, metric), score in ours.items():
        print(f"{task:16} {metric:20} {score:14.6f} pageserve {theirs[task, metric]:14.6f} transformers")
    wrong = sum(not abs(score - theirs[key]) <= TOLERANCE for key, score in ours.items())
    print(f"{wrong} reported scores differ by more than {TOLERANCE:g}" if wrong else f"all equal to {TOLERANCE:g}")
    return 1 if wrong or not ours else 0


if __name__ == "__main__":
    sys.exit(main())
