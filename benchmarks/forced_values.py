"""Measures the effect of forced JSON: the share of answers, at high temperature, that end with finite valid values.

    python -m benchmarks.forced_values [--seeds 400] [--tokens 140] [--temperature 2] [--only NAME]

Forms of /v1/chat/completions (any object, a schema, the same strictly, bare numbers) and forced calls in each format of
server/tools/formats.py. An answer is read by Python's json; "infinite" counts those that hold a number that no double
does, "long" those with an integer above 10^40.
"""

import argparse
import json
import math
from collections.abc import Iterator
from typing import Any

import jsonschema

from engine.checkpoint.locate import resolve_model
from engine.config import EngineConfig
from engine.llm import LLM
from engine.sampling_params import SamplingParams
from engine.structured_output import StructuredOutput
from engine.text.tokenizer import Tokenizer
from server.protocol.tools import Tool
from server.tools.call_reader import CallReader
from server.tools.events import Arguments
from server.tools.formats import FORMATS
from server.tools.grammar import CallGrammar

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string"},
        "score": {"type": "number"},
        "count": {"type": "integer"},
        "tags": {"type": "array", "items": {"type": "string"}},
        "place": {
            "type": "object",
            "properties": {"city": {"type": "string"}, "unit": {"enum": ["celsius", "fahrenheit"]}},
            "required": ["city", "unit"],
            "additionalProperties": False,
        },
    },
    "required": ["name", "score", "count"],
    "additionalProperties": False,
}
TOOL = Tool.model_validate({"type": "function", "function": {"name": "rate", "parameters": SCHEMA}})
FORMS: dict[str, tuple[StructuredOutput, dict[str, Any]]] = {
    "json_object": (StructuredOutput.json_object(), {"type": "object"}),
    "json_schema": (StructuredOutput.json_schema(SCHEMA, lenient=True), SCHEMA),
    "strict": (StructuredOutput.json_schema(SCHEMA), SCHEMA),
    "number": (StructuredOutput.json_schema({"type": "number"}), {"type": "number"}),
    "integer": (StructuredOutput.json_schema({"type": "integer"}), {"type": "integer"}),
    "list": (StructuredOutput.json_schema({"type": "array"}), {"type": "array"}),
}
PROMPT = "Once upon a time there was a fox."


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=400)
    parser.add_argument("--tokens", type=int, default=140)
    parser.add_argument("--temperature", type=float, default=2.0)
    parser.add_argument("--only", default="")
    options = parser.parse_args()
    tokenizer = Tokenizer(resolve_model(EngineConfig()))
    print(
        f"{'form':14}{'answers':>8}{'ended':>7}{'JSON':>6}{'infinite':>10}{'long':>6}{'of the schema':>15}{'usable':>8}"
    )
    with LLM(enable_prefix_caching=False) as llm:
        for name, (output, schema) in FORMS.items():
            if options.only in name:
                texts = _texts(llm, output, options)
                _report(name, [(text, ended, [text]) for text, ended in texts], schema)
        for name, form in FORMATS.items():
            if options.only in name:
                output = CallGrammar(form, [TOOL], False, tokenizer).required()
                answers = []
                for text, ended in _texts(llm, output, options, skip_special_tokens=False):
                    text = text.partition("<|im_end|>")[0].partition("<|endoftext|>")[0]
                    reader = CallReader(form, {"rate": SCHEMA}, certain=True, only_calls=True)
                    events = [*reader.feed(text), *reader.finish(cut=not ended)]
                    parts = [event.text for event in events if isinstance(event, Arguments)]
                    answers.append((text, ended, ["".join(parts)]))
                _report(name, answers, SCHEMA)
    tokenizer.close()


def _texts(llm: LLM, output: StructuredOutput, options: argparse.Namespace, **more: Any) -> Iterator[tuple[str, bool]]:
    fixed = {"temperature": options.temperature, "max_tokens": options.tokens, "structured_output": output} | more
    params = [SamplingParams(seed=seed, **fixed) for seed in range(options.seeds)]
    for answer in llm.generate([PROMPT] * options.seeds, params):
        (sample,) = answer.outputs
        yield sample.text, str(sample.finish_reason) in ("stop", "FinishReason.STOP")


def _report(name: str, answers: list[tuple[str, bool, list[str]]], schema: dict[str, Any]) -> None:
    counts = dict.fromkeys(("ended", "json", "infinite", "long", "valid", "usable"), 0)
    validator = jsonschema.Draft202012Validator(schema)
    for _, ended, (text,) in answers:
        counts["ended"] += ended
        try:
            value = json.loads(text)
        except ValueError:
            continue
        numbers = [part for part in _scalars(value) if isinstance(part, int | float)]
        infinite = any(not math.isfinite(part) for part in numbers if isinstance(part, float))
        long = any(abs(part) > 10**40 for part in numbers if isinstance(part, int))
        valid = not infinite and validator.is_valid(value)
        counts["json"] += 1
        counts["infinite"] += infinite
        counts["long"] += long
        counts["valid"] += valid
        counts["usable"] += valid and ended and not long
    print(
        f"{name:14}{len(answers):8}{counts['ended']:7}{counts['json']:6}{counts['infinite']:10}{counts['long']:6}"
        f"{counts['valid']:15}{counts['usable']:8}",
        flush=True,
    )


def _scalars(value: Any) -> Iterator[Any]:
    stack = [value]
    while stack:
        part = stack.pop()
        if isinstance(part, list | dict):
            stack.extend(part if isinstance(part, list) else part.values())
        else:
            yield part


if __name__ == "__main__":
    main()
