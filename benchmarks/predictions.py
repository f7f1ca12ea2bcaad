"""Measures drafts on text that an answer repeats with changes: predicted outputs of chats, and edits of files.

    python -m benchmarks.predictions [--tokenizer DIR] [--commits 160] [--lengths 8,16,32] [--rounds 10]
                                     [--only edits|served] [--json PATH]

edits: files that the newest commits of this repository changed, as tokens of `--tokenizer`. The old file is the
prediction (or the prompt, where drafts are n-grams of the text), and the answer is the new file. The real Scheduler
makes the plans, for one sequence at a time, and the model is a list of known tokens: a step of R rows takes 8 + R units
of time. `wrong`: draft tokens that were computed in vain. `time`: of the decode steps, as a share of what they take
without drafts. No figure depends on the machine.

served: a server of the bundled model answers the same chats without a prediction, with its own answer as prediction,
and with that answer with one word in 40 replaced. `speed-up` is the median over the rounds of the ratio of durations.
"""

import argparse
import json
import random
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import httpx
from transformers import AutoTokenizer

from benchmarks.processes import ServerProcess
from benchmarks.token_cost import wait_ready
from engine.executor.step import SampledToken, StepPlan, StepResult
from engine.memory.block_manager import BlockManager
from engine.memory.sequence import Sequence
from engine.sampling_params import SamplingParams
from engine.scheduling.scheduler import Scheduler
from engine.scheduling.speculation.drafts import DraftSource
from engine.scheduling.speculation.step_costs import PRIOR_ROWS
from server.commands.bench.report import describe, machine

BUNDLED = Path("engine/models/bundled")
SOURCES = {"prediction": DraftSource.NONE, "n-grams": DraftSource.TEXT}
CHARACTERS = range(500, 12_000)  # of a file
NUM_FILES = 60
BLOCK_SIZE = 16
ANSWER_TOKENS = 400
END_TOKENS = ("0", "1", "2")  # of the bundled model: their text is skipped, so no prediction could hold them
WRONG_EACH = 40  # words


def main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokenizer", type=Path, default=BUNDLED, help="a folder; default: the bundled model's")
    parser.add_argument("--commits", type=int, default=160)
    parser.add_argument("--lengths", default="8,16,32", help="tokens of the longest draft, for edits")
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--only", choices=["edits", "served"])
    parser.add_argument("--json", type=Path)
    options = parser.parse_args(arguments)
    facts = machine()
    print(describe(facts))
    document: dict[str, Any] = {"machine": facts}
    if options.only != "served":
        edits = edited_files(options.tokenizer, options.commits)
        if not edits:
            parser.error("no commit of this repository changed a file: edits need a clone with its history")
        document["newest_commit"] = newest_commit()
        document["edits"] = show_edits(edits, [int(length) for length in options.lengths.split(",")])
    if options.only != "edits":
        document["served"] = show_served(options.rounds)
    if options.json:
        options.json.write_text(json.dumps(document, indent=1) + "\n")


def edited_files(tokenizer_dir: Path, num_commits: int) -> list[tuple[list[int], list[int]]]:
    """(tokens before, tokens after) of some files that the newest commits changed."""
    tokenizer = AutoTokenizer.from_pretrained(tokenizer_dir)
    edits = []
    for commit in _git("log", "--format=%h", f"--max-count={num_commits}", "--no-merges").split():
        only_names = ("-r", "--no-commit-id", "--name-only", "--diff-filter=M")
        for name in _git("diff-tree", *only_names, commit, "--", "*.py", "*.md").splitlines():
            before, after = (_git("show", f"{version}:{name}") for version in (f"{commit}~1", commit))
            if len(before) in CHARACTERS and len(after) in CHARACTERS:
                edits.append((before, after))
    random.Random(0).shuffle(edits)
    return [(tokenizer.encode(before), tokenizer.encode(after)) for before, after in edits[:NUM_FILES]]


def newest_commit() -> str:
    return _git("rev-parse", "--short", "HEAD").strip()


def _git(*arguments: str) -> str:
    return subprocess.run(["git", *arguments], check=True, capture_output=True, text=True).stdout


def show_edits(edits: list[tuple[list[int], list[int]]], lengths: list[int]) -> list[dict[str, Any]]:
    num_tokens = sum(len(after) for _, after in edits)
    print(f"\nedits: {len(edits)} files before commit {newest_commit()}, {num_tokens:,} tokens")
    print(f"{'drafts from':14}{'longest':>8}{'tokens/step':>13}{'right':>10}{'wrong':>10}{'time':>8}")
    rows = []
    for source in SOURCES:
        for length in lengths:
            replay = Replay(SOURCES[source], length)
            for before, after in edits:
                replay.run(before, after)
            drafts = replay.scheduler.drafts
            row = {
                "source": source,
                "longest": length,
                "tokens_per_step": num_tokens / replay.num_steps,
                "right": drafts.num_accepted_tokens,
                "wrong": drafts.num_draft_tokens - drafts.num_accepted_tokens,
                "time": replay.seconds / (num_tokens * (PRIOR_ROWS + 1.0)),  # of the time without drafts
            }
            rows.append(row)
            print(
                f"{source:14}{length:8}{row['tokens_per_step']:13.2f}{row['right']:10,}{row['wrong']:10,}"
                f"{row['time']:8.1%}"
            )
    return rows


