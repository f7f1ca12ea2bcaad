"""`encrypted_content` of reasoning items: the reasoning text, for clients that keep only this field of the item.

The field hides nothing (the text stands beside it in the answer) and needs no key, so every pageserve can read it, also
after a restart. A checksum distinguishes it from the encrypted content of other servers, which cannot be read here.
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
    """The text that `encode_reasoning` was given; None for content that another server made."""
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
