"""StructuredOutput: the form that the text of a request must have, as a value that crosses to the Worker.

It only says what is asked. engine/grammars/compiler.py turns it into a grammar, engine/grammars/checker.py finds out in
a process of its own whether that compiles within the limits, engine/worker/sampling/grammar_rows.py holds the tokens to
it.
"""

import hashlib
from collections.abc import Sequence
from typing import Any

import msgspec

from engine.errors import InvalidRequestError

KINDS = ("json_object", "json_schema", "regex", "choice", "grammar")
MAX_TEXT_BYTES = 1 << 18
MAX_IN_WORKER = 64  # compiled grammars that the Worker keeps
# Between two parts of JSON: a line break and its indentation, or one space. The bound keeps a model that likes
# whitespace from writing nothing else to the end; more spaces in a line are no more than tokens to wait for.
WHITESPACE = r"\r?\n[ \t]{0,24}|[ \t]"
NOT_MATCHED = "the structured output cannot be followed any further: "  # begins what a Worker says of a sequence


class StructuredOutput(msgspec.Struct, frozen=True, array_like=True):
    """What the generated text must be, as a whole: matched from its first token to its end.

    kind "json_object": any JSON object; `text` is empty. "json_schema": JSON that a schema allows; `text` is the schema
    as JSON. "regex": what a regular expression matches (Rust's syntax: no look-around, no back-references). "choice":
    one of the strings in `text`, a JSON array. "grammar": a Lark grammar as llguidance reads it, with special tokens
    and %json in it.

    lenient: keywords of a schema that cannot be enforced are passed over, where they would be an error.

    json_values: a "grammar" made here, of JSON with perhaps a marker around it. As with the kinds of JSON, its numbers
    stay within what a double holds, and near max_tokens it is led to its end. `ends`: how a free text within it ends.
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
                f"the {self.kind} of a structured output may be at most {MAX_TEXT_BYTES} bytes.", "structured_output"
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
        """What equal ones have in common, in 32 bytes."""
        text = repr((self.kind, self.lenient, self.json_values, self.ends, self.text))
        return hashlib.sha256(text.encode("utf-8", "surrogatepass")).digest()


class Vocabulary(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """The tokens that grammars are about: tokenizer.json as a text, the width of the logits, and what ends a text."""

    tokenizer_json: str
    size: int
    eos_token_ids: list[int]
