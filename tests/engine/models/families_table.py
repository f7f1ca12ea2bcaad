"""`make families`: every family against its oracle in fp32, as a table. Exit status 1 if a check fails.

    python -m tests.engine.models.families_table [FAMILY ...]

Columns: lines of the family's file, cases (models of different behaviour), the largest error of a logit over all cases
and checks, and whether each check of family_checks.py passed, for every case. The oracle is transformers, or a plain
reference where transformers has no code. For encoders, hidden states take the place of logits.
"""

import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from transformers.utils import logging

from engine.models.encoder import AttentionGroup, Encoder, EncoderBatch
from engine.models.families import FAMILIES, model_config
from tests.engine.models import tiny_encoders
from tests.engine.models.family_checks import CHECKS, family_of_case, load, load_any
from tests.engine.models.tiny_models import ALL_CASES, OTHER_LAYOUTS, save_model

ENCODER_TOLERANCE = 1e-4
FOLDER = Path(__file__).parents[3] / "engine/models/families"
HEADER = f"{'family':16} {'lines':>5} {'cases':>5} {'max error':>9}  {'  '.join(f'{name:7}' for name in CHECKS)}"


def main(only: list[str]) -> int:
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    cases = cases_by_family()
    failures: list[str] = []
    print(HEADER)
    for family in FAMILIES:
        if (only and family.model_type not in only) or family.model_type in OTHER_LAYOUTS:
            continue
        names = cases.get(family.model_type, [])
        if not names:
            failures.append(f"{family.model_type}: no case in tests/engine/models")
        results = [check_case(name, failures) for name in names]
        print(row(family.model_type, lines_of(family.to_config), results), flush=True)
    print(f"{len(failures)} failures", *failures, sep="\n  ")
    return 1 if failures else 0


def cases_by_family() -> dict[str, list[str]]:
    """The names of all cases by model_type."""
    cases: dict[str, list[str]] = {}
    for name in ALL_CASES:
        cases.setdefault(family_of_case(name), []).append(name)
    for name, make in tiny_encoders.CASES.items():
        raw = {**make().to_dict(), "architectures": None}
        cases.setdefault(model_config(raw).family, []).append(name)
    return cases


def check_case(name: str, failures: list[str]) -> dict[str, float | None]:
    """The largest error of each check that the case runs; None for a check that failed."""
    with tempfile.TemporaryDirectory() as folder:
        if name in tiny_encoders.CASES:
            oracle = tiny_encoders.save_encoder(name, Path(folder))
            checks: dict[str, Callable[[Any, Any], float]] = {"logits": check_encoder}
            model: Any = load_any(Path(folder))
        else:
            oracle, model, checks = save_model(name, Path(folder)), load(Path(folder)), dict(CHECKS)
    errors: dict[str, float | None] = {}
    for check, run in checks.items():
        try:
            errors[check] = run(oracle, model)
        except (AssertionError, ArithmeticError, LookupError, RuntimeError, TypeError, ValueError) as error:
            errors[check] = None
            failures.append(f"{name}, {check}: {(str(error).strip().splitlines() or [type(error).__name__])[0]}")
    return errors


def check_encoder(oracle: Any, model: Encoder) -> float:
    """Hidden states of one sequence."""
    ids = torch.randint(4, tiny_encoders.VOCAB, (33,), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        expected = oracle(ids[None]).last_hidden_state[0]
    ours = model.forward(ids, EncoderBatch(torch.arange(33), [AttentionGroup(0, 33, 1, 33)]))
    error = (ours - expected).abs().max().item()
    assert error < ENCODER_TOLERANCE, f"hidden states differ by {error:.1e}"
    return error


def lines_of(to_config: Callable[..., Any]) -> int:
    """Lines of the family's file."""
    return len((FOLDER / f"{to_config.__module__.rpartition('.')[2]}.py").read_text().splitlines())


def row(family: str, lines: int, results: list[dict[str, float | None]]) -> str:
    errors = [error for result in results for error in result.values() if error is not None]
    words = []
    for check in CHECKS:
        outcomes = [result[check] for result in results if check in result]
        words.append("-" if not outcomes else "FAILED" if None in outcomes else "ok")
    largest = f"{max(errors):.1e}" if errors else "-"
    return f"{family:16} {lines:5} {len(results):5} {largest:>9}  {'  '.join(f'{word:7}' for word in words)}".rstrip()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
