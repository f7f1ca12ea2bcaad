"""FillInMiddle: arranges a prompt and a suffix in the order that a code model was trained to read.

Bavarian et al. 2022 (section 3): special tokens separate prefix, suffix and middle, and the model writes the middle
last. The vocabulary decides which special tokens those are, never the model's name.
"""

from collections.abc import Callable
from dataclasses import dataclass

# Special tokens before the prompt, before the suffix and before the middle. The first set in the vocabulary counts.
PREFIX_FIRST = (
    ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"),  # Qwen2.5-Coder, CodeGemma
    ("<fim_prefix>", "<fim_suffix>", "<fim_middle>"),  # StarCoder, Granite
    ("<fim-prefix>", "<fim-suffix>", "<fim-middle>"),  # SantaCoder
    ("<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>"),  # DeepSeek-Coder
    ("▁<PRE>", "▁<SUF>", "▁<MID>"),  # Code Llama
    ("<PRE>", "<SUF>", "<MID>"),
)
SUFFIX_FIRST = ("[SUFFIX]", "[PREFIX]")  # Codestral: suffix, then prompt; the model continues the prompt


@dataclass(frozen=True)
class FillInMiddle:
    """`order`: special tokens and the names "prompt" and "suffix", in the order that the model reads."""

    order: tuple[str, ...]
    token_ids: dict[str, int]

    def text(self, prompt: str, suffix: str) -> str:
        """The arranged text, to be encoded in one piece together with its special tokens."""
        return "".join({"prompt": prompt, "suffix": suffix}.get(part, part) for part in self.order)

    def ids(self, prompt: list[int], suffix: list[int]) -> list[int]:
        parts = {"prompt": prompt, "suffix": suffix} | {text: [token_id] for text, token_id in self.token_ids.items()}
        return [token_id for part in self.order for token_id in parts[part]]


def find_fill_in_middle(token_id: Callable[[str], int | None]) -> FillInMiddle | None:
    """The layout whose special tokens are all in the vocabulary; None if the model was not trained to fill in."""
    prefix_first = [(prefix, "prompt", suffix, "suffix", middle) for prefix, suffix, middle in PREFIX_FIRST]
    for order in (*prefix_first, (SUFFIX_FIRST[0], "suffix", SUFFIX_FIRST[1], "prompt")):
        ids = {text: token_id(text) for text in order if text not in ("prompt", "suffix")}
        known = {text: found for text, found in ids.items() if found is not None}
        if len(known) == len(ids):
            return FillInMiddle(order, known)
    return None
