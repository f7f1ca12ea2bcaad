"""Fill in the middle: a prompt and a suffix arranged as code models were trained to read them.

Bavarian et al. 2022 (section 3): prefix, suffix and middle are told apart by special tokens, and the model writes the
middle last. Which tokens they are is a fact of the vocabulary, so it is looked up there and never guessed from a name.
"""

from collections.abc import Callable
from dataclasses import dataclass

# What stands before the prompt, before the suffix and before the middle; the first set that a vocabulary has counts.
PREFIX_FIRST = (
    ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"),  # Qwen2.5-Coder, CodeGemma
    ("<fim_prefix>", "<fim_suffix>", "<fim_middle>"),  # StarCoder, Granite
    ("<fim-prefix>", "<fim-suffix>", "<fim-middle>"),  # SantaCoder
    ("<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>"),  # DeepSeek-Coder
    ("▁<PRE>", "▁<SUF>", "▁<MID>"),  # Code Llama
    ("<PRE>", "<SUF>", "<MID>"),
)
SUFFIX_FIRST = ("[SUFFIX]", "[PREFIX]")  # Codestral: the suffix, then the prompt, and the model goes on


@dataclass(frozen=True)
class FillInMiddle:
    """`order`: special tokens and the names of what stands between them, as the model reads it."""

    order: tuple[str, ...]
    token_ids: dict[str, int]

    def text(self, prompt: str, suffix: str) -> str:
        """To be encoded as a whole, special tokens included."""
        return "".join({"prompt": prompt, "suffix": suffix}.get(part, part) for part in self.order)

    def ids(self, prompt: list[int], suffix: list[int]) -> list[int]:
        parts = {"prompt": prompt, "suffix": suffix} | {text: [token_id] for text, token_id in self.token_ids.items()}
        return [token_id for part in self.order for token_id in parts[part]]


def find_fill_in_middle(token_id: Callable[[str], int | None]) -> FillInMiddle | None:
    """What the vocabulary offers; None where the model was not made to fill in."""
    prefix_first = [(prefix, "prompt", suffix, "suffix", middle) for prefix, suffix, middle in PREFIX_FIRST]
    for order in (*prefix_first, (SUFFIX_FIRST[0], "suffix", SUFFIX_FIRST[1], "prompt")):
        ids = {text: token_id(text) for text in order if text not in ("prompt", "suffix")}
        known = {text: found for text, found in ids.items() if found is not None}
        if len(known) == len(ids):
            return FillInMiddle(order, known)
    return None