class Replay:
    """The Scheduler with a model that answers what it is told."""

    def __init__(self, source: DraftSource, longest: int) -> None:
        self._source = source
        self.scheduler = Scheduler(
            BlockManager(4096, BLOCK_SIZE, enable_prefix_caching=False),
            max_num_seqs=128,
            max_num_batched_tokens=32_768,
            max_draft_tokens=longest,
            draft_source=source,
        )
        self.num_steps = 0
        self.seconds = 0.0
        self._num_sequences = 0

    def run(self, before: list[int], answer: list[int]) -> None:
        """Answers a prompt with `answer`; `before` is the prompt or the prediction."""
        predicted = self._source is DraftSource.NONE
        prompt = before[:1] if predicted else before
        params = SamplingParams(max_tokens=len(answer), ignore_eos=True)
        limit = len(prompt) + len(answer)
        seq = Sequence(self._num_sequences, list(prompt), params, seed=0, max_num_tokens=limit)
        seq.prediction = tuple(before) if predicted else ()
        self._num_sequences += 1
        self.scheduler.add(seq)
        while self.scheduler.has_work:
            plan = self.scheduler.schedule()
            assert plan is not None, "work is left but nothing can be planned"
            self._step(plan, answer[seq.num_generated_tokens :])
        assert seq.token_ids == prompt + answer

    def _step(self, plan: StepPlan, coming: list[int]) -> None:
        seconds = PRIOR_ROWS + plan.num_rows
        if not plan.chunks:
            self.num_steps += 1
            self.seconds += seconds
        result = StepResult(plan.step_id, [], {}, seconds)
        for seq_id in plan.seq_ids:
            draft = plan.drafts[0].token_ids if plan.drafts else []
            num_right = next((i for i, token in enumerate(draft) if token != coming[i]), len(draft))
            if draft:
                result.verified.append([SampledToken(seq_id, token) for token in coming[: num_right + 1]])
            else:
                result.seq_ids.append(seq_id)
                result.token_ids.append(coming[0])
        self.scheduler.update(result)


def show_served(rounds: int) -> dict[str, list[dict[str, float]]]:
    rows: dict[str, list[dict[str, float]]] = {"none": [], "the answer": [], f"one word in {WRONG_EACH} wrong": []}
    with tempfile.TemporaryDirectory() as folder:
        command = f"{sys.executable} -m server.cli serve --port {{port}} --no-enable-prefix-caching"
        server = ServerProcess(command, Path(folder) / "log")
        try:
            wait_ready(server)
            with httpx.Client(base_url=server.base_url, timeout=120) as client:
                for number in range(rounds + 1):
                    answers = ask_in_turns(client, number)
                    if number:  # the first round warms up
                        for runs, answer in zip(rows.values(), answers, strict=True):
                            runs.append(answer)
        finally:
            server.stop()
    print(f"\nserved: {rounds} answers of {ANSWER_TOKENS} tokens, medians")
    print(f"{'prediction':24}{'ms':>8}{'speed-up':>10}{'steps':>8}{'right':>8}{'wrong':>8}")
    for name, runs in rows.items():
        ratios = [plain["seconds"] / run["seconds"] for plain, run in zip(rows["none"], runs, strict=True)]
        medians = {key: statistics.median(run[key] for run in runs) for key in runs[0]}
        print(
            f"{name:24}{medians['seconds'] * 1e3:8.0f}{statistics.median(ratios):10.2f}{medians['steps']:8.0f}"
            f"{medians['right']:8.0f}{medians['wrong']:8.0f}"
        )
    return rows


def ask_in_turns(client: httpx.Client, number: int) -> list[dict[str, float]]:
    """The answers without a prediction, with a right one, and with one that has wrong words; of one chat."""
    plain, text = ask(client, number, None)
    words = text.split(" ")
    for i in range(WRONG_EACH // 2, len(words), WRONG_EACH):
        words[i] = "wrong"
    found = [plain]
    for prediction in (text, " ".join(words)):
        run, same = ask(client, number, prediction)
        if same != text:
            raise RuntimeError(f"chat {number}: a prediction changed the answer")
        found.append(run)
    return found


def ask(client: httpx.Client, number: int, prediction: str | None) -> tuple[dict[str, float], str]:
    body: dict[str, Any] = {
        "model": "pageserve",
        "messages": [{"role": "user", "content": f"Tell me of a fox and clock {number}."}],
        "temperature": 0.9,
        "seed": number,
        "max_tokens": ANSWER_TOKENS,
        "ignore_eos": True,
        "logit_bias": dict.fromkeys(END_TOKENS, -100),
        "return_timings": True,
    }
    if prediction is not None:
        body["prediction"] = {"type": "content", "content": prediction}
    started = time.perf_counter()
    answer = client.post("/chat/completions", json=body).raise_for_status().json()
    seconds = time.perf_counter() - started
    details = answer["usage"]["completion_tokens_details"]
    run = {
        "seconds": seconds,
        "steps": answer["timings"][0]["steps"],
        "right": details.get("accepted_prediction_tokens", 0),
        "wrong": details.get("rejected_prediction_tokens", 0),
    }
    return run, answer["choices"][0]["message"]["content"]


if __name__ == "__main__":
    main(sys.argv[1:])
