"""The papers' claims for continuous batching and paged memory, on a CPU, in one table.

    python -m benchmarks.claims [--only users memory] [--repeats 3] [--json PATH]

Each claim runs by itself, its sides in turns, with other prompts in each round; figures are medians of the rounds. The
models are those of benchmarks/make_models.py and the bundled one. All of it takes about a quarter of an hour on two
cores.
"""

import argparse
import json
import shutil
import sys
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

from benchmarks.claims import engine_claims, server_claims
from benchmarks.claims.row import HEADING, Row
from server.commands.bench.report import describe, machine, write_json

MODELS = Path(".cache/models")
TINY, SMALL = MODELS / "llama-tiny", MODELS / "llama-90m"
LONG = 32_768


def with_positions(model: Path, positions: int) -> Path:
    """A copy of a checkpoint whose context has `positions` tokens. What it computes says nothing, its speed does."""
    folder = model.with_name(f"{model.name}-{positions}")
    if not folder.exists():
        shutil.copytree(model, folder)
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(config | {"max_position_embeddings": positions}))
    return folder


CLAIMS: dict[str, Callable[[int], list[Row]]] = {
    "transformers": lambda repeats: engine_claims.against_transformers(SMALL, repeats),
    "continuous": lambda repeats: engine_claims.against_static_batches(SMALL, repeats),
    "memory": lambda repeats: engine_claims.memory_in_use(),
    "blocks": lambda repeats: engine_claims.block_sizes(),
    "admission": engine_claims.predicted_lengths,
    "context": lambda repeats: engine_claims.long_context(with_positions(TINY, LONG + 2048), LONG),
    "users": lambda repeats: server_claims.hundred_users(TINY, repeats),
    "turns": lambda repeats: server_claims.many_turns(TINY),
    "thousand": server_claims.a_thousand,
}


def main(arguments: list[str]) -> int:
    """Exit status: 0 if every aim was reached, 1 if one was missed."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.claims", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--only", nargs="+", choices=list(CLAIMS), default=list(CLAIMS), metavar="CLAIM")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args(arguments)
    print(describe(machine()))
    print(HEADING, flush=True)
    rows: list[Row] = []
    for name in options.only:
        found = CLAIMS[name](options.repeats)
        for row in found:
            print(row.line(), flush=True)
        rows += found
    if options.json is not None:
        settings = {"only": options.only, "repeats": options.repeats}
        write_json(options.json, settings, {}, [asdict(row) | {"ratio": row.ratio, "held": row.held} for row in rows])
    return 1 if any(row.held is False for row in rows) else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
