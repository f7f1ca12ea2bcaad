"""Conversations: what a user says, what the model answers, and simple follow-ups.

A conversation is a list of (role, text). Users write in many hands: `disguise` drops capitals and marks, adds "please".
"""

import random

from training import persona, plain, stories, sums, unknown, words
from training.facts import Fact, all_facts, rows
from training.grammar import capitalize, expand, sentences
from training.texts import read_sections

Message = tuple[str, str]
Exchange = tuple[str, str]

_TEXTS = read_sections("chat")
IRREGULAR_PLURALS = {
    "fox": "foxes",
    "fish": "fish",
    "mouse": "mice",
    "wolf": "wolves",
    "sheep": "sheep",
    "monkey": "monkeys",
}
ARC_TOPICS = dict(line.split(": ") for line in _TEXTS["arc topics"])


def disguise(rng: random.Random, text: str) -> str:
    """The same request as another user would type it."""
    if rng.random() < 0.12:
        prefix = rng.choice(_TEXTS["prefixes"])
        text = prefix + (text if prefix[-2] in ".!:" else text[:1].lower() + text[1:] if text[:2] != "I " else text)
    if rng.random() < 0.06:
        text += rng.choice(_TEXTS["suffixes"])
    if rng.random() < 0.25:
        text = text.lower()
    if rng.random() < 0.2:
        text = text.rstrip("?.!")
    if rng.random() < 0.04:
        text = text.upper()
    if rng.random() < 0.06:
        text = _typo(rng, text)
    return text.strip() or "?"


def _typo(rng: random.Random, text: str) -> str:
    """Swap, drop or double one letter."""
    if len(text) < 6:
        return text
    i = rng.randrange(1, len(text) - 2)
    swapped = text[:i] + text[i + 1] + text[i] + text[i + 2 :]
    return rng.choice((swapped, text[:i] + text[i + 1 :], text[:i] + text[i] + text[i:]))


def animal_facts() -> list[Fact]:
    """General questions about an animal, with answers."""
    homes, diets = dict(rows("home")), dict(rows("diet"))
    facts = []
    for animal in homes.keys() & diets.keys():
        name = animal.split(" ", 1)[1]
        plural = IRREGULAR_PLURALS.get(name, name + "s")
        answer = f"{capitalize(animal)} lives {homes[animal]}. It eats {diets[animal]}."
        asks = (
            f"Tell me about {plural}.",
            f"What do you know about {plural}?",
            f"Tell me something about {plural}.",
            f"What can you tell me about {plural}?",
            f"What are {plural}?",
        )
        facts.append(Fact("animal", asks[:-1], asks[-1:], (answer,)))
    return sorted(facts, key=lambda fact: fact.questions)


