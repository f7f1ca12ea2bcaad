"""Signatures of thinking blocks. With `display: "omitted"` they carry the text, and come back with the history.

Anthropic's signatures are encrypted. Ours are a mark followed by the text in base64: the client may read the thinking
of its own request. A signature that another server made holds no thinking that this model could read.
"""

import base64
from typing import Any

MARK = "pageserve:"


def signature_of(thinking: str) -> str:
    return MARK + base64.b64encode(thinking.encode("utf-8", "surrogatepass")).decode("ascii")


def omitted_thinking(signature: Any) -> str:
    """The text that `signature_of` was given; "" for signatures that another server made."""
    if not isinstance(signature, str) or not signature.startswith(MARK):
        return ""
    try:
        return base64.b64decode(signature.removeprefix(MARK), validate=True).decode()
    except ValueError:
        return ""
