"""The model's knowledge: tables of simple facts, each with several ways to ask and to answer.

The tables are in texts/facts.txt. The last question of a table with four or more is never trained on: it measures
whether the model understands a new phrasing.
"""

from dataclasses import dataclass
from itertools import combinations

from training.texts import read_sections

HELD_OUT_FROM = 4  # tables with at least this many questions give up their last one
_TEXTS = read_sections("facts")


@dataclass(frozen=True)
class Fact:
    """One thing to know. `follow_ups` only make sense after another fact of the same table."""

    table: str
    questions: tuple[str, ...]
    held_out: tuple[str, ...]
    answers: tuple[str, ...]
    follow_ups: tuple[str, ...] = ()
    statement: str = ""


@dataclass(frozen=True)
class Patterns:
    """How a table is asked and told; `{x}` and `{y}` stand for a row, " / " separates variants."""

    ask: str
    answer: str
    follow: str = ""
    told: str = ""


def fill(table: str, x: str, y: str, patterns: Patterns) -> Fact:
    """The fact of one row."""
    questions, answers, follow_ups, told = (
        tuple(text.replace("{x}", x).replace("{y}", y) for text in source.split(" / ") if text)
        for source in (patterns.ask, patterns.answer, patterns.follow, patterns.told)
    )
    keep = len(questions) - (len(questions) >= HELD_OUT_FROM)
    return Fact(table, questions[:keep], questions[keep:], answers, follow_ups, told[0] if told else "")


def rows(table: str) -> list[tuple[str, str]]:
    """The rows (x, y) of a table of the file, without its patterns."""
    lines = [line for line in _TEXTS[table] if not line.startswith(("ask: ", "answer: ", "follow: ", "told: "))]
    pairs = (row.split(":", 1) for line in lines for row in line.split(";"))
    return [(x.strip(), y.strip()) for x, y in pairs]


def _plain_table(table: str) -> list[Fact]:
    found = dict(
        line.split(": ", 1) for line in _TEXTS[table] if line.startswith(("ask: ", "answer: ", "follow: ", "told: "))
    )
    return [fill(table, x, y, Patterns(**found)) for x, y in rows(table)]


def _units(table: str) -> list[Fact]:
    facts = []
    for thing, rest in rows(table):
        whole, count = (part.strip() for part in rest.split(":"))
        patterns = Patterns(
            f"How many {{x}} are [there |]in {whole}? / How many {{x}} does {whole} have? / "
            f"How many {{x}} in {whole}? / What is the number of {{x}} in {whole}?",
            f"There are {{y}} {{x}} in {whole}. / {whole[0].upper()}{whole[1:]} has {{y}} {{x}}.",
            told=f"There are {{y}} {{x}} in {whole}.",
        )
        facts.append(fill(table, thing, count, patterns))
    return facts


def _sizes(table: str) -> list[Fact]:
    facts = []
    for small, big in combinations(_TEXTS[table][0].split(), 2):
        bigger, smaller = f"a_ {big} is bigger than a_ {small}.", f"A_ {small} is smaller than a_ {big}."
        for first, second in ((small, big), (big, small)):
            pair, answer = f"a_ {first} or a_ {second}?", ("Yes, " if first == big else "No, ") + bigger
            facts += [
                fill(table, "", "", Patterns(f"Which is bigger, {pair} / What is bigger, {pair}", "A" + bigger[1:])),
                fill(table, "", "", Patterns(f"Is a_ {first} bigger than a_ {second}?", answer)),
                fill("smaller", "", "", Patterns(f"Which is smaller, {pair} / What is smaller, {pair}", smaller)),
            ]
    return facts


def _spelling(table: str) -> list[Fact]:
    words = " ".join(_TEXTS[table]).split()
    spell = Patterns(
        "How do you spell {x}? / Spell the word {x}. / Can you spell {x}? / How is {x} spelled?",
        "{y}. / You spell it {y}.",
        "And {x}?",
    )
    first = Patterns(
        "What is the first letter of {x}? / Which letter does {x} start with? / "
        "What letter does the word {x} begin with?",
        "The first letter of {x} is {y}. / The word {x} starts with {y}.",
    )
    facts = [fill(table, word, "-".join(word.upper()), spell) for word in words]
    return facts + [fill("first letter", word, word[0].upper(), first) for word in words]


def all_facts() -> list[Fact]:
    """Every fact, in the order of the file."""
    special = {"units": _units, "bigger": _sizes, "spell": _spelling}
    return [fact for table in _TEXTS for fact in special.get(table, _plain_table)(table)]
