"""Measures drafts on text that an answer repeats with changes: predicted outputs of chats, and edits of files.

    python -m benchmarks.predictions [--tokenizer DIR] [--until COMMIT] [--commits 160] [--lengths 8 32]
                                     [--streams 1 8 32 64] [--rounds 10] [--only edits|served] [--json PATH]

edits: files that the newest commits of this repository changed, as tokens of `--tokenizer`. The old file is the
prediction (or the prompt, where drafts are n-grams of the text), and the answer is the new file. The real Scheduler
makes the plans, for so many answers at a time, and the model is a list of known tokens. A step of R rows takes 8 + R
units of time on `cpu`, which gets a plan after each result, and 200 + R on `gpu`, which has two plans under way.
`tokens/step` is that of one answer. `wrong`: draft tokens that were computed in vain. `time`: of the decode steps, as a
share of what they take without drafts. No figure depends on the machine, and `--until` names the newest commit.

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
from collections import deque
from dataclasses import dataclass
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
from engine.scheduling.speculation.drafts import (
    CPU_BOUNDS,
    GPU_BOUNDS,
    DraftBounds,
    Drafts,
    DraftSource,
    make_drafts,
)
from server.commands.bench.report import describe, machine

BUNDLED = Path("engine/models/bundled")
SOURCES = {"prediction": DraftSource.NONE, "n-grams": DraftSource.TEXT}


@dataclass(frozen=True)
class Device:
    bounds: DraftBounds
    depth: int  # plans under way

    def seconds(self, rows: int) -> float:
        return self.bounds.weight_rows + rows


DEVICES = {"cpu": Device(CPU_BOUNDS, 1), "gpu": Device(GPU_BOUNDS, 2)}
CHARACTERS = range(500, 12_000)  # of a file
NUM_FILES = 60
BLOCK_SIZE = 16
ANSWER_TOKENS = 400
END_TOKENS = ("0", "1", "2")  # of the bundled model: their text is skipped, so no prediction could hold them
WRONG_EACH = 40  # words

Edit = tuple[list[int], list[int]]  # tokens before and after


def main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokenizer", type=Path, default=BUNDLED, help="a folder; default: the bundled model's")
    parser.add_argument("--until", default="HEAD", help="the newest commit")
    parser.add_argument("--commits", type=_positive, default=160)
    parser.add_argument("--lengths", type=_positive, nargs="+", default=[8, 32], help="tokens of the longest draft")
    parser.add_argument("--streams", type=_positive, nargs="+", default=[1, 8, 32, 64], help="answers at a time")
    parser.add_argument("--rounds", type=_positive, default=10)
    parser.add_argument("--only", choices=["edits", "served"])
    parser.add_argument("--json", type=Path)
    options = parser.parse_args(arguments)
    facts = machine()
    print(describe(facts))
    document: dict[str, Any] = {"machine": facts}
    if options.only != "served":
        try:
            document["newest_commit"] = _git("rev-parse", "--short", "--verify", options.until + "^{commit}").strip()
            edits = edited_files(options.tokenizer, options.until, options.commits)
        except subprocess.CalledProcessError as error:
            parser.error(f"--until {options.until}: git says {error.stderr.strip()}")
        if not edits:
            parser.error("no commit of this repository changed a file: edits need a clone with its history")
        document["edits"] = show_edits(edits, options.lengths, options.streams)
    if options.only != "edits":
        document["served"] = show_served(options.rounds)
    if options.json:
        options.json.write_text(json.dumps(document, indent=1) + "\n")


def _positive(text: str) -> int:
    if not (text.isdecimal() and int(text) > 0):
        raise argparse.ArgumentTypeError(f"{text!r} is not a number above 0")
    return int(text)


def edited_files(tokenizer_dir: Path, newest: str, num_commits: int) -> list[Edit]:
    """Some files that the commit `newest` and those before it changed."""
    tokenizer = AutoTokenizer.from_pretrained(tokenizer_dir)
    edits = []
    for commit in _git("log", "--format=%h", f"--max-count={num_commits}", "--no-merges", newest).split():
        only_names = ("-r", "--no-commit-id", "--name-only", "--diff-filter=M")
        for name in _git("diff-tree", *only_names, commit, "--", "*.py", "*.md").splitlines():
            before, after = (_git("show", f"{version}:{name}") for version in (f"{commit}~1", commit))
            if len(before) in CHARACTERS and len(after) in CHARACTERS:
                edits.append((before, after))
    random.Random(0).shuffle(edits)
    return [(tokenizer.encode(before), tokenizer.encode(after)) for before, after in edits[:NUM_FILES]]


def _git(*arguments: str) -> str:
    return subprocess.run(["git", *arguments], check=True, capture_output=True, text=True).stdout


def show_edits(edits: list[Edit], lengths: list[int], streams: list[int]) -> list[dict[str, Any]]:
    num_tokens = sum(len(after) for _, after in edits)
    print(f"\nedits: {len(edits)} files, {num_tokens:,} tokens")
    print(
        f"{'device':8}{'streams':>8}  {'drafts from':12}{'longest':>8}{'tokens/step':>13}{'right':>10}{'wrong':>10}"
        f"{'time':>8}"
    )
    rows = []
    for name, device in DEVICES.items():
        for num_streams in streams:
            for source in SOURCES:
                plain = Replay(Drafts(), source, device)
                plain.run(edits, num_streams)
                for length in lengths:
                    replay = Replay(make_drafts(length, SOURCES[source], device.bounds), source, device)
                    replay.run(edits, num_streams)
                    drafts = replay.scheduler.drafts
                    row = {
                        "device": name,
                        "streams": num_streams,
                        "source": source,
                        "longest": length,
                        "tokens_per_step": num_tokens / replay.num_decodes,
                        "right": drafts.num_accepted_tokens,
                        "wrong": drafts.num_draft_tokens - drafts.num_accepted_tokens,
                        "time": replay.seconds / plain.seconds,
                    }
                    rows.append(row)
                    print(
                        f"{name:8}{num_streams:8}  {source:12}{length:8}{row['tokens_per_step']:13.2f}"
                        f"{row['right']:10,}{row['wrong']:10,}{row['time']:8.1%}",
                        flush=True,
                    )
    return rows


@dataclass
class Answer:
    """A sequence whose tokens are known. `num_tokens`: those that the device has computed."""

    seq: Sequence
    tokens: list[int]
    num_tokens: int = 0


class Replay:
    """The Scheduler with a model that answers what it is told."""

    def __init__(self, drafts: Drafts, source: str, device: Device) -> None:
        self._source, self._device = source, device
        self.scheduler = Scheduler(
            BlockManager(65_536, BLOCK_SIZE, enable_prefix_caching=False),
            max_num_seqs=256,
            max_num_batched_tokens=32_768,
            drafts=drafts,
        )
        self.num_decodes = 0  # one for each sequence of each decode step
        self.most_rows = 0  # of a decode step
        self.seconds = 0.0  # of the decode steps
        self._answers: dict[int, Answer] = {}
        self._num_added = 0

    def run(self, edits: list[Edit], num_streams: int = 1) -> None:
        """Answers `num_streams` edits at a time."""
        waiting, results = deque(edits), deque[StepResult]()
        while waiting or self.scheduler.has_work:
            while waiting and len(self._answers) < num_streams:
                self._add(*waiting.popleft())
            while len(results) < self._device.depth and (plan := self.scheduler.schedule()) is not None:
                results.append(self._compute(plan))
            self.scheduler.update(results.popleft())
            for seq_id, answer in list(self._answers.items()):
                if answer.seq.finish_reason is not None:
                    assert answer.seq.token_ids[answer.seq.num_prompt_tokens :] == answer.tokens
                    del self._answers[seq_id]

    def _add(self, before: list[int], answer: list[int]) -> None:
        predicted = self._source == "prediction"
        prompt = before[:1] if predicted else before
        number = self._num_added = self._num_added + 1
        seq = Sequence(
            number,
            list(prompt),
            SamplingParams(max_tokens=len(answer), ignore_eos=True),
            seed=0,
            max_num_tokens=len(prompt) + len(answer),
            arrival=number,
            prediction=tuple(before) if predicted else (),
        )
        self._answers[number] = Answer(seq, answer)
        self.scheduler.add(seq)

    def _compute(self, plan: StepPlan) -> StepResult:
        seconds = self._device.seconds(plan.num_tokens)
        if not plan.chunks:
            self.num_decodes += len(plan.decodes)
            self.most_rows = max(self.most_rows, plan.num_rows)
            self.seconds += seconds
        result = StepResult(plan.step_id, [], {}, seconds)
        drafts = {draft.seq_id: draft.token_ids for draft in plan.drafts}
        for seq_id in [*plan.decodes, *[step.seq_id for step in plan.chunks if step.sample]]:
            answer, draft = self._answers[seq_id], drafts.get(seq_id, [])
            coming = answer.tokens[answer.num_tokens :][: len(draft) + 1]
            num_right = next((i for i, token in enumerate(draft) if token != coming[i]), len(draft))
            answer.num_tokens += num_right + 1
            if draft:
                result.verified.append([SampledToken(seq_id, token) for token in coming[: num_right + 1]])
            else:
                result.seq_ids.append(seq_id)
                result.token_ids.append(coming[0])
        return result


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
