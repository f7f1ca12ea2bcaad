"""Compiler: compiles a StructuredOutput to a llguidance matcher, within limits.

llguidance (https://github.com/guidance-ai/llguidance) runs an Earley parser over a lexer of derivatives and walks the
vocabulary as a trie. It bounds its own work by "fuel", which LIMITS sets. Only the checking process and the Worker use
this module; it imports the library at the first call.
"""

import json
import re
from collections.abc import Callable, Iterable
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from engine.grammars.corrected_schema import MAY_NEED_CORRECTION, corrected
from engine.grammars.unusable_values import (
    NO_OVERLAP,
    OVERLAP,
    UNTRIED,
    limited,
    unusable_values,
    usable_lark,
    with_schemas,
    without_unusable_values,
)
from engine.structured_output import MAX_IN_WORKER, WHITESPACE, StructuredOutput, Vocabulary

if TYPE_CHECKING:
    from llguidance import LLMatcher

MAX_NESTING = 64
MAX_CHOICES = 10_000
MAX_RULES = 5_000
RULE = re.compile(r"^\s*[?!]?[\w.-]+(?:\[[^\]\n]*\])?\s*(?::|::=)", re.MULTILINE)
MAX_MESSAGE = 300  # characters: an error names the fault and does not repeat a long grammar
MAX_REASON = 120  # characters of the reason at the end of a longer message
LIMITS = {
    "max_items_in_row": 4_000,
    "initial_lexer_fuel": 1_000_000,  # some 20 ms
    "step_lexer_fuel": 200_000,  # 14 ms
    "step_max_items": 100_000,  # 5 ms
    "max_lexer_states": 50_000,  # up to 50 MB
    "max_grammar_size": 50_000,  # symbols in all rules
    "verbose_errors": False,
}

IN_RULE = re.compile(r"^at 1\(\d+\): |\n +1 \| start: .*", re.DOTALL)

Words = npt.NDArray[np.int32]


class GrammarError(Exception):
    """A grammar cannot be compiled or matched. The message may be shown to the client."""


class Compiler:
    """Makes matchers for one vocabulary. Loading takes up to a second for a large one."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        from llguidance import LLParserLimits, LLTokenizer

        ends = [token_id for token_id in vocabulary.eos_token_ids if token_id < vocabulary.size]
        if not ends:
            raise GrammarError("this model has no end-of-sequence token, so no output could end after the right text")
        self.end_token_ids, size = ends, vocabulary.size
        try:
            self._tokenizer: LLTokenizer = LLTokenizer(vocabulary.tokenizer_json, n_vocab=size, eos_token=ends)
        except ValueError:  # the tokenizer has more tokens than the model has logits: the excess is never sampled
            self._tokenizer = LLTokenizer(vocabulary.tokenizer_json, eos_token=ends)
        self._limits: LLParserLimits = LLParserLimits(**LIMITS)  # type: ignore[arg-type]
        self.num_words = -(-self._tokenizer.vocab_size // 32)
        self._usable: dict[bytes, str] = {}  # digest of an output -> its grammar without unusable values

    def compile(self, output: StructuredOutput) -> "LLMatcher":
        """A matcher at its start. Values that cannot be enforced are left out of lenient schemas; elsewhere the error
        names the first of them. Raises GrammarError."""
        digest = output.digest()
        try:
            return self._start(self._usable.get(digest) or to_llguidance(output))
        except GrammarError as error:
            # llguidance turns a regular expression into a rule of one line: the position in it means nothing.
            fault = str(error) if output.kind == "grammar" else IN_RULE.sub("", str(error))
        grammar = self._without_unusable_values(output, fault)
        matcher = self._start(grammar)
        self._usable[digest] = grammar
        if len(self._usable) > MAX_IN_WORKER:
            self._usable.pop(next(iter(self._usable)), None)
        return matcher

    def _start(self, grammar: str) -> "LLMatcher":
        from llguidance import LLMatcher

        matcher = LLMatcher(self._tokenizer, grammar, log_level=0, limits=self._limits)
        check(matcher)
        return matcher

    def _without_unusable_values(self, output: StructuredOutput, fault: str) -> str:
        """The grammar of an output that has a fault, without the values that cannot be enforced. GrammarError if there
        are none, or in strict mode."""
        if output.kind == "json_schema":
            schema = json.loads(_checked_schema(output.text))
            fault_of = limited(partial(self._fault, partial(_of_schema, lenient=output.lenient)))
            if not output.lenient:
                found = unusable_values(schema, fault_of, fault)
                first = next((value for value in found if value.fault != UNTRIED), None)
                raise GrammarError(shorten(f"{first or fault}"))
            if without_unusable_values(schema, fault_of):
                return _of_schema(json.dumps(schema), lenient=True)
        elif output.json_values:
            of_schema, of_lark = partial(self._fault, partial(_of_schema, lenient=True)), partial(self._fault, _of_lark)
            if (text := usable_lark(output.text, of_schema, of_lark)) != output.text:
                return _of_lark(text)
        raise GrammarError(fault)

    def _fault(self, make: Callable[[str], str], text: str) -> str:
        """The fault of the grammar that `make` makes of `text`, or ""."""
        try:
            self._start(make(text))
        except GrammarError as error:
            return str(error)
        return ""

    def token_texts(self) -> list[bytes]:
        """The bytes that each token adds to a text; empty for special tokens."""
        tokenizer = self._tokenizer
        ids = range(tokenizer.vocab_size)
        return [b"" if tokenizer.is_special_token(i) else tokenizer.decode_bytes([i]) for i in ids]

    def tokens_of(self, text: str) -> list[int]:
        """The token ids of a text."""
        ids: list[int] = self._tokenizer.tokenize_str(text)
        return ids

    def text_of(self, token_ids: list[int]) -> str:
        text: str = self._tokenizer.decode_str(token_ids)
        return text


def fill_mask(matcher: "LLMatcher", words: Words) -> None:
    """Write one bit per token into `words`, int32 [num_words], contiguous: 1 if the token may come next. Raises
    GrammarError."""
    matcher.unsafe_compute_mask_ptr(words.ctypes.data, words.nbytes)
    if matcher.is_error():
        check(matcher)


def as_words(token_ids: Iterable[int], num_words: int) -> Words:
    """A mask that allows only these tokens: int32 [num_words]."""
    bits = np.zeros((num_words, 32), np.uint8)
    bits.reshape(-1)[list(token_ids)] = 1
    words: Words = np.packbits(bits, bitorder="little").view(np.int32)
    return words


def check(matcher: "LLMatcher") -> None:
    if matcher.is_error():
        raise GrammarError(shorten(matcher.get_error()))


def shorten(message: str) -> str:
    """The library's message without its dump of the parser state, at most MAX_MESSAGE characters."""
    message = message.partition("<non-verbose/>")[0].partition("<state>")[0].strip()
    if message.startswith(OVERLAP):  # it names an option of llguidance
        message = NO_OVERLAP
    if message.startswith("NoExtension"):
        message = "no text matches it"
    if len(message) <= MAX_MESSAGE:
        return message
    _, error, reason = message.rpartition("\nerror: ")  # behind the whole regular expression
    end = (error + reason)[:MAX_REASON] if error else ""
    return f"{message[: MAX_MESSAGE - 4 - len(end)]} ...{end}"


