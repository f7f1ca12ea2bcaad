"""What a model thinks before it answers, between <think> and </think>: where it begins and ends, in tokens.

Worker and server read the tokens of an answer with the same ThinkingScan. So the limit on the thinking
(`thinking_token_budget`) is a function of the tokens alone: a sequence that was preempted, or that another Worker
computes again, is forced to close its thinking at the same place.

A tag is one token in most vocabularies of models that think, and several in others: ".</" "think" ">\\n" closes the
thinking, too. Each tag is therefore an automaton over tokens; its state is the number of characters of the tag that
the text ends with.
"""

from collections.abc import Iterable, Mapping

import msgspec

from engine.errors import InvalidRequestError
from engine.sampling_params import SamplingParams

BEGIN, END = "<think>", "</think>"
SPACE = b" \t\r\n"  # may stand before the first tag
NOT_THINKING = -1  # the state of a text that begins with something else than the first tag
FIELD = "thinking_token_budget"


class ThinkingTags(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """The tags of one vocabulary; the Driver sends them to every Worker before any plan. Tokens that are in neither
    table are text without any part of a tag.

    begin: token id -> the state after it, for each state before it, NOT_THINKING where the answer begins otherwise.
    end: token id -> (the state after it, `start`) for each state before it. `start` says where the part of the tag with
    which the text now ends begins: -1 in an earlier token, 0 with this token, 1 within it.
    closing: for each state that the tokens can reach, those that complete the closing tag.
    """

    begin: dict[int, list[int]]
    end: dict[int, list[tuple[int, int]]]
    closing: list[list[int]]


class ThinkingScan:
    """Follows the tokens of one answer. `num_tokens` of them so far are thinking; tags do not count."""

    def __init__(self, tags: ThinkingTags, opened: bool) -> None:
        """`opened`: the prompt has begun the thinking. Else it may begin with the first text, and nowhere later."""
        self._tags = tags
        self._state = 0
        self._before_tag = 0  # thinking tokens before the part of the closing tag that is there
        self.inside = opened
        self.over = False  # the thinking has ended, or there is none
        self.num_tokens = 0

    def take(self, token_ids: Iterable[int]) -> None:
        """The next tokens of the answer."""
        for token_id in token_ids:
            if self.over:
                return
            if self.inside:
                self._take_thought(token_id)
            else:
                self._take_begin(token_id)

    def next_closing_token(self) -> int:
        """The token that goes on with the closing tag, from as much of it as is there."""
        return self._tags.closing[self._state][0]

    def _take_begin(self, token_id: int) -> None:
        states = self._tags.begin.get(token_id)
        self._state = NOT_THINKING if states is None else states[self._state]
        if self._state == len(BEGIN):
            self.inside, self._state = True, 0
        self.over = self._state == NOT_THINKING

    def _take_thought(self, token_id: int) -> None:
        moves = self._tags.end.get(token_id)
        self._state, start = (0, 0) if moves is None else moves[self._state]
        if start >= 0:
            self._before_tag = self.num_tokens + start
        self.num_tokens += 1
        if self._state == len(END):
            self.num_tokens, self.inside, self.over = self._before_tag, False, True


def find_tags(token_bytes: Mapping[int, bytes], silent: Iterable[int], end_token_id: int | None) -> ThinkingTags | None:
    """The tags in a vocabulary, from the bytes that each token adds to a text. `silent` tokens add none; `end_token_id`
    is the closing tag, where that is one token. None where no tokens spell it."""
    begin: dict[int, list[int]] = {}
    end: dict[int, list[tuple[int, int]]] = {}
    for token_id, text in token_bytes.items():
        if text and (text[0] in SPACE or text[0] in BEGIN.encode()):
            states = [_begin_state(text, state) for state in range(len(BEGIN))]
            if max(states) > NOT_THINKING:
                begin[token_id] = states
        if text and (text[0] in END.encode() or b"<" in text):
            moves = [_end_move(text, state) for state in range(len(END))]
            if any(state for state, _ in moves):
                end[token_id] = moves
    for token_id in silent:
        begin[token_id] = list(range(len(BEGIN)))
        end[token_id] = [(state, -1) for state in range(len(END))]
    if end_token_id is not None:  # to a grammar of the answer, only this token is the tag
        return ThinkingTags(begin, end, [[end_token_id]] * len(END))
    parts = {text: token_id for token_id, text in token_bytes.items() if text and text in END.encode()}
    closing = [_spell(END.encode()[state:], parts) for state in range(len(END))]
    reached = {0, *(state for moves in end.values() for state, _ in moves if state < len(END))}
    return ThinkingTags(begin, end, closing) if all(closing[state] for state in reached) else None


def check_budget(params: SamplingParams, tags: ThinkingTags | None) -> None:
    """Raise InvalidRequestError where the thinking of a request cannot be held to its limit."""
    if params.thinking_token_budget is None:
        return
    if tags is None:
        message = (
            f"{FIELD}: this model does not think between {BEGIN} and {END}, so nothing can be limited: leave it out."
        )
        raise InvalidRequestError(message, FIELD, "unsupported_value")
    closing = tags.closing[0]
    if params.allowed_token_ids is not None and not set(closing) <= set(params.allowed_token_ids):
        message = f"allowed_token_ids must hold the tokens of {END} ({', '.join(map(str, closing))}) with {FIELD}."
        raise InvalidRequestError(message, "allowed_token_ids")
    if any(_is_part(word, closing) for word in params.bad_words if not isinstance(word, str)):
        raise InvalidRequestError(f"bad_words may not hold a part of {END} with {FIELD}.", "bad_words")


def _begin_state(text: bytes, state: int) -> int:
    """After `text` behind `state` characters of the first tag; what follows a whole tag does not matter."""
    for byte in text:
        if state == 0 and byte in SPACE:
            continue
        if byte != ord(BEGIN[state]):
            return NOT_THINKING
        state += 1
        if state == len(BEGIN):
            break
    return state


def _end_move(text: bytes, state: int) -> tuple[int, int]:
    """(the state, where the tag begins) after `text`. No two characters of the closing tag are the same, so a text that
    leaves it can only begin it anew."""
    start = -1
    for i, byte in enumerate(text):
        if byte == ord(END[state]):
            start = min(i, 1) if state == 0 else start
            state += 1
        else:
            state, start = int(byte == ord(END[0])), min(i, 1)
        if state == len(END):
            break
    return state, start


def _spell(text: bytes, parts: Mapping[bytes, int]) -> list[int]:
    """Tokens that add up to `text`, the longest first; empty where there are none."""
    for length in range(len(text), 0, -1):
        if (token_id := parts.get(text[:length])) is not None:
            if length == len(text):
                return [token_id]
            if rest := _spell(text[length:], parts):
                return [token_id, *rest]
    return []


def _is_part(word: tuple[int, ...], tokens: list[int]) -> bool:
    return any(tuple(tokens[i : i + len(word)]) == word for i in range(len(tokens) - len(word) + 1))
