"""Short stories: a cast, a world and one of sixteen arcs, each beat told in one of several ways.

An arc is a tuple of beats; a beat is a template (see grammar.py). The cast gives `{hero}` (a name), `{kind}` ("fox"),
`{he}`, `{him}`, `{his}`, the same with `f` for the friend (`{fhe}`), and the world gives places that fit together.
"""

import random
from dataclasses import dataclass

from training import words
from training.grammar import expand, sentences
from training.texts import read_sections

_TEXTS = read_sections("stories")
OPENINGS, ENDINGS, TITLES, CODAS = (_TEXTS[title] for title in ("openings", "endings", "titles", "codas"))
ARCS = {title.removeprefix("arc: "): beats for title, beats in _TEXTS.items() if title.startswith("arc: ")}


@dataclass(frozen=True)
class World:
    """A setting: who lives there and places that sound right in one story."""

    folk: tuple[str, ...]
    where: tuple[str, ...]
    homes: tuple[str, ...]
    spots: tuple[str, ...]
    roads: tuple[str, ...]


WORLDS = {
    "forest": World(
        words.FOREST_FOLK,
        ("in the forest", "in the deep green woods", "in a quiet forest", "near the edge of the woods"),
        (
            "a cosy den under an old oak tree",
            "a hollow log",
            "a small house of moss and sticks",
            "a burrow by the stream",
        ),
        (
            "behind the tall ferns",
            "under the old oak",
            "by the stream",
            "on the mossy hill",
            "near the waterfall",
            "beside the hollow log",
            "among the blueberry bushes",
            "at the foot of the pine tree",
        ),
        ("the winding path", "the forest trail", "the bank of the stream", "the path between the pines"),
    ),
    "farm": World(
        words.FARM_FOLK,
        ("on a sunny farm", "on a farm at the end of a long road", "on a little farm", "on a green farm"),
        ("a warm red barn", "a small shed behind the farmhouse", "a bed of straw in the stable"),
        (
            "behind the barn",
            "under the apple tree",
            "beside the pond",
            "in the corn field",
            "near the old well",
            "next to the tractor",
            "by the wooden gate",
            "on top of the haystack",
        ),
        ("the dusty road", "the path along the fence", "the lane behind the barn"),
    ),
    "sea": World(
        words.SEA_FOLK,
        ("by the blue sea", "near a sandy beach", "in a warm bay", "on the coast", "on a small island"),
        (
            "a cave below the cliffs",
            "a little house made of shells",
            "a quiet corner of the reef",
            "an old wooden boat",
        ),
        (
            "behind the big rocks",
            "near the coral reef",
            "under the pier",
            "in the tide pools",
            "beside the old shipwreck",
            "next to the lighthouse",
            "among the seaweed",
            "on the white sand",
        ),
        ("the shore", "the line where the waves end", "the edge of the reef"),
    ),
    "wild": World(
        words.WILD_FOLK,
        ("in the warm grassland", "in a leafy jungle", "in a land of tall grass", "beside a wide brown river"),
        ("a shady spot under a fig tree", "a nest of soft grass", "a cave near the river"),
        (
            "behind the tall grass",
            "near the water hole",
            "under the fig tree",
            "on the flat rock",
            "by the river bend",
            "among the vines",
            "beside the termite hill",
        ),
        ("the river bank", "the old elephant path", "the track through the tall grass"),
    ),
    "magic": World(
        words.MAGIC_FOLK,
        ("in a faraway kingdom", "in a land beyond the mountains", "in the Misty Mountains", "in an enchanted valley"),
        (
            "a tall stone tower",
            "a cave full of candles",
            "a tiny castle with one window",
            "a cottage with a crooked roof",
        ),
        (
            "behind the castle",
            "under the stone bridge",
            "in the rose garden",
            "beside the silver lake",
            "on the crystal hill",
            "at the gate of the old tower",
            "near the singing well",
        ),
        ("the royal road", "the path of white stones", "the road over the mountain"),
    ),
    "town": World(
        words.TOWN_FOLK,
        ("in a small town", "in a village by the river", "in a busy city", "in a little town between two hills"),
        (
            "a narrow house with a blue door",
            "a room above the bakery",
            "a house on Market Street",
            "a cottage by the bridge",
        ),
        (
            "behind the school",
            "under the bridge",
            "in the park",
            "near the bakery",
            "beside the fountain",
            "at the market",
            "next to the train station",
            "in the library garden",
        ),
        ("the main street", "the lane behind the bakery", "the path along the river"),
    ),
}
PEOPLE = {
    "girl": "she",
    "boy": "he",
    "princess": "she",
    "prince": "he",
    "queen": "she",
    "king": "he",
    "witch": "she",
    "wizard": "he",
    "mermaid": "she",
    "cow": "she",
    "hen": "she",
    "rooster": "he",
    "fairy": "she",
    "cowboy": "he",
    "fisherman": "he",
    "postman": "he",
}
FORMS = {"he": ("he", "him", "his", "himself"), "she": ("she", "her", "her", "herself")}


