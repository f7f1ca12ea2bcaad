"""`python -m benchmarks.gpu_model --card H100 [--model llama-3-8b] [--batch 1,64,256] [--context 1024] [--prompt 512]`

The command models a step on a card, to lay a measured step beside: launches, bytes, FLOPs and floor of each operator,
host time, and the share of the bound that follows. No figure was measured on a card: limits are datasheet figures times
the shares in benchmarks/gpu_check/datasheets.py, and the times of launches are the assumptions below.

    bound    max(all bytes / bandwidth, all FLOPs / rate): what gpu_check's decode figures are shares of
    floor    the sum over products and attention of max(bytes / bandwidth, FLOPs / rate), one operator after the other
    device   each operator at STREAMED of its floor, and LAUNCH_MICROSECONDS for each launch (PDL_MICROSECONDS: --pdl)
    host     Python of a step; with --eager also the launches one by one. Hidden where it is shorter than the device's

--compare RESULT.json reads a result of `make gpu-check` and prints the measured steps beside the predicted ones.
"""

import argparse
import json
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks.gpu_check.bounds import Bounds
from benchmarks.gpu_check.datasheets import DATASHEETS, Datasheet
from benchmarks.gpu_check.operators import Operator, Rows, floor_seconds, step_operators
from benchmarks.gpu_check.shapes import CONFIGS, model_config
from engine.models.config import ModelConfig
from engine.models.families import model_config as parse_config

# Assumptions. A dependent kernel of a graph starts about a microsecond after its predecessor ended, and takes about
# another one until memory is streaming and at its end; programmatic dependent launch hides half of both.
LAUNCH_MICROSECONDS, PDL_MICROSECONDS = 2.0, 1.0
STREAMED = 0.90  # an operator reaches this share of its limit between its start and its end
HOST_MICROSECONDS, HOST_MICROSECONDS_PER_SEQUENCE = 250.0, 1.2  # Python of a step: plan, arrays, upload, result
EAGER_MICROSECONDS = 8.0  # host time for each launch without a graph
BATCHES, CONTEXT = (1, 16, 64, 256), 1024
MODELS = {name.lower(): name for name in CONFIGS}


@dataclass(frozen=True, slots=True)
class Assumed:
    """How a step is launched."""

    pdl: bool = False
    eager: bool = False

    @property
    def launch_seconds(self) -> float:
        return 1e-6 * (PDL_MICROSECONDS if self.pdl else LAUNCH_MICROSECONDS)


@dataclass(frozen=True, slots=True)
class Prediction:
    """One step. Seconds."""

    name: str
    operators: list[Operator]
    bound: float
    floor: float
    device: float
    host: float

    @property
    def seconds(self) -> float:
        """The host launches the next step while the device computes: the longer of the two counts."""
        return max(self.device, self.host)

    @property
    def launches(self) -> int:
        return sum(operator.launches for operator in self.operators)

    @property
    def limited_by(self) -> str:
        return "host" if self.host > self.device else "device"


def operator_seconds(operator: Operator, card: Datasheet, assumed: Assumed) -> float:
    """The predicted time of one operator in all layers."""
    limits = card.limits
    return operator.floor(limits.bandwidth, limits.rate) / STREAMED + operator.launches * assumed.launch_seconds


def predict(name: str, model: ModelConfig, step: list[Rows], card: Datasheet, assumed: Assumed) -> Prediction:
    """Predict one step of sequences that all sample a token."""
    operators, limits = list(step_operators(model, step, merges=True)), card.limits
    bound = Bounds(model, limits).step_seconds(step)
    floor = floor_seconds(operators, limits.bandwidth, limits.rate)
    device = sum(operator_seconds(operator, card, assumed) for operator in operators)
    sequences, launches = sum(rows.count for rows in step), sum(operator.launches for operator in operators)
    host = HOST_MICROSECONDS + HOST_MICROSECONDS_PER_SEQUENCE * sequences
    host += EAGER_MICROSECONDS * launches if assumed.eager else 0.0
    return Prediction(name, operators, bound, floor, device, host * 1e-6)


def steps(name: str, batches: list[int], context: int, prompt: int) -> Iterator[tuple[str, list[Rows]]]:
    """(name as in gpu_check's results, the step) for each batch. `prompt`: tokens of a prompt beside the decodes."""
    for batch in batches:
        decodes = Rows(batch, 1, context)
        if prompt:
            yield f"{name}: mixed {batch} x {context} + {prompt}", [decodes, Rows(1, prompt, prompt)]
        else:
            yield f"{name}: decode {batch} x {context}", [decodes]


def table(prediction: Prediction, card: Datasheet, assumed: Assumed) -> Iterator[str]:
    """One step: a row for each operator, then the totals."""
    limits = card.limits
    yield f"\n{prediction.name} on {card.name}"
    yield f"  {'operator':<22}{'launches':>9}{'MB':>10}{'GFLOP':>10}{'floor us':>10}{'bound by':>10}{'model us':>10}"
    for operator in prediction.operators:
        memory = operator.num_bytes / limits.bandwidth >= operator.flops / limits.rate
        floor = operator.floor(limits.bandwidth, limits.rate) * 1e6
        yield (
            f"  {operator.name:<22}{operator.launches:>9}{operator.num_bytes / 1e6:>10,.1f}"
            f"{operator.flops / 1e9:>10,.1f}{floor:>10,.0f}{'memory' if memory else 'math':>10}"
            f"{operator_seconds(operator, card, assumed) * 1e6:>10,.0f}"
        )
    moved, flops = (sum(getattr(operator, field) for operator in prediction.operators)
                    for field in ("num_bytes", "flops"))  # fmt: skip
    yield f"  {'total':<22}{prediction.launches:>9}{moved / 1e6:>10,.1f}{flops / 1e9:>10,.1f}"
    yield (
        f"  bound {prediction.bound * 1e3:.2f} ms, per-operator floor {prediction.floor * 1e3:.2f} ms, device "
        f"{prediction.device * 1e3:.2f} ms, host {prediction.host * 1e3:.2f} ms: {prediction.seconds * 1e3:.2f} ms a "
        f"step, limited by the {prediction.limited_by}: {prediction.bound / prediction.seconds:.0%} of the bound, "
        f"{prediction.floor / prediction.seconds:.0%} of the floor"
    )


