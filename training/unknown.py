"""Questions that the model cannot answer: beyond its tables, nonsense and noise; and its ways to say no."""

import random
import string

from training.grammar import expand
from training.texts import read_sections

_TEXTS = read_sections("unknown")
REFUSALS, UNCLEAR, TOO_BIG, CANNOT = (_TEXTS[title] for title in ("refusals", "unclear", "too big", "cannot"))
ASK_ABOUT, ASK_WHO, ODD = (_TEXTS[title] for title in ("ask about", "ask who", "odd questions"))
TASKS, FOREIGN = _TEXTS["tasks"], _TEXTS["foreign"]
TOPICS, PEOPLE, LANDS, THINGS = (
    tuple(entry.strip() for entry in " ".join(_TEXTS[title]).split(","))
    for title in ("topics", "people", "lands", "things")
)


def pseudo_word(rng: random.Random) -> str:
    """A word that does not exist but could, such as "flarbit"."""
    starts, vowels, ends = (
        "b br c cl d dr f fl g gl gr h j k kr l m n p pl qu r s sn sp st str t tr v w z bl sk".split(),
        "a e i o u oo ee ai".split(),
        "b ck d ff g l m n nk p rb rt s sh st t x zz".split(),
    )
    middle = "".join(rng.choice(starts) + rng.choice(vowels) for _ in range(rng.randint(1, 2)))
    word = middle + rng.choice(ends) + rng.choice(("", "", "le", "er", "on", "ia", "o", "us", "ing", "ism"))
    return word.capitalize() if rng.random() < 0.2 else word


def gibberish(rng: random.Random) -> str:
    """Keyboard noise of several sorts."""
    sort = rng.randrange(8)
    if sort == 0:
        return "".join(rng.choice(string.ascii_lowercase) for _ in range(rng.randint(1, 30)))
    if sort == 1:
        return " ".join(
            "".join(rng.choice("asdfjklghqwertyuiop") for _ in range(rng.randint(2, 9)))
            for _ in range(rng.randint(1, 6))
        )
    if sort == 2:
        return "".join(rng.choice(string.punctuation + "      ") for _ in range(rng.randint(1, 20))).strip() or "?"
    if sort == 3:
        return "".join(rng.choice(string.digits) for _ in range(rng.randint(3, 20)))
    if sort == 4:
        return " ".join(pseudo_word(rng) for _ in range(rng.randint(1, 8))) + rng.choice(("", "?", ".", "!"))
    if sort == 5:
        return rng.choice("abcdefgxyz!?.,#é§ß∑漢🙂🚀❤") * rng.randint(1, 30)
    if sort == 6:
        return "".join(
            chr(
                rng.choice(
                    (
                        rng.randint(0xC0, 0x24F),
                        rng.randint(0x400, 0x44F),
                        rng.randint(0x4E00, 0x4FFF),
                        rng.randint(0x1F300, 0x1F5FF),
                    )
                )
            )
            for _ in range(rng.randint(1, 12))
        )
    return "".join(rng.choice(string.ascii_letters + string.digits + "/-_=.:") for _ in range(rng.randint(8, 40)))


def unknown_exchange(rng: random.Random) -> tuple[str, str]:
    """A question the model must not try to answer, and its answer."""
    draw = rng.random()
    if draw < 0.30:
        x, y = rng.sample(TOPICS, 2)
        return rng.choice(ASK_ABOUT).replace("{x}", x).replace("{y}", y), rng.choice(REFUSALS)
    if draw < 0.38:
        return rng.choice(ASK_WHO).replace("{x}", rng.choice(PEOPLE)), rng.choice(REFUSALS)
    if draw < 0.56:
        task = rng.choice(TASKS)
        return task, rng.choice(REFUSALS if task.endswith("?") else CANNOT)
    if draw < 0.62:
        return rng.choice(FOREIGN), rng.choice(UNCLEAR)
    if draw < 0.70:
        return gibberish(rng), rng.choice(UNCLEAR)
    question = rng.choice(ODD)
    while "{word}" in question:
        question = question.replace("{word}", pseudo_word(rng) if rng.random() < 0.7 else rng.choice(THINGS), 1)
    question = question.replace("{land}", rng.choice(LANDS) if rng.random() < 0.7 else pseudo_word(rng).capitalize())
    question = question.replace(" a {thing}", " a_ {thing}").replace("{thing}", rng.choice(THINGS))
    return expand(question, rng), rng.choice(REFUSALS)
