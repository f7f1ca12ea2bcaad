"""Counts riddles: sentences that open with a clause in place of a subject.

    python -m tests.riddles [FILE_OR_FOLDER ...]

Plain English names the subject first: subject, verb, object. A sentence that opens with What, Who, Whose, Where, Of,
Nobody or Nothing makes its reader wait for the subject. Questions are no riddles. The check reads comments, docstrings,
strings of a sentence's length (error messages, help texts) and documents.
"""

import ast
import io
import re
import subprocess
import sys
import tokenize
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]
READ = ("engine", "server", "kernels", "README.md", "docs")
OPENINGS = re.compile(r"(?:what|who|whose|where|of|nobody|nothing)\b", re.IGNORECASE)
SENTENCE_END = re.compile(r"(?<=[.!?:])\s+(?=[A-Z`\"(])|\n\s*\n|\n\s*(?:[-*|] |\d+\. )")
MIN_WORDS = 4  # of a string that is no docstring: shorter ones are keys and names


class Riddle(NamedTuple):
    path: Path
    line: int
    sentence: str


def riddles_of(path: Path) -> Iterator[Riddle]:
    """Every riddle of a Python file or a Markdown document."""
    text = path.read_text(encoding="utf-8")
    for line, prose in _of_python(text) if path.suffix == ".py" else _of_document(text):
        for sentence in SENTENCE_END.split(prose):
            sentence = " ".join(sentence.split()).lstrip("`\"'*(#- ")
            if OPENINGS.match(sentence) and not sentence.rstrip("\"'`)*").endswith("?"):
                yield Riddle(path, line, sentence)


def _of_python(text: str) -> Iterator[tuple[int, str]]:
    """(line, prose) of each block of comments, each docstring and each long string."""
    tree = ast.parse(text)
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and len(node.value.split()) >= MIN_WORDS:
            yield node.lineno, node.value
    block: list[str] = []
    first = last = 0
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type != tokenize.COMMENT:
            continue
        own_line = not token.line[: token.start[1]].strip()
        if block and not (own_line and token.start[0] == last + 1):
            yield first, " ".join(block)
            block = []
        first = first if block else token.start[0]
        last = token.start[0] if own_line else -1
        block.append(token.string.lstrip("#:! "))
    if block:
        yield first, " ".join(block)


def _of_document(text: str) -> Iterator[tuple[int, str]]:
    """(line, prose) of each paragraph, list item and table cell outside of code."""
    outside = re.sub(r"```.*?```", lambda code: "\n" * code[0].count("\n"), text, flags=re.DOTALL)
    line = 1
    for paragraph in re.split(r"(\n\s*\n)", outside):
        for cell in paragraph.split("|") if paragraph.lstrip().startswith("|") else [paragraph]:
            yield line, cell
        line += paragraph.count("\n")


def files_of(names: list[str]) -> Iterator[Path]:
    tracked = subprocess.run(["git", "ls-files", *names], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    for name in tracked.split():
        if name.endswith((".py", ".md")) and (ROOT / name).is_file():
            yield ROOT / name


def main() -> int:
    found = [riddle for path in files_of(sys.argv[1:] or list(READ)) for riddle in riddles_of(path)]
    for riddle in found:
        print(f"{riddle.path.relative_to(ROOT)}:{riddle.line}: {riddle.sentence[:150]}")
    print(f"{len(found)} riddles", file=sys.stderr)
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
