"""Plain prose besides stories: introductions, diaries, letters, notes on places, and pages of facts."""

import random

from training import words
from training.facts import Fact
from training.grammar import expand, sentences
from training.texts import read_sections

TEXTS = read_sections("plain")["texts"]


def plain_text(rng: random.Random) -> str:
    """A few sentences of everyday prose."""
    people = rng.sample((*words.GIRLS, *words.BOYS, *words.OTHER_NAMES), 2)
    values = {
        "name": people[0],
        "name2": people[1],
        "n": str(rng.randint(5, 70)),
        "job": rng.choice(words.TOWN_FOLK[:16]),
        "pet": rng.choice(words.FARM_FOLK[:9]),
        "pet_name": rng.choice(words.PET_NAMES),
        "food": rng.choice(words.FOODS),
        "food2": rng.choice(words.FOODS),
        "thing": rng.choice(words.TREASURES),
        "color": rng.choice(("brown", "red", "grey")),
    }
    return sentences(expand(rng.choice(TEXTS), rng, values))


def fact_page(rng: random.Random, tables: dict[str, list[Fact]]) -> str:
    """Some statements of one table in a row, or questions with answers as plain text."""
    told = [facts for facts in tables.values() if facts[0].statement]
    facts = rng.choice(told)
    facts = rng.sample(facts, min(len(facts), rng.randint(1, 6)))
    if rng.random() < 0.7:
        return " ".join(sentences(expand(fact.statement, rng)) for fact in facts)
    lines = [
        (sentences(expand(rng.choice(fact.questions), rng)), sentences(expand(rng.choice(fact.answers), rng)))
        for fact in facts
    ]
    ask, say = rng.choice((("Question: ", "Answer: "), ("Q: ", "A: "), ("", "")))
    return "\n\n".join(f"{ask}{question}\n{say}{answer}" for question, answer in lines)