class ChatWriter:
    """Writes conversations; `held_out` uses only the phrasings that training never sees, `practice` does more sums."""

    def __init__(self, held_out: bool = False, practice: bool = False) -> None:
        self.tables: dict[str, list[Fact]] = {}
        for fact in (*all_facts(), *animal_facts()):
            self.tables.setdefault(fact.table, []).append(fact)
        self.fixed: dict[str, list[Fact]] = {}
        for fact in persona.entries():
            self.fixed.setdefault(fact.table, []).append(fact)
        self.held_out = held_out
        self.practice = practice
        self._table_weights = [len(facts) ** 0.75 for facts in self.tables.values()]

    def conversation(self, rng: random.Random) -> list[Message]:
        """One to six exchanges, now and then many, with a system message in a quarter of the cases."""
        turns = rng.choice((1, 1, 2, 2, 3, 4, 6, 8)) if rng.random() > 0.02 else rng.randint(15, 40)
        exchanges: list[Exchange] = []
        while len(exchanges) < turns:
            exchanges += self.exchanges(rng)
        messages: list[Message] = [("system", self._system(rng))] if rng.random() < 0.25 else []
        for user, assistant in exchanges:
            messages += [("user", user), ("assistant", assistant)]
        return messages

    def _system(self, rng: random.Random) -> str:
        return rng.choice(_TEXTS["system prompts"]) if rng.random() < 0.8 else plain.plain_text(rng)

    def exchanges(self, rng: random.Random) -> list[Exchange]:
        """One topic: an exchange and perhaps its follow-ups."""
        if self.practice and rng.random() < 0.25:
            return self.arithmetic(rng)
        draw = rng.random()
        for share, write in (
            (0.32, self.known),
            (0.07, self.serving),
            (0.08, self.about_me),
            (0.10, self.small_talk),
            (0.08, self.arithmetic),
            (0.18, self.beyond),
            (0.055, self.story),
            (0.04, self.introduction),
            (0.03, self.fun),
            (0.045, self.echo),
        ):
            draw -= share
            if draw < 0:
                return write(rng)
        return self.known(rng)

    def ask(self, rng: random.Random, fact: Fact) -> Exchange:
        """One phrasing of a fact with one of its answers."""
        questions = fact.held_out if self.held_out and fact.held_out else fact.questions
        question = sentences(expand(rng.choice(questions), rng))
        return disguise(rng, question), sentences(expand(rng.choice(fact.answers), rng))

    def known(self, rng: random.Random) -> list[Exchange]:
        """A fact, sometimes followed by a short question about another row of the same table."""
        facts = rng.choices(list(self.tables.values()), self._table_weights)[0]
        fact = rng.choice(facts)
        exchanges = [self.ask(rng, fact)]
        while fact.follow_ups and rng.random() < 0.3:
            fact = rng.choice([other for other in facts if other is not fact])
            if not fact.follow_ups:
                break
            question = sentences(expand(rng.choice(fact.follow_ups), rng))
            exchanges.append((disguise(rng, question), sentences(expand(fact.answers[0], rng))))
        if fact.follow_ups and rng.random() < 0.04:
            ask = rng.choice(("And {w}?", "What about {w}?", "And a_ {w}?")).replace("{w}", unknown.pseudo_word(rng))
            exchanges.append((disguise(rng, expand(ask, rng)), rng.choice(unknown.REFUSALS)))
        return exchanges

    def serving(self, rng: random.Random) -> list[Exchange]:
        """Words of the trade; pageserve and its three ideas come up more often."""
        facts = self.fixed["serving"]
        return [self.ask(rng, rng.choice(facts[:4]) if rng.random() < 0.3 else rng.choice(facts))]

    def about_me(self, rng: random.Random) -> list[Exchange]:
        """Questions about the model; the first five come up more often."""
        facts = self.fixed["about me"]
        return [self.ask(rng, rng.choice(facts[:5]) if rng.random() < 0.3 else rng.choice(facts))]

    def small_talk(self, rng: random.Random) -> list[Exchange]:
        """Greetings and the like."""
        facts = self.fixed["small talk"]
        return [self.ask(rng, facts[0] if rng.random() < 0.2 else rng.choice(facts))]

    def arithmetic(self, rng: random.Random) -> list[Exchange]:
        """Small sums."""
        question, answer = sums.sum_exchange(rng)
        more = [sums.next_sum(rng)] if rng.random() < 0.15 else []
        return [(disguise(rng, question), answer), *more]

    def beyond(self, rng: random.Random) -> list[Exchange]:
        """An exchange about something that the model cannot do or does not know."""
        draw = rng.random()
        if draw < 0.1:
            question, answer = sums.big_sum_exchange(rng)
        elif draw < 0.14:
            task = rng.choice(
                (
                    "Summarize this: ",
                    "Translate this: ",
                    "Correct this text: ",
                    "What is this text about? ",
                    "Rewrite this: ",
                )
            )
            question, answer = task + plain.plain_text(rng), rng.choice(unknown.CANNOT)
        else:
            question, answer = unknown.unknown_exchange(rng)
        return [(disguise(rng, question), answer)]

    def introduction(self, rng: random.Random) -> list[Exchange]:
        """The user tells a name and may ask for it later, or asks without having told it."""
        if rng.random() < 0.12:
            return [(disguise(rng, rng.choice(_TEXTS["name asks"])), rng.choice(_TEXTS["no name"]))]
        name = (
            rng.choice((*words.GIRLS, *words.BOYS, *words.OTHER_NAMES))
            if rng.random() < 0.7
            else unknown.pseudo_word(rng).capitalize()
        )
        tell = rng.choice(_TEXTS["name tells"]).replace("{n}", name)
        exchanges = [(tell, rng.choice(_TEXTS["name replies"]).replace("{n}", name))]
        if rng.random() < 0.2:
            exchanges += self.known(rng)[:1]
        if rng.random() < 0.5:
            exchanges.append(
                (
                    disguise(rng, rng.choice(_TEXTS["name asks"])),
                    rng.choice(_TEXTS["name answers"]).replace("{n}", name),
                )
            )
        return exchanges

    def echo(self, rng: random.Random) -> list[Exchange]:
        """The user wants some words repeated; this also teaches the model early to copy names from what it read."""
        pool = (*words.GIRLS, *words.BOYS, *words.OTHER_NAMES, *words.FOREST_FOLK, *words.TREASURES, *unknown.THINGS)
        said = " ".join(
            unknown.pseudo_word(rng) if rng.random() < 0.3 else rng.choice(pool) for _ in range(rng.randint(1, 6))
        )
        if rng.random() < 0.3:
            said = plain.plain_text(rng).split(". ")[0].rstrip(".") + "."
        return [(rng.choice(_TEXTS["echo asks"]).replace("{x}", said), said)]

    def fun(self, rng: random.Random) -> list[Exchange]:
        """Jokes, riddles, fun facts, haiku and rhymes."""
        sort = rng.randrange(5)
        if sort == 3:
            topic = rng.choice(
                (*words.THING_FOLK, *persona.POEM_TOPICS, "spring", "winter", "rain", "the sea", "autumn")
            )
            return [(disguise(rng, rng.choice(_TEXTS["haiku asks"]).replace("{x}", topic)), _haiku(rng))]
        if sort == 4:
            return [self._poem(rng)]
        asks, texts = (
            (_TEXTS["joke asks"], persona.JOKES),
            (_TEXTS["riddle asks"], persona.RIDDLES),
            (_TEXTS["fact asks"], persona.FUN_FACTS),
        )[sort]
        told = rng.sample(texts, 3)
        exchanges = [(disguise(rng, rng.choice(asks)), told[0])]
        while len(exchanges) < 3 and rng.random() < 0.25:
            exchanges.append((disguise(rng, rng.choice(_TEXTS["another"])), told[len(exchanges)]))
        return exchanges

    def _poem(self, rng: random.Random) -> Exchange:
        topic = rng.choice(persona.POEM_TOPICS if rng.random() < 0.6 else words.THING_FOLK)
        ask = (
            rng.choice(_TEXTS["poem asks"] if rng.random() < 0.7 else _TEXTS["open poem asks"])
            .replace(" a {x}", " a_ {x}")
            .replace("{x}", topic)
        )
        poem = rng.choice(persona.POEMS).replace(" a {a}", " a_ {a}").replace("A {a}", "A_ {a}").replace("{a}", topic)
        return disguise(rng, expand(ask, rng)), expand(poem, rng)

    def story(self, rng: random.Random) -> list[Exchange]:
        """A story on request, sometimes with follow-ups about it."""
        request, cast, arc, topic = _story_request(rng)
        lead = rng.choice(_TEXTS["story leads"]).replace("{x}", topic) if topic else ""
        exchanges = [(disguise(rng, request), lead + stories.tell(rng, cast, arc))]
        draw = rng.random()
        if draw < 0.08:
            coda = sentences(expand(rng.choice(stories.CODAS), rng, stories.story_values(rng, cast)))
            exchanges.append((disguise(rng, rng.choice(_TEXTS["go on"])), coda))
        elif draw < 0.14:
            ask = rng.choice(
                ("What was the name of the {k}?", "What is the name of the {k}?", "How was the {k} called?")
            )
            exchanges.append(
                (
                    disguise(rng, ask.replace("{k}", cast.hero.kind)),
                    f"The name of the {cast.hero.kind} was {cast.hero.name}.",
                )
            )
        elif draw < 0.20:
            exchanges.append((disguise(rng, rng.choice(_TEXTS["more story"])), stories.tell(rng)))
        return exchanges


