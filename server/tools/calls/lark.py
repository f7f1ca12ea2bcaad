"""Parts of grammars in llguidance's Lark.

https://github.com/guidance-ai/llguidance/blob/main/docs/syntax.md: `<[5]>` is a token by its id, %json a JSON schema,
and a [lazy] terminal ends at its first match. llguidance never matches an added token as text, so a grammar names a
marker that is an added token by its id.
"""

import json
import re
from typing import Any

from engine.structured_output import WHITESPACE
from engine.text.tokenizer import Tokenizer
from server.protocol.tools import INPUT, FunctionDefinition, LarkFunction

CALL_SPACES = "[ ]?"  # white space between the parts of a call's JSON: models write calls on one line
ANY_TEXT = r"/(.|\n)*/"
TOKEN = re.compile(r"(<\|\w+\|>)")  # the usual spelling of special tokens inside a marker


def marker_rule(marker: str, tokenizer: Tokenizer) -> str:
    """A marker in Lark: a token by its id, a text, or a sequence of texts and tokens such as <|channel|>final."""
    token_id = tokenizer.added_token_id(marker)
    if token_id is not None:
        return f"<[{token_id}]>"
    parts = [part for part in TOKEN.split(marker) if part]
    return literal(marker) if len(parts) < 2 else " ".join(marker_rule(part, tokenizer) for part in parts)


def up_to(marker: str, text: str = r"(.|\n)*?") -> str:
    """Regex of a lazy terminal: `text`, itself a regex, followed by the first `marker`."""
    return f"/{text}{escaped(marker)}/"


def escaped(text: str) -> str:
    """A regex that matches exactly `text`."""
    return "".join(c if c.isalnum() or c == "_" else f"\\x{{{ord(c):x}}}" for c in text)


def regex(pattern: str) -> str:
    """`pattern` in the form that Lark needs between slashes."""
    return re.sub(r"(?<!\\)((?:\\\\)*)/", r"\1\\/", pattern).replace("\n", "\\n")


def literal(text: str) -> str:
    return json.dumps(text)


def arguments_rules(label: str, function: FunctionDefinition) -> list[str]:
    """The rule `arguments_{label}`, a JSON object of a call's arguments, and the rules that it uses."""
    if isinstance(function, LarkFunction):
        start = literal(f'{{"{INPUT}": "')
        return [f'arguments_{label}: {start} input_{label} "}}"', input_rule(label, function)]
    return [f"arguments_{label}: {json_rule(function.schema, function.strict, CALL_SPACES)}"]


def input_rule(label: str, function: LarkFunction) -> str:
    """The rule `input_{label}`: a JSON string without its opening quote."""
    return f"input_{label}: %lark {{\n{function.quoted}}}"


def json_rule(schema: dict[str, Any], strict: bool, spaces: str = WHITESPACE) -> str:
    """JSON that obeys `schema`. Keywords that cannot be enforced are an error if `strict`, else they are ignored."""
    options = {"whitespace_pattern": spaces, "lenient": not strict}
    return "%json " + json.dumps({**schema, "x-guidance": options})
