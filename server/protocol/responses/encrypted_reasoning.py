"""`encrypted_content` of reasoning items: the thoughts, for clients that keep nothing else of them.

It hides nothing, for the thoughts stand beside it, and needs no key: any server of this kind reads it, also after a
restart. The check sum tells it from what other servers have made, which nobody can read here.
"""

import base64
import binascii
import hashlib

PREFIX = "pageserve.1."
CHECK_BYTES = 8


def encode_reasoning(text: str) -> str:
    data = text.encode("utf-8", "replace")
    return PREFIX + base64.urlsafe_b64encode(_check(data) + data).decode()


def decode_reasoning(content: str) -> str | None:
    """None for what was not made here."""
    if not content.startswith(PREFIX):
        return None
    try:
        whole = base64.b64decode(content[len(PREFIX) :].encode(), altchars=b"-_", validate=True)
        data = whole[CHECK_BYTES:]
        return data.decode() if whole[:CHECK_BYTES] == _check(data) else None
    except (binascii.Error, ValueError):
        return None


def _check(data: bytes) -> bytes:
    return hashlib.sha256(data).digest()[:CHECK_BYTES]
