"""Bad words as token sequences: the Worker masks tokens, not texts."""

from collections.abc import Iterable

import msgspec

from engine.errors import InvalidRequestError
from engine.sampling_params import MAX_BAD_WORD_TOKENS, SamplingParams
from engine.text.tokenizer import Tokenizer


def resolve_bans(params: SamplingParams, tokenizer: Tokenizer, eos_token_ids: Iterable[int]) -> SamplingParams:
    """`params` with the texts in bad_words replaced by token sequences: the tokenizer's encodings of the word at the
    start of a text, after a space and inside a line. Other tokens that spell the same letters stay allowed.

    Raises InvalidRequestError for a word of too many tokens, and if the bans could exclude every allowed token.
    """
    if not params.bad_words and params.allowed_token_ids is None:
        return params
    sequences: dict[tuple[int, ...], None] = {}
    for word in params.bad_words:
        for spelling in _spellings(word, tokenizer) if isinstance(word, str) else [word]:
            sequences[spelling] = None
    _check_something_is_left(params, sequences, eos_token_ids)
    return msgspec.structs.replace(params, bad_words=tuple(sequences))


def _spellings(word: str, tokenizer: Tokenizer) -> set[tuple[int, ...]]:
    line_break, bare = tokenizer.encode("\n", False), word.lstrip()
    inside = tokenizer.encode("\n" + bare, False)
    found = [tokenizer.encode(word, False), tokenizer.encode(" " + bare, False)]
    if inside[: len(line_break)] == line_break:
        found.append(inside[len(line_break) :])
    spellings = {tuple(ids) for ids in found if ids}
    if not spellings or max(map(len, spellings)) > MAX_BAD_WORD_TOKENS:
        message = f"bad_words holds a word of more than {MAX_BAD_WORD_TOKENS} tokens: shorten it."
        raise InvalidRequestError(message, "bad_words")
    return spellings


def _check_something_is_left(
    params: SamplingParams, sequences: Iterable[tuple[int, ...]], eos_token_ids: Iterable[int]
) -> None:
    """Refuse a request whose bans can exclude every allowed token: a step without tokens would fail later, and its
    error could not name the cause."""
    if params.allowed_token_ids is None:
        return
    left = set(params.allowed_token_ids) - {sequence[-1] for sequence in sequences}
    if params.min_tokens:
        left -= {*eos_token_ids, *params.stop_token_ids}
    if not left:
        message = "allowed_token_ids must hold a token that neither bad_words nor min_tokens may rule out."
        raise InvalidRequestError(message, "allowed_token_ids")
