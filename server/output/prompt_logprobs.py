"""Logprobs of prompts: for a prompt that `echo` repeats, and in vLLM's field `prompt_logprobs`."""

import codecs
from collections.abc import Sequence
from typing import Any

import msgspec

from engine.outputs import PromptLogprobs, TokenLogprobs, pack_top
from engine.text.tokenizer import Tokenizer
from server.output.logprobs import TokenNames, completion_logprobs, finite, token_names
from server.protocol.generation_request import GenerationRequest

CHARS = 64  # estimated characters of a token's logprobs, to tell short work from long


class PromptReports:
    """Logprobs of prompt tokens for a response, made once per prompt, before its first output is handled.

    `echoed` holds the four lists of completions, whose first token has nulls; a stream has the lists in `encoded`, as
    JSON. `listed` holds vLLM's objects. The tokenizer's threads make all of them, since a prompt may be long.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        request: GenerationRequest,
        texts: list[str],
        num_echoed: int | None,
        tenant: str,
    ) -> None:
        """`texts` as `echo` repeats them, for `num_echoed` alternatives to each token (None: no echo is scored)."""
        self.echoed: dict[int, dict[str, list[Any]]] = {}
        self.encoded: dict[int, bytes] = {}
        self.listed: dict[int, list[dict[str, Any] | None]] = {}
        self._stream = request.stream
        self._tokenizer = tokenizer
        self._tenant = tenant
        self._names = token_names(tokenizer, request.return_tokens_as_token_ids)
        self._texts = texts
        self._num_echoed = num_echoed
        self._num_listed = request.prompt_logprobs
        self._skip_special_tokens = request.skip_special_tokens

    async def add(self, index: int, logprobs: PromptLogprobs) -> None:
        """Make the logprobs of prompt `index`: the handler for Generation.read."""
        await self._tokenizer.run(self._tenant, CHARS * len(logprobs), self._add, index, logprobs)

    def _add(self, index: int, logprobs: PromptLogprobs) -> None:
        if self._num_echoed is not None:
            starts = text_offsets(self._tokenizer, logprobs.token_ids, self._texts[index], self._skip_special_tokens)
            lists = _completion_lists(starts, logprobs, self._num_echoed, self._names)
            if self._stream:
                self.encoded[index] = msgspec.json.encode(lists)
            else:
                self.echoed[index] = lists
        if self._num_listed is not None:
            self.listed[index] = [_listed(token, self._num_listed, self._tokenizer) for token in logprobs]


def text_offsets(tokenizer: Tokenizer, token_ids: Sequence[int], text: str, skip_special_tokens: bool) -> list[int]:
    """The offset in `text`, in characters, at which each prompt token starts. The last token of a character that has
    several counts the character.

    The tokens spell the text, with two exceptions. Some tokenizers put a space before the text and drop the space
    again. Others normalise the text first: these know the offsets themselves.
    """
    hidden = tokenizer.special_token_ids if skip_special_tokens else frozenset()
    decoder, starts, end, spelled = codecs.getincrementaldecoder("utf-8")(errors="replace"), [], 0, []
    for token_id in token_ids:
        starts.append(end)
        if token_id not in hidden:
            spelled.append(decoder.decode(tokenizer.token_bytes(token_id)))
            end += len(spelled[-1])
    spelling = "".join(spelled) + decoder.decode(b"", final=True)
    if spelling.endswith(text):
        shift = len(spelling) - len(text)
        return [max(0, start - shift) for start in starts]
    known = tokenizer.find_offsets(text, list(token_ids))
    return [min(start, len(text)) for start in known or starts]


def _completion_lists(starts: list[int], logprobs: PromptLogprobs, k: int, names: TokenNames) -> dict[str, list[Any]]:
    scored = zip(starts[1:], logprobs[1:], strict=True)
    entries = [(start, _with_top(token, k)) for start, token in scored if token is not None]
    first = names.token_text(logprobs.token_ids[0])
    nulls: dict[str, list[Any]] = {"tokens": [first], "token_logprobs": [None], "top_logprobs": [None]}
    nulls["text_offset"] = starts[:1]
    return {name: nulls[name] + values for name, values in completion_logprobs(entries, names).items()}


def _with_top(token: TokenLogprobs, k: int) -> TokenLogprobs:
    """The token with at most `k` alternatives."""
    top = token.top
    return token if len(top) <= k else TokenLogprobs(token.token_id, token.logprob, pack_top(top[:k]), token.rank)


def _listed(token: TokenLogprobs | None, k: int, tokenizer: Tokenizer) -> dict[str, Any] | None:
    """{token id: logprob, rank and text}: the prompt's own token first, then the most likely tokens."""
    if token is None:
        return None
    ranked = ((token_id, logprob, rank) for rank, (token_id, logprob) in enumerate(token.top[:k], start=1))
    found: dict[str, Any] = {}
    for token_id, logprob, rank in ((token.token_id, token.logprob, token.rank), *ranked):
        if (key := str(token_id)) not in found:
            text = tokenizer.token_text(token_id)
            found[key] = {"logprob": finite(logprob), "rank": rank, "decoded_token": text}
    return found
