"""Answers of the model about itself, about pageserve and serving; small talk, jokes and verses."""

from training.facts import HELD_OUT_FROM, Fact
from training.texts import read_sections

_TEXTS = read_sections("persona")
JOKES, RIDDLES, FUN_FACTS, POEMS = (_TEXTS[title] for title in ("jokes", "riddles", "fun facts", "poems"))
POEM_TOPICS = _TEXTS["poem topics"]
HAIKU = "\n".join(_TEXTS["haiku"])


def entries() -> list[Fact]:
    """All fixed questions and answers as facts; the table is their section of the file."""
    facts = []
    for table in ("serving", "about me", "small talk"):
        lines = _TEXTS[table]
        for ask, answer in zip(lines[::2], lines[1::2], strict=True):
            questions = tuple(ask.removeprefix("Q: ").split(" / "))
            keep = len(questions) - (len(questions) >= HELD_OUT_FROM)
            answers = tuple(answer.removeprefix("A: ").split(" / "))
            facts.append(Fact(table, questions[:keep], questions[keep:], answers))
    return facts
