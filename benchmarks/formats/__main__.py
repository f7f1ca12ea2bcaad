"""Measures every format of quantised weights on the bundled model: make formats.

    python -m benchmarks.formats [--rows gptq,awq] [--documents 100] [--speed-model DIR] [--no-speed] [--json PATH]

Each row is a checkpoint of the bundled model, rounded to nearest in one layout: perplexity of held-out documents
(those of training/evaluate.py) and the largest error of a logit against the weights that the codes mean, both computed
in fp32; bytes of the weight files and of the weights in memory; output tokens per second alone and of 16 streams
together, in bf16, and their ratio to the plain bf16 checkpoint. Speed may be measured on another plain checkpoint of
one file (benchmarks/make_models.py): the bundled model is so small that the engine's own work hides the matrices.
"""

import argparse
import json
import sys
from dataclasses import asdict
from pathlib import Path

import torch

from benchmarks.formats.rows import ROWS
from benchmarks.formats.table import STREAMS, Figures, Speed, measure
from server.commands.bench.report import describe, machine
from training.evaluate import FOLDER

MOST_ERROR = 1e-3  # the limit of a row's logit error


def show(row: Figures) -> str:
    """One line of the table."""
    line = f"{row.format:<36}{row.perplexity:>11.4f}{row.logit_error:>11.1e}"
    line += f"{row.disk_bytes / 1e6:>10.2f}{row.memory_bytes / 1e6:>10.2f}"
    if row.alone is None:
        return line
    return f"{line}{row.alone:>9.1f}{row.alone_to_bf16:>8.2f}x{row.streams:>12.1f}{row.streams_to_bf16:>8.2f}x"


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", default="", help="rows whose names contain one of these, separated by commas")
    parser.add_argument("--documents", type=int, default=100)
    parser.add_argument("--speed-model", type=Path, default=FOLDER)
    parser.add_argument("--tokens", type=int, default=64, help="output tokens of a stream")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--no-speed", action="store_true")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args(arguments)
    names = [name for name in ROWS if any(part in name for part in options.rows.split(","))]
    speed = None if options.no_speed else Speed(options.speed_model, options.tokens, options.rounds)
    facts, rows = machine(), []
    print(describe(facts))
    print(f"{'format':<36}{'perplexity':>11}{'error':>11}{'MB disk':>10}{'MB held':>10}"
          + ("" if speed is None else f"{'tok/s':>9}{'bf16':>9}{f'{STREAMS} streams':>12}{'bf16':>9}"))  # fmt: skip
    for row in measure(names, options.documents, speed):
        rows.append(row)
        print(show(row), flush=True)
    if options.json:
        settings = {"documents": options.documents, "threads": torch.get_num_threads()}
        settings |= (
            {} if speed is None else {"speed_model": speed.model.name, "tokens": speed.tokens, "rounds": speed.rounds}
        )
        document = {"machine": facts, "settings": settings, "rows": [asdict(row) for row in rows]}
        options.json.write_text(json.dumps(document, indent=1) + "\n")
    if wrong := [row.format for row in rows if row.logit_error > MOST_ERROR]:
        sys.exit(f"logit error above {MOST_ERROR}: {', '.join(wrong)}")


if __name__ == "__main__":
    main()
