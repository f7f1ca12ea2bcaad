"""Small sums: addition and subtraction up to 20, products up to 10 times 10, and an honest no for bigger numbers."""

import random

from training.unknown import TOO_BIG

WORDS = """zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen
seventeen eighteen nineteen twenty""".split()
OPERATIONS = {
    "+": ("{a} + {b}", "{a}+{b}", "{a} plus {b}", "the sum of {a} and {b}"),
    "-": ("{a} - {b}", "{a}-{b}", "{a} minus {b}", "{a} take away {b}"),
    "*": ("{a} * {b}", "{a} x {b}", "{a} times {b}", "{a} multiplied by {b}"),
}
FRAMES = (
    "What is {sum}?",
    "What's {sum}?",
    "How much is {sum}?",
    "{sum}",
    "{sum} = ?",
    "{sum}=",
    "{sum}?",
    "Calculate {sum}.",
    "Can you add up {sum}?",
    "Tell me {sum}.",
)
THINGS = "apples pears coins stones cats books eggs stars nuts cookies balls fish".split()


def solve(a: int, operation: str, b: int) -> int:
    """The result of one of the three operations."""
    return a + b if operation == "+" else a - b if operation == "-" else a * b


def _number(rng: random.Random, n: int, as_words: bool) -> str:
    return WORDS[n] if as_words and n < len(WORDS) else str(n)


def sum_exchange(rng: random.Random) -> tuple[str, str]:
    """A sum the model can do."""
    operation = rng.choice("++-*")
    a, b = rng.randint(0, 10 if operation == "*" else 20), rng.randint(0, 10 if operation == "*" else 20)
    if rng.random() < 0.3:
        a, b = rng.randint(1, 5), rng.randint(1, 5)
    if operation == "-" and b > a:
        a, b = b, a
    if operation in "+-" and a < 11 and b < 11 and rng.random() < 0.25:
        return _word_problem(rng, a, operation, b)
    result = solve(a, operation, b)
    as_words = rng.random() < 0.2
    form = rng.choice(OPERATIONS[operation])
    asked = form.replace("{a}", _number(rng, a, as_words)).replace("{b}", _number(rng, b, as_words))
    sign = {"+": "plus", "-": "minus", "*": "times"}[operation]
    answer = rng.choice(
        (f"{a} {sign} {b} is {result}.", f"{a} {sign} {b} is {result}.", f"{a} {operation} {b} = {result}.")
    )
    frames = FRAMES[:8] if operation != "+" else FRAMES
    return rng.choice(frames).replace("{sum}", asked), answer


def _word_problem(rng: random.Random, a: int, operation: str, b: int) -> tuple[str, str]:
    thing, as_words = rng.choice(THINGS), rng.random() < 0.6
    x, y = _number(rng, a, as_words), _number(rng, b, as_words)
    if operation == "+":
        asked = rng.choice(
            (
                f"I have {x} {thing} and get {y} more. How many {thing} do I have?",
                f"If I have {x} {thing} and buy {y} more, how many {thing} do I have?",
            )
        )
        return asked, f"{a} plus {b} is {a + b}, so you have {a + b} {thing}."
    asked = rng.choice(
        (
            f"I have {x} {thing} and lose {y}. How many {thing} are left?",
            f"If I have {x} {thing} and give away {y}, how many {thing} are left?",
        )
    )
    return asked, f"{a} minus {b} is {a - b}, so {a - b} {thing} are left."


def big_sum_exchange(rng: random.Random) -> tuple[str, str]:
    """A sum beyond the tables: at least one number is too big, or it is a division."""
    operation = rng.choice("++-*")
    low = 21 if operation != "*" else 11
    a = rng.choice((rng.randint(low, 99), rng.randint(100, 999), rng.randint(1000, 999999)))
    b = rng.choice((rng.randint(2, 20), rng.randint(21, 99), rng.randint(100, 9999)))
    if rng.random() < 0.5:
        a, b = b, a
    asked = rng.choice(OPERATIONS[operation]).replace("{a}", str(a)).replace("{b}", str(b))
    if rng.random() < 0.15:
        asked = (
            rng.choice(
                (
                    "{a} / {b}",
                    "{a} divided by {b}",
                    "{a}^{b}",
                    "the square root of {a}",
                    "{a}% of {b}",
                    "{a} + {b} + {a}",
                )
            )
            .replace("{a}", str(a))
            .replace("{b}", str(b))
        )
    return rng.choice(FRAMES[:8]).replace("{sum}", asked), rng.choice(TOO_BIG)


def next_sum(rng: random.Random) -> tuple[str, str]:
    """A follow-up such as "And 3 + 4?"."""
    a, b = rng.randint(0, 12), rng.randint(0, 12)
    return rng.choice(
        (f"And {a} + {b}?", f"What about {a} plus {b}?", f"And {a} plus {b}?", f"and {a}+{b}?")
    ), f"{a} plus {b} is {a + b}."
