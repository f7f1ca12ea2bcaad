"""Signatures of thinking blocks: with `display: "omitted"` the text travels in them, and comes back with the history.

Anthropic's signatures are encrypted. Ours are base64 of the text after a mark: whoever asked may read what they asked
for. A signature that another server made is not thinking of this model.
"""

import base64
from typing import Any

MARK = "pageserve:"


def signature_of(thinking: str) -> str:
    return MARK + base64.b64encode(thinking.encode("utf-8", "surrogatepass")).decode("ascii")


def omitted_thinking(signature: Any) -> str:
    """What `signature_of` was given; "" for every other signature."""
    if not isinstance(signature, str) or not signature.startswith(MARK):
        return ""
    try:
        return base64.b64decode(signature.removeprefix(MARK), validate=True).decode()
    except ValueError:
        return ""
