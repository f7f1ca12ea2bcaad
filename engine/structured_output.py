"""StructuredOutput: the form that the output of a request must have, as a message to the Worker.

engine/grammars/compiler.py compiles it to a grammar, engine/grammars/checker.py decides in a separate process whether
the grammar compiles within the limits, and engine/worker/sampling/grammar_rows.py masks tokens that would violate it.
"""

import hashlib
from collections.abc import Sequence
from typing import Any

import msgspec

from engine.errors import InvalidRequestError

KINDS = ("json_object", "json_schema", "regex", "choice", "grammar")
MAX_TEXT_BYTES = 1 << 18
MAX_IN_WORKER = 64  # compiled grammars that the Worker keeps
# White space between two parts of JSON: a line break with its indentation, or one space. The bound stops a model that
# would write only white space to the end of its budget; more spaces in a line would only cost tokens.
WHITESPACE = r"\r?\n[ \t]{0,24}|[ \t]"
# Prefix of terminals in grammars made by the server: one that cannot be compiled matches any text instead.
OPTIONAL = "OPTIONAL_"
NOT_MATCHED = "the structured output cannot be followed any further: "  # prefix of the Worker's reason: no token fits


class StructuredOutput(msgspec.Struct, frozen=True, array_like=True):
    """The form of the generated text, which is matched as a whole, from its first token to its end.

    kind "json_object": any JSON object; `text` is empty. "json_schema": JSON that fits the schema in `text` (JSON).
    "regex": a match of the regular expression in `text` (Rust's syntax: no look-around, no back-references). "choice":
    one of the strings in `text`, a JSON array. "grammar": a Lark grammar in llguidance's dialect, with special tokens
    and %json.

    lenient: schema keywords that cannot be enforced, because of their name or their value, are ignored; otherwise they
    are an error.

    json_values: a "grammar" made by the server, of JSON with or without markers around it. As for the kinds of JSON,
    numbers stay in the range of a double, and near max_tokens the output is forced to its end. `ends`: texts that end a
    free text in the grammar.
    """

    kind: str
    text: str = ""
    lenient: bool = False
    json_values: bool = False
    ends: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise InvalidRequestError(f"structured_output.kind must be one of {', '.join(KINDS)}.", "structured_output")
        if not isinstance(self.text, str) or (not self.text) != (self.kind == "json_object"):
            raise InvalidRequestError("structured_output.text must be a non-empty string.", "structured_output")
        if len(self.text.encode("utf-8", "surrogatepass")) > MAX_TEXT_BYTES:
            raise InvalidRequestError(
                f"a structured output ({self.kind}) may have at most {MAX_TEXT_BYTES} bytes.", "structured_output"
            )

    @staticmethod
    def json_object() -> "StructuredOutput":
        return StructuredOutput("json_object")

    @staticmethod
    def json_schema(schema: dict[str, Any] | bool, *, lenient: bool = False) -> "StructuredOutput":
        return StructuredOutput("json_schema", msgspec.json.encode(schema).decode(), lenient)

    @staticmethod
    def choice(choices: Sequence[str]) -> "StructuredOutput":
        return StructuredOutput("choice", msgspec.json.encode(list(choices)).decode())

    @property
    def holds_json(self) -> bool:
        return self.json_values or self.kind.startswith("json")

    def digest(self) -> bytes:
        """32 bytes that identify the value: equal values have equal digests."""
        text = repr((self.kind, self.lenient, self.json_values, self.ends, self.text))
        return hashlib.sha256(text.encode("utf-8", "surrogatepass")).digest()


class Vocabulary(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """The vocabulary that grammars are compiled for: tokenizer.json as a text, the width of the logits, the
    end-of-sequence tokens."""

    tokenizer_json: str
    size: int
    eos_token_ids: list[int]