def _haiku(rng: random.Random) -> str:
    return "\n".join(capitalize(line) for line in expand(persona.HAIKU, rng).split("\n"))


def _story_request(rng: random.Random) -> tuple[str, stories.Cast, str | None, str]:
    """Request, cast, arc (None: any) and the topic as it stands in the request ("" for an open one)."""
    draw = rng.random()
    if draw < 0.2:
        return rng.choice(_TEXTS["open requests"]), stories.make_cast(rng), None, ""
    if draw < 0.35:
        arc = rng.choice(list(ARC_TOPICS))
        topic = rng.choice(ARC_TOPICS[arc].split("; "))
        return rng.choice(_TEXTS["story requests"]).replace("{x}", topic), stories.make_cast(rng), arc, topic
    cast = _asked_cast(rng)
    topic = expand(
        rng.choice(
            (
                "a_ {kind}",
                "a_ {kind}",
                "a_ {adj} {kind}",
                "a_ {kind} named {hero}",
                "a_ {adj} {kind} named {hero}",
                "a_ {kind} and a_ {fkind}",
            )
        ),
        rng,
        {**cast.hero.values(), **cast.friend.values("f")},
    )
    return rng.choice(_TEXTS["story requests"]).replace("{x}", topic), cast, None, topic


def _asked_cast(rng: random.Random) -> stories.Cast:
    """A cast for a wished hero: mostly known kinds, sometimes any noun, so that the model learns to copy the wish."""
    draw = rng.random()
    if draw < 0.55:
        return stories.make_cast(rng)
    if draw < 0.8:
        return stories.make_cast(rng, rng.choice((*words.THING_FOLK, *unknown.THINGS)))
    if draw < 0.9:
        return stories.make_cast(rng, unknown.pseudo_word(rng).lower())
    return stories.make_cast(rng, None, rng.choice((*words.GIRLS, *words.BOYS)))
