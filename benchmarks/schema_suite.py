"""JSONSchemaTestSuite through structured outputs: which schemas are accepted, and are they obeyed?

    python -m benchmarks.schema_suite SUITE [--walks 8] [--json PATH]

SUITE is the suite's folder tests/draft2020-12, or an archive that holds one (the sources of the package `jsonschema`).
Each schema goes through the process that checks schemas for the server, with its limits. One that is accepted is
compiled; random tokens that its masks allow are drawn to the end of the text, which the package `jsonschema` then
judges; and every instance of the suite is offered: one that is not valid must be refused by the masks. No model is
needed, since no model gets past the masks. Valid instances that the masks refuse are counted, too: the order of
properties is fixed to that of the schema.

Schemas that are not valid are made by putting a value of the wrong type at each keyword of the suite's schemas; those
that the draft's own schema then rejects must be refused.
"""

import argparse
import asyncio
import copy
import json
import random
import tarfile
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np

from engine.checkpoint.locate import read_eos_token_ids, resolve_model
from engine.config import EngineConfig
from engine.errors import InvalidRequestError
from engine.grammars.checker import TOO_COSTLY, GrammarChecker
from engine.grammars.compiler import Compiler, GrammarError, fill_mask
from engine.structured_output import StructuredOutput, Vocabulary
from engine.text.tokenizer import Tokenizer
from server.commands.bench.report import describe, machine

DRAFT = "/tests/draft2020-12/"
VALIDATOR = jsonschema.Draft202012Validator
MAX_TOKENS, CALM_AFTER = 400, 60  # tokens of a walk, and after how many of them it heads for the end
CLOSING = ('"', "]", "}", "0")
EOS_SHARE = 0.3
WRONG_VALUES: tuple[Any, ...] = ({"a": 1}, [3, 3], "wrong", -1.5, None)

Schema = dict[str, Any] | bool


@dataclass
class Tally:
    """Schemas, and instances or walks of those that were accepted."""

    valid: int = 0
    accepted: int = 0
    obeyed: int = 0  # schemas that let no invalid text through: no walk, no instance of the suite
    invalid: int = 0
    invalid_refused: int = 0
    hung: int = 0
    walks: int = 0
    unfinished_walks: int = 0
    wrong_walks: int = 0
    valid_instances: int = 0
    valid_instances_allowed: int = 0
    invalid_instances: int = 0
    invalid_instances_allowed: int = 0
    refusals: Counter[str] = field(default_factory=Counter)
    disobeyed: list[str] = field(default_factory=list)
    slowest_seconds: float = 0.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("suite", type=Path)
    parser.add_argument("--walks", type=int, default=8)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    folder = resolve_model(EngineConfig())
    tokenizer = Tokenizer(folder)
    vocabulary = Vocabulary(tokenizer.to_json(), tokenizer.vocab_size, read_eos_token_ids(folder))
    groups = list(read_suite(options.suite))
    tally = asyncio.run(run(vocabulary, groups, options.walks))
    tokenizer.close()
    facts = machine()
    print(describe(facts))
    report(tally)
    if options.json:
        document = {"machine": facts, "walks": options.walks, "result": vars(tally)}
        options.json.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")


def read_suite(path: Path) -> Iterator[tuple[str, Schema, list[dict[str, Any]]]]:
    """(name, schema, its tests) of every group of the draft's required tests."""
    for file, text in sorted(_files(path)):
        for group in json.loads(text):
            yield f"{file}: {group['description']}", group["schema"], group["tests"]


def _files(path: Path) -> Iterator[tuple[str, str]]:
    if path.is_dir():
        for file in path.glob("*.json"):
            yield file.stem, file.read_text(encoding="utf-8")
        return
    with tarfile.open(path) as archive:
        for member in archive:
            folder, _, name = member.name.rpartition("/")
            if (folder + "/").endswith(DRAFT) and name.endswith(".json"):
                content = archive.extractfile(member)
                assert content is not None
                yield name.removesuffix(".json"), content.read().decode()


async def run(vocabulary: Vocabulary, groups: list[tuple[str, Schema, list[dict[str, Any]]]], walks: int) -> Tally:
    async def get_vocabulary() -> Vocabulary:
        return vocabulary

    tally = Tally()
    compiler = Compiler(vocabulary)
    checker = GrammarChecker(get_vocabulary, EngineConfig().grammar_timeout)
    try:
        await find_fault(checker, {})  # starts the process
        for name, schema, tests in groups:
            tally.valid += 1
            started = time.perf_counter()
            fault = await find_fault(checker, schema)
            tally.slowest_seconds = max(tally.slowest_seconds, time.perf_counter() - started)
            tally.hung += TOO_COSTLY in fault
            if fault:
                tally.refusals[fault.partition("cannot be used: ")[2][:60]] += 1
            else:
                tally.accepted += 1
                fine = walk(compiler, schema, walks, tally) & offer(compiler, schema, tests, tally)
                tally.obeyed += fine
                if not fine:
                    tally.disobeyed.append(name)
        for schema in {json.dumps(mutant): mutant for _, valid, _ in groups for mutant in mutants(valid)}.values():
            tally.invalid += 1
            fault = await find_fault(checker, schema)
            tally.invalid_refused += bool(fault)
            tally.hung += TOO_COSTLY in fault
    finally:
        await checker.close()
    return tally


