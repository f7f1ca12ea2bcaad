"""How tokens are named in logprobs."""

from typing import Protocol

from engine.text.tokenizer import Tokenizer


class TokenNames(Protocol):
    """What logprobs need of a tokenizer."""

    def token_text(self, token_id: int) -> str: ...
    def token_bytes(self, token_id: int) -> bytes: ...


class TokenIds:
    """`return_tokens_as_token_ids`: "token_id:" and the id in place of the text, which two tokens may share."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.token_bytes = tokenizer.token_bytes

    def token_text(self, token_id: int) -> str:
        return f"token_id:{token_id}"


def token_names(tokenizer: Tokenizer, as_token_ids: bool) -> TokenNames:
    return TokenIds(tokenizer) if as_token_ids else tokenizer
