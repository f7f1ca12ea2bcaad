"""is_text: what Python takes for a text may be none."""


def is_text(value: str) -> bool:
    """Whether it is Unicode: half of a surrogate pair, as which Python also passes on bytes of no text, is not."""
    try:
        value.encode("utf-8")
    except UnicodeEncodeError:
        return False
    return True