def compared(predictions: list[Prediction], document: dict[str, Any]) -> Iterator[str]:
    """The measured steps of a result of gpu_check beside the predicted ones."""
    measured = {line["name"]: line for part in document["parts"].values() for line in part if line["kind"] == "figure"}
    facts = document.get("card") or {}
    yield f"\nMeasured on {facts.get('name', 'no card')}, {document.get('date', '')}"
    yield f"  {'step':<44}{'predicted ms':>14}{'measured ms':>13}{'ratio':>8}"
    for prediction in predictions:
        line = measured.get(prediction.name)
        if line is None:
            yield f"  {prediction.name:<44}{prediction.seconds * 1e3:>14.2f}{'not there':>13}"
            continue
        ratio = line["value"] / (prediction.seconds * 1e3)
        yield f"  {prediction.name:<44}{prediction.seconds * 1e3:>14.2f}{line['value']:>13.2f}{ratio:>8.2f}"
        yield from _kinds(prediction, measured)


def _kinds(prediction: Prediction, measured: dict[str, Any]) -> Iterator[str]:
    """The floors of the kinds of kernels beside their profiled times."""
    model, _, batch = prediction.name.partition(": decode ")
    for kind, label in (("gemm", "GEMM"), ("attention", "attention")):
        line = measured.get(f"{model}: {label}, decode {batch.split(' ')[0]}")
        if line is not None:
            moved = sum(operator.num_bytes for operator in prediction.operators if operator.kind == kind)
            yield f"    {label}: {line['value']:,.0f} us measured for {moved / 1e6:,.0f} MB"


def as_json(predictions: list[Prediction], card: Datasheet, assumed: Assumed) -> dict[str, Any]:
    """The numbers of the tables."""
    return {
        "card": asdict(card),
        "assumed": {"launch_us": assumed.launch_seconds * 1e6, "streamed": STREAMED, "eager": assumed.eager,
                    "bandwidth": card.limits.bandwidth, "rate": card.limits.rate},
        "steps": [asdict(one) | {"seconds": one.seconds, "share_of_bound": one.bound / one.seconds,
                                 "share_of_floor": one.floor / one.seconds, "launches": one.launches,
                                 "limited_by": one.limited_by} for one in predictions],
    }  # fmt: skip


def main(argv: list[str] | None = None) -> int:
    """Exit status 0; 2 for wrong arguments or a result that cannot be read."""
    options = option_parser().parse_args(argv)
    card, assumed = DATASHEETS[options.card], Assumed(options.pdl, options.eager)
    name = MODELS[options.model]
    model = parse_config(model_config(name, False))
    predictions = [predict(label, model, step, card, assumed)
                   for label, step in steps(name, options.batch, options.context, options.prompt)]  # fmt: skip
    print(
        f"{card.name}: {card.bandwidth / 1e9:,.0f} GB/s and {card.rate / 1e12:,.0f} TFLOP/s bf16 by its datasheet "
        f"({card.source}); assumed ceilings {card.limits.bandwidth / 1e9:,.0f} GB/s and "
        f"{card.limits.rate / 1e12:,.0f} TFLOP/s; {assumed.launch_seconds * 1e6:g} us a launch. "
        "Estimates, not measured."
    )
    for prediction in predictions:
        print("\n".join(table(prediction, card, assumed)))
    if options.compare:
        try:
            document = json.loads(options.compare.read_text(encoding="utf-8"))
            print("\n".join(compared(predictions, document)))
        except (OSError, ValueError, KeyError) as error:
            print(f"gpu_model: {options.compare} is no result of gpu-check: {error}", file=sys.stderr)
            return 2
    if options.json:
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(json.dumps(as_json(predictions, card, assumed), indent=1) + "\n", encoding="utf-8")
    return 0


def _numbers(text: str) -> list[int]:
    numbers = [int(word) for word in text.replace(",", " ").split()]
    if not numbers or min(numbers) < 1:
        raise argparse.ArgumentTypeError("whole numbers from 1 up, such as 1,64,256")
    return numbers


def option_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.gpu_model", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--card", choices=DATASHEETS, required=True, help="the card whose datasheet counts")
    parser.add_argument("--model", choices=MODELS, default="llama-3-8b", help="default %(default)s")
    parser.add_argument("--batch", type=_numbers, default=list(BATCHES), metavar="N,N", help="sequences that decode")
    parser.add_argument("--context", type=int, default=CONTEXT, help="tokens of each sequence (default %(default)s)")
    parser.add_argument("--prompt", type=int, default=0, help="tokens of a prompt in the same step (default none)")
    parser.add_argument("--pdl", action="store_true", help="assume programmatic dependent launch")
    parser.add_argument("--eager", action="store_true", help="assume launches one by one, without a CUDA graph")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the numbers here as well")
    parser.add_argument("--compare", type=Path, metavar="RESULT", help="JSON of make gpu-check: measured beside this")
    return parser


if __name__ == "__main__":
    sys.exit(main())
