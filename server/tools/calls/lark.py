"""Parts of grammars in Lark as llguidance reads it.

https://github.com/guidance-ai/llguidance/blob/main/docs/syntax.md: `<[5]>` is a token by its id, %json a JSON schema,
and a [lazy] terminal ends where it first matches. To that library every added token is apart from text, so a marker
that is one is named by its id.
"""

import json
import re
from typing import Any

from engine.structured_output import WHITESPACE
from engine.text.tokenizer import Tokenizer
from server.protocol.tools import INPUT, FunctionDefinition, LarkFunction

CALL_SPACES = "[ ]?"  # between parts of a call's JSON: models write calls on one line
ANY_TEXT = r"/(.|\n)*/"


def marker_rule(marker: str, tokenizer: Tokenizer) -> str:
    token_id = tokenizer.added_token_id(marker)
    return literal(marker) if token_id is None else f"<[{token_id}]>"


def up_to(marker: str, text: str = r"(.|\n)*?") -> str:
    """For a lazy terminal: `text`, a regex, through the first `marker`."""
    return f"/{text}{escaped(marker)}/"


def escaped(text: str) -> str:
    """A regex of just this text."""
    return "".join(c if c.isalnum() or c == "_" else f"\\x{{{ord(c):x}}}" for c in text)


def regex(pattern: str) -> str:
    """As it stands between slashes."""
    return re.sub(r"(?<!\\)((?:\\\\)*)/", r"\1\\/", pattern).replace("\n", "\\n")


def literal(text: str) -> str:
    return json.dumps(text)


def arguments_rules(label: str, function: FunctionDefinition) -> list[str]:
    """`arguments_{label}`, the JSON object of a call's arguments, and what it needs."""
    if isinstance(function, LarkFunction):
        start = literal(f'{{"{INPUT}": "')
        return [f'arguments_{label}: {start} input_{label} "}}"', input_rule(label, function)]
    return [f"arguments_{label}: {json_rule(function.schema, function.strict, CALL_SPACES)}"]


def input_rule(label: str, function: LarkFunction) -> str:
    """A JSON string without its opening quote."""
    return f"input_{label}: %lark {{\n{function.quoted}}}"


def json_rule(schema: dict[str, Any], strict: bool, spaces: str = WHITESPACE) -> str:
    """Keywords that cannot be enforced are an error with `strict`, and passed over without."""
    options = {"whitespace_pattern": spaces, "lenient": not strict}
    return "%json " + json.dumps({**schema, "x-guidance": options})
