"""The corpus: an endless, seeded stream of documents.

    python -m training.corpus --seed 7 --count 20

A document is a list of segments (text, learn): plain documents are learned whole, in conversations only what the
assistant says. Document number i of a seed depends on (seed, i) alone.
"""

import argparse
import random
from collections.abc import Iterator
from dataclasses import dataclass

from training import plain, stories
from training.chat import ChatWriter, Message

END_OF_TEXT, IM_START, IM_END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
SPECIAL_TOKENS = (END_OF_TEXT, IM_START, IM_END)
TRAIN_SEED, PRACTICE_SEED, HELD_OUT_SEED = 1, 2, 1_000_003


@dataclass(frozen=True)
class Document:
    """`kind` is story, plain, facts or chat; a segment is (text, whether the model learns to write it)."""

    kind: str
    segments: tuple[tuple[str, bool], ...]

    @property
    def text(self) -> str:
        """All segments in one string, special tokens included."""
        return "".join(text for text, _ in self.segments)


def render_chat(messages: list[Message]) -> tuple[tuple[str, bool], ...]:
    """ChatML, exactly as the chat template of the tokenizer renders it; each turn ends with a newline."""
    segments = []
    for role, content in messages:
        segments.append((f"{IM_START}{role}\n", False))
        segments.append((f"{content}{IM_END}", role == "assistant"))
        segments.append(("\n", False))
    return (*segments, (END_OF_TEXT, False))


class Corpus:
    """Document source; `held_out` and `practice` as in ChatWriter."""

    def __init__(self, seed: int, held_out: bool = False, practice: bool = False) -> None:
        self.seed = seed
        self.writer = ChatWriter(held_out, practice)

    def document(self, index: int) -> Document:
        """Document number `index` of this seed."""
        rng = random.Random(f"{self.seed}/{index}")
        draw = rng.random()
        if draw < (0.06 if self.writer.practice else 0.13):
            text = stories.titled(rng) if rng.random() < 0.15 else stories.tell(rng)
            return Document("story", ((text + END_OF_TEXT, True),))
        if 0.13 <= draw < 0.16:
            return Document("plain", ((plain.plain_text(rng) + END_OF_TEXT, True),))
        if 0.16 <= draw < 0.20:
            return Document("facts", ((plain.fact_page(rng, self.writer.tables) + END_OF_TEXT, True),))
        return Document("chat", render_chat(self.writer.conversation(rng)))

    def documents(self, start: int = 0) -> Iterator[Document]:
        """All documents from number `start` on; never ends."""
        while True:
            yield self.document(start)
            start += 1


def main() -> None:
    """Print some documents."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=TRAIN_SEED)
    parser.add_argument("--count", type=int, default=10)
    args = parser.parse_args()
    corpus = Corpus(args.seed)
    for index in range(args.count):
        document = corpus.document(index)
        print(f"--- {document.kind}\n{document.text}\n")


if __name__ == "__main__":
    main()
