"""The fake model: the next token is a function of the chain of everything before it, the seed and the position."""

from dataclasses import dataclass

from engine.outputs import FinishReason
from engine.sampling_params import SamplingParams

VOCAB_SIZE = 260
EOS_TOKEN_ID = 257
SEED_STEP = 0x9E3779B97F4A7C15  # samples of one request: the Driver's rule

_MASK = 2**63 - 1  # contents are int64 and never negative; negative numbers are poison


def mix(a: int, b: int) -> int:
    """63 bits that depend on both (the finaliser of splitmix64, Steele et al. 2014, cut to 63 bits)."""
    x = (a * 0xBF58476D1CE4E5B9 + b * 0x94D049BB133111EB + 0x2545F4914F6CDD1D) & _MASK
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & _MASK
    return x ^ (x >> 31)


def root_of(salt: str, weights: str) -> str:
    """The salt of a request and the weights of its adapter, if it has one: contents depend on both."""
    return f"{salt}\0{weights}" if weights else salt


def chain_start(root: str) -> int:
    chain, data = 17, root.encode()
    for start in range(0, max(1, len(data)), 8):
        chain = mix(chain, int.from_bytes(data[start : start + 8], "little"))
    return chain


def chain_next(previous: int, token_id: int, position: int) -> int:
    """The content of a token's KV slot: it depends on all tokens before, as a layer's keys and values do."""
    return mix(previous, (position << 10) | token_id)


@dataclass(frozen=True, slots=True)
class FakeModel:
    """One end of sequence in `eos_every` tokens, one failure in `fail_every` (0: never); else `alphabet` letters."""

    alphabet: int = 26
    eos_every: int = 0
    fail_every: int = 0

    def fails(self, seed: int, position: int) -> bool:
        """Whether the logits are not finite there."""
        return self.fail_every > 0 and mix(seed ^ 0x5EED, position) % self.fail_every == 0

    def next_token(self, chain: int, seed: int, position: int) -> int:
        drawn = mix(chain ^ (seed & _MASK), position)
        if self.eos_every and drawn % self.eos_every == 0:
            return EOS_TOKEN_ID
        return 97 + (drawn >> 20) % self.alphabet


@dataclass(frozen=True, slots=True)
class Reference:
    """The tokens that a sample must have, whatever it was batched with. ERROR: its logits fail after `token_ids`."""

    token_ids: list[int]
    finish_reason: FinishReason
    stop_reason: str | int | None
    text: str


def reference(
    model: FakeModel, prompt: list[int], params: SamplingParams, seed: int, salt: str, max_num_tokens: int
) -> Reference:
    """The oracle: one sample, unbatched, nothing cached."""
    chain, position = chain_start(salt), 0
    for position, token_id in enumerate(prompt):
        chain = chain_next(chain, token_id, position)
    token_ids: list[int] = []
    text = ""
    while True:
        position += 1
        if model.fails(seed, position):
            return Reference(token_ids, FinishReason.ERROR, None, text)
        token_id = model.next_token(chain, seed, position)
        chain = chain_next(chain, token_id, position)
        token_ids.append(token_id)
        enough = len(token_ids) >= params.min_tokens
        by_id = enough and token_id in params.stop_token_ids
        by_eos = enough and token_id == EOS_TOKEN_ID and not params.ignore_eos
        if token_id != EOS_TOKEN_ID and (params.include_stop_str_in_output or not (by_id or by_eos)):
            text += chr(token_id)
        if found := [(at + len(stop), at, stop) for stop in params.stop if (at := text.find(stop)) >= 0]:
            end, start, stop = min(found)
            cut = end if params.include_stop_str_in_output else start
            return Reference(token_ids, FinishReason.STOP, stop, text[:cut])
        if by_id or by_eos:
            return Reference(token_ids, FinishReason.STOP, token_id if by_id else None, text)
        if len(prompt) + len(token_ids) >= max_num_tokens:
            return Reference(token_ids, FinishReason.LENGTH, None, text)