def to_llguidance(output: StructuredOutput) -> str:
    """The grammar in llguidance's own form. Raises GrammarError for faults that show without compiling."""
    from llguidance import LLMatcher

    kind, text = output.kind, output.text
    if kind == "regex":
        return LLMatcher.grammar_from_regex(text)
    if kind == "choice":
        return LLMatcher.grammar_from_regex(_any_of(text))
    if kind == "grammar":
        if len(RULE.findall(text)) > MAX_RULES:
            raise GrammarError(f"it has more than {MAX_RULES} rules")
        return _of_lark(text)
    schema = _checked_schema(text) if kind == "json_schema" else '{"type":"object"}'
    return _of_schema(schema, lenient=output.lenient)


def _of_lark(text: str) -> str:
    from llguidance import grammar_from

    try:
        if MAY_NEED_CORRECTION.search(text):
            text = with_schemas(text, corrected)
        return grammar_from("grammar", text)
    except (ValueError, RecursionError) as error:
        raise GrammarError(shorten(str(error))) from None


def _of_schema(schema: str, *, lenient: bool) -> str:
    from llguidance import LLMatcher

    spaces: Any = {"whitespace_pattern": WHITESPACE}  # a schema may have its own in "x-guidance"
    strictness: Any = {"lenient": lenient}
    try:
        return LLMatcher.grammar_from_json_schema(corrected(schema), defaults=spaces, overrides=strictness)
    except ValueError as error:
        raise GrammarError(shorten(str(error))) from None


def _any_of(choices_json: str) -> str:
    """A regular expression for any one of the strings. Characters other than ASCII letters and digits are escaped."""
    choices = json.loads(choices_json)
    if not isinstance(choices, list) or not all(isinstance(choice, str) for choice in choices):
        raise GrammarError("the choices must be a list of strings")
    if not 1 <= len(choices) <= MAX_CHOICES:
        raise GrammarError(f"there must be 1 to {MAX_CHOICES} choices")
    return "|".join("".join(c if c.isascii() and c.isalnum() else f"\\x{{{ord(c):x}}}" for c in s) for s in choices)


def _checked_schema(text: str) -> str:
    """Return the schema text, with `true` as "{}". GrammarError if it is no JSON object or nested too deeply."""
    too_deep = GrammarError(f"it is nested deeper than {MAX_NESTING} levels")
    try:
        schema = json.loads(text)
    except RecursionError:
        raise too_deep from None
    except ValueError as error:
        raise GrammarError(f"it is not JSON: {error}") from None
    if schema is True:
        return "{}"
    if not isinstance(schema, dict):
        raise GrammarError("no text matches it" if schema is False else "a schema must be an object")
    level = [schema]
    for _ in range(MAX_NESTING):
        inner = [list(value.values()) if isinstance(value, dict) else value for value in level]
        level = [value for values in inner if isinstance(values, list) for value in values]
        if not level:
            return text
    raise too_deep
