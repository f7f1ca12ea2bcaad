"""ThinkingScan: finds the thinking of a model, between <think> and </think>, in the tokens of an answer.

Worker and server scan the tokens with the same class. The limit on the thinking (`thinking_token_budget`) therefore
depends on the tokens alone: a sequence that was preempted, or is recomputed by another Worker, is forced to close its
thinking at the same position.

In most vocabularies of thinking models a tag is one token, in others several: ".</" "think" ">\\n" closes the thinking,
too. Each tag is therefore an automaton over tokens. Its state is the number of characters of the tag at the end of the
text.
"""

from collections.abc import Iterable, Mapping

import msgspec

from engine.errors import InvalidRequestError
from engine.sampling_params import SamplingParams

BEGIN, END = "<think>", "</think>"
SPACE = b" \t\r\n"  # allowed before the first tag
NOT_THINKING = -1  # state of an answer that does not begin with the first tag
FIELD = "thinking_token_budget"


class ThinkingTags(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """The automata of both tags for one vocabulary. The Driver sends them to every Worker before any plan. A token in
    neither table holds no character of a tag.

    begin: token id -> list of next states, indexed by state; NOT_THINKING if the answer does not begin with the tag.
    end: token id -> list of (next state, `start`), indexed by state. `start` is where the matched part of the tag
    begins: -1 in an earlier token, 0 at the start of this token, 1 inside this token.
    closing: for each reachable state, the token ids that complete the closing tag.
    """

    begin: dict[int, list[int]]
    end: dict[int, list[tuple[int, int]]]
    closing: list[list[int]]


class ThinkingScan:
    """Follows the tokens of one answer. `num_tokens`: thinking tokens so far, tags not counted."""

    def __init__(self, tags: ThinkingTags, opened: bool) -> None:
        """`opened`: the prompt ends with the opening tag. If not, only the first text of the answer may be that tag."""
        self._tags = tags
        self._state = 0
        self._before_tag = 0  # thinking tokens before the matched part of the closing tag
        self.inside = opened
        self.over = False  # the thinking has ended, or the answer has none
        self.num_tokens = 0

    def feed(self, token_ids: Iterable[int]) -> None:
        """Scan the next tokens of the answer."""
        for token_id in token_ids:
            if self.over:
                return
            if self.inside:
                self._scan_thought(token_id)
            else:
                self._scan_begin(token_id)

    def next_closing_token(self) -> int:
        """The token that continues the closing tag from its matched part."""
        return self._tags.closing[self._state][0]

    def _scan_begin(self, token_id: int) -> None:
        states = self._tags.begin.get(token_id)
        self._state = NOT_THINKING if states is None else states[self._state]
        if self._state == len(BEGIN):
            self.inside, self._state = True, 0
        self.over = self._state == NOT_THINKING

    def _scan_thought(self, token_id: int) -> None:
        moves = self._tags.end.get(token_id)
        self._state, start = (0, 0) if moves is None else moves[self._state]
        if start >= 0:
            self._before_tag = self.num_tokens + start
        self.num_tokens += 1
        if self._state == len(END):
            self.num_tokens, self.inside, self.over = self._before_tag, False, True


def find_tags(token_bytes: Mapping[int, bytes], silent: Iterable[int], end_token_id: int | None) -> ThinkingTags | None:
    """Build the automata of a vocabulary from the bytes that each token adds to a text. `silent` tokens add none.
    `end_token_id` is the closing tag if one token spells it. None if no tokens spell the closing tag."""
    begin = {token_id: states for token_id, text in token_bytes.items() if (states := _begin_states(text))}
    end = {token_id: moves for token_id, text in token_bytes.items() if (moves := _end_moves(text))}
    for token_id in silent:
        begin[token_id] = list(range(len(BEGIN)))
        end[token_id] = [(state, -1) for state in range(len(END))]
    if end_token_id is not None:  # a grammar of the answer knows only this token as the tag
        return ThinkingTags(begin, end, [[end_token_id]] * len(END))
    parts = {text: token_id for token_id, text in token_bytes.items() if text and text in END.encode()}
    closing = [_spell(END.encode()[state:], parts) for state in range(len(END))]
    reached = {0, *(state for moves in end.values() for state, _ in moves if state < len(END))}
    return ThinkingTags(begin, end, closing) if all(closing[state] for state in reached) else None


def check_budget(params: SamplingParams, tags: ThinkingTags | None) -> None:
    """Raise InvalidRequestError if thinking_token_budget cannot be enforced for this request."""
    if params.thinking_token_budget is None:
        return
    if tags is None:
        message = (
            f"{FIELD}: this model does not think between {BEGIN} and {END}, so there is no thinking to limit: leave it "
            "out."
        )
        raise InvalidRequestError(message, FIELD, "unsupported_value")
    closing = tags.closing[0]
    if params.allowed_token_ids is not None and not set(closing) <= set(params.allowed_token_ids):
        message = f"allowed_token_ids must hold the tokens of {END} ({', '.join(map(str, closing))}) with {FIELD}."
        raise InvalidRequestError(message, "allowed_token_ids")
    if any(_is_part(word, closing) for word in params.bad_words if not isinstance(word, str)):
        raise InvalidRequestError(f"bad_words may not hold a part of {END} with {FIELD}.", "bad_words")


def _begin_states(text: bytes) -> list[int]:
    """ThinkingTags.begin of a token; empty for a token that can stand neither before the first tag nor in it."""
    if not text or (text[0] not in SPACE and text[0] not in BEGIN.encode()):  # most tokens
        return []
    states = [_begin_state(text, state) for state in range(len(BEGIN))]
    return states if max(states) > NOT_THINKING else []


def _end_moves(text: bytes) -> list[tuple[int, int]]:
    """ThinkingTags.end of a token; empty for a token that holds no character of the closing tag."""
    if not text or (text[0] not in END.encode() and b"<" not in text):  # most tokens
        return []
    moves = [_end_move(text, state) for state in range(len(END))]
    return moves if any(state for state, _ in moves) else []


def _begin_state(text: bytes, state: int) -> int:
    """The state after `text`, from `state` characters of the first tag. Characters after a whole tag are ignored."""
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
    """(next state, start of the tag) after `text`. The characters of the closing tag are all different, so after a
    mismatch the tag can only start again at the mismatched character."""
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
    """Token ids whose bytes join to `text`, longest token first; empty if there are none."""
    for length in range(len(text), 0, -1):
        if (token_id := parts.get(text[:length])) is not None:
            if length == len(text):
                return [token_id]
            if rest := _spell(text[length:], parts):
                return [token_id, *rest]
    return []


def _is_part(word: tuple[int, ...], tokens: list[int]) -> bool:
    return any(tuple(tokens[i : i + len(word)]) == word for i in range(len(tokens) - len(word) + 1))
