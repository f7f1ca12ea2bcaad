"""is_valid_unicode: a Python str may hold lone surrogates, which no UTF-8 text can."""


def is_valid_unicode(value: str) -> bool:
    """False for lone surrogates, including those that the error handler surrogateescape makes of undecodable bytes."""
    try:
        value.encode("utf-8")
    except UnicodeEncodeError:
        return False
    return True