async def find_fault(checker: GrammarChecker, schema: Schema) -> str:
    try:
        await checker.check(StructuredOutput.json_schema(schema))
    except InvalidRequestError as error:
        return str(error)
    return ""


def mutants(schema: Any) -> Iterator[dict[str, Any]]:
    """The schema with one keyword of its top level broken, where the draft's own schema sees that."""
    for keyword in schema if isinstance(schema, dict) else ():
        for value in WRONG_VALUES:
            mutant = copy.deepcopy(schema) | {keyword: value}
            if keyword[0] != "$" and not VALIDATOR(VALIDATOR.META_SCHEMA).is_valid(mutant):
                yield mutant


def walk(compiler: Compiler, schema: Schema, walks: int, tally: Tally) -> bool:
    """Draw texts that the masks allow; whether all that came to an end are valid."""
    wrong = 0
    for number in range(walks):
        text = draw(compiler, schema, random.Random(number))
        tally.walks += 1
        if text is None:
            tally.unfinished_walks += 1
        elif not is_valid(schema, json.loads(text)):
            wrong += 1
    tally.wrong_walks += wrong
    return wrong == 0


def draw(compiler: Compiler, schema: Schema, rng: random.Random) -> str | None:
    """A random text; None where it did not come to an end in time, or ran out of states."""
    matcher = compiler.compile(StructuredOutput.json_schema(schema))
    words = np.zeros(compiler.num_words, np.int32)
    ends = set(compiler.end_token_ids)
    closing = [ids[0] for ids in map(compiler.tokens_of, CLOSING) if len(ids) == 1]
    token_ids: list[int] = []
    for step in range(MAX_TOKENS):
        try:
            fill_mask(matcher, words)
        except GrammarError:
            return None
        allowed = np.flatnonzero(np.unpackbits(words.view(np.uint8), bitorder="little"))
        others = [token_id for token_id in allowed.tolist() if token_id not in ends]
        if not others or (len(others) < len(allowed) and rng.random() < EOS_SHARE):
            return compiler.text_of(token_ids)
        short = [token_id for token_id in closing if token_id in others] if step > CALM_AFTER else []
        token_ids.append(rng.choice(short or others))
        matcher.consume_token(token_ids[-1])
    return None


def offer(compiler: Compiler, schema: Schema, tests: list[dict[str, Any]], tally: Tally) -> bool:
    """Whether the masks refuse every instance of the suite that is not valid."""
    start = compiler.compile(StructuredOutput.json_schema(schema))
    allowed_wrongly = 0
    for test in tests:
        matcher = start.deep_copy()
        text = json.dumps(test["data"], ensure_ascii=False)
        allowed = matcher.consume_tokens(compiler.tokens_of(text)) and matcher.is_accepting()
        if test["valid"]:
            tally.valid_instances += 1
            tally.valid_instances_allowed += allowed
        else:
            tally.invalid_instances += 1
            allowed_wrongly += allowed
    tally.invalid_instances_allowed += allowed_wrongly
    return allowed_wrongly == 0


def is_valid(schema: Schema, instance: Any) -> bool:
    return VALIDATOR(schema, format_checker=VALIDATOR.FORMAT_CHECKER).is_valid(instance)


def report(tally: Tally) -> None:
    def share(name: str, part: int, whole: int) -> None:
        print(f"{name:58}{part:6} of {whole:6}{100 * part / max(1, whole):8.1f} %")

    share("valid schemas accepted", tally.accepted, tally.valid)
    share("accepted schemas obeyed", tally.obeyed, tally.accepted)
    share("invalid schemas refused", tally.invalid_refused, tally.invalid)
    share("random texts that came to an end", tally.walks - tally.unfinished_walks, tally.walks)
    share("invalid ones among these", tally.wrong_walks, tally.walks - tally.unfinished_walks)
    share("valid instances of accepted schemas allowed", tally.valid_instances_allowed, tally.valid_instances)
    share("instances that are not valid allowed", tally.invalid_instances_allowed, tally.invalid_instances)
    print(f"schemas that hang: {tally.hung}; slowest check: {tally.slowest_seconds:.2f} s")
    print("refused because of:")
    for reason, count in tally.refusals.most_common():
        print(f"{count:6}  {reason}")
    if tally.disobeyed:
        print("disobeyed:", *tally.disobeyed, sep="\n        ")


if __name__ == "__main__":
    main()