@dataclass(frozen=True)
class Character:
    """One member of the cast; `adjective` is how the story introduces it."""

    kind: str
    name: str
    adjective: str
    pronoun: str

    def values(self, prefix: str = "") -> dict[str, str]:
        """Template values; `prefix` "" is the hero and "f" the friend."""
        he, him, his, himself = FORMS[self.pronoun]
        name_key = "friend" if prefix else "hero"
        return {
            name_key: self.name,
            f"{prefix}kind": self.kind,
            f"{prefix}adj": self.adjective,
            f"{prefix}he": he,
            f"{prefix}him": him,
            f"{prefix}his": his,
            f"{prefix}himself": himself,
        }


def make_character(rng: random.Random, kind: str, name: str | None = None) -> Character:
    """A character of a kind, with a fitting name and pronoun."""
    pronoun = PEOPLE.get(kind) or rng.choice(("he", "she"))
    human = kind in ("girl", "boy", "woman", "man") or kind in words.TOWN_FOLK
    if name is None:
        people = words.GIRLS if pronoun == "she" else words.BOYS
        name = rng.choice(people if human or rng.random() < 0.4 else words.PET_NAMES)
    else:
        pronoun = "she" if name in words.GIRLS else "he" if name in words.BOYS else pronoun
    return Character(kind, name, rng.choice(words.SMALL), pronoun)


@dataclass(frozen=True)
class Cast:
    """Characters and place: everything that a story needs before its first word."""

    hero: Character
    friend: Character
    world: World
    things: tuple[str, str]
    foods: tuple[str, str]


def make_cast(rng: random.Random, kind: str | None = None, name: str | None = None) -> Cast:
    """Choose hero, friend and world; a hero kind that no world knows may live in any of them."""
    if kind is None:
        kind = (
            rng.choice(("girl", "boy")) if rng.random() < 0.25 else rng.choice(rng.choice(list(WORLDS.values())).folk)
        )
        if rng.random() < 0.06:
            kind = rng.choice(words.THING_FOLK)
    worlds = [world for world in WORLDS.values() if kind in world.folk]
    world = worlds[0] if worlds and rng.random() < 0.9 else rng.choice(list(WORLDS.values()))
    if kind in ("girl", "boy"):
        world = rng.choice([WORLDS["town"], WORLDS["farm"], WORLDS["forest"], WORLDS["sea"]])
    hero = make_character(rng, kind, name)
    friend = make_character(rng, rng.choice([folk for folk in (*world.folk, "girl", "boy") if folk != kind]))
    while friend.name == hero.name:
        friend = make_character(rng, friend.kind)
    return Cast(hero, friend, world, tuple(rng.sample(words.TREASURES, 2)), tuple(rng.sample(words.FOODS, 2)))  # type: ignore[arg-type]


def story_values(rng: random.Random, cast: Cast) -> dict[str, str]:
    """All values the arcs use."""
    spots = rng.sample(cast.world.spots, 3)
    return {
        **cast.hero.values(),
        **cast.friend.values("f"),
        "where": rng.choice(cast.world.where),
        "home": rng.choice(cast.world.homes),
        "road": rng.choice(cast.world.roads),
        "spot": spots[0],
        "spot2": spots[1],
        "spot3": spots[2],
        "thing": cast.things[0],
        "thing2": cast.things[1],
        "food": cast.foods[0],
        "food2": cast.foods[1],
        "fruit": rng.choice(words.FRUIT),
    }


def tell(rng: random.Random, cast: Cast | None = None, arc: str | None = None, opening: str | None = None) -> str:
    """One story of some 100 to 220 words in two to four paragraphs."""
    cast = cast or make_cast(rng)
    values = story_values(rng, cast)
    arc = arc or rng.choice(list(ARCS))
    beats = [opening or rng.choice(OPENINGS), *ARCS[arc], rng.choice(ENDINGS)]
    told = [sentences(expand(beat, rng, values)) for beat in beats if beat]
    return _paragraphs(rng, told)


def _paragraphs(rng: random.Random, told: list[str]) -> str:
    """Join beats into paragraphs of two to four."""
    text, left = told[0], rng.randint(2, 4)
    for beat in told[1:]:
        left -= 1
        text += ("\n\n" if left <= 0 else " ") + beat
        left = left if left > 0 else rng.randint(2, 4)
    return text


def titled(rng: random.Random) -> str:
    """A story with a title line, as in a picture book."""
    cast = make_cast(rng)
    title = expand(rng.choice(TITLES), rng, {**cast.hero.values(), "thing": cast.things[0]})
    return title + "\n\n" + tell(rng, cast)
