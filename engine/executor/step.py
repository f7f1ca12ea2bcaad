"""The whole language between Driver and Worker: plain numbers, as msgpack in frames (engine/executor/frames.py).

A socket pair carries the messages; there is no pickle and no TCP port. The Driver sends StartWorker, then one StepPlan
after the other. The Worker answers with LoadProgress while it loads, then WorkerReady or WorkerFailed, then one
StepResult per StepPlan, in order. A Worker without a plan gets a Heartbeat now and then, and sends it back. A plan is a
diff: a sequence's full data crosses once (NewSequence), then only new block ids. SleepWorker ends the plans: the Worker
answers WorkerAsleep and ends, or, at level 1, waits for WakeWorker and answers WorkerReady again.

The next plan may be sent before the last result is back (overlapped scheduling). The Worker therefore keeps the tokens
that it sampled: a SequenceStep counts a token that the Driver has not seen yet, and does not name it.
"""

from typing import Any

import msgspec

import engine.errors
from engine.config import EngineConfig
from engine.errors import EngineError, PageserveError
from engine.executor.frames import pack_frame
from engine.outputs import PromptScores, unpack_top
from engine.sampling_params import SamplingParams
from engine.structured_output import StructuredOutput, Vocabulary
from engine.thinking import ThinkingTags


class Place(msgspec.Struct, frozen=True, array_like=True):
    """The place of a Worker process: its rank in a tensor-parallel group of `size`, the file at which the ranks meet
    (engine/models/parallel/ranks.py), and the GPU of the first rank."""

    rank: int = 0
    size: int = 1
    rendezvous: str = ""
    first_gpu: int | None = None

    @property
    def gpu(self) -> int | None:
        """The index of this rank's GPU; None: the only process of the server takes the current one."""
        if self.first_gpu is None and self.size == 1:
            return None
        return (self.first_gpu or 0) + self.rank


ONE_PLACE = Place()


class StartWorker(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """The first message: everything that the Worker needs to load. `model_dir` is a local folder."""

    config: EngineConfig
    model_dir: str
    eos_token_ids: list[int]
    model_identity: bytes = b""
    place: Place = ONE_PLACE
    draft_dir: str = ""  # the folder of the draft model, if there is one


class LoadProgress(msgspec.Struct, frozen=True, array_like=True, tag=True):
    phase: str  # shown at /ready: "importing", "loading weights", "profiling", "compiling" ...


class CacheCosts(msgspec.Struct, frozen=True, array_like=True):
    """Seconds that the Worker measured: a n + b n^2 to compute the first n tokens of a sequence, c + d n to load n."""

    compute_linear: float
    compute_quadratic: float
    load_fixed: float
    load_linear: float

    def compute(self, num_before: int, num_tokens: int) -> float:
        """Seconds to compute `num_tokens` tokens that follow `num_before` others."""
        end = num_before + num_tokens
        return self.compute_linear * num_tokens + self.compute_quadratic * (end**2 - num_before**2)

    def load(self, num_tokens: int) -> float:
        """Seconds to load `num_tokens` tokens from host memory."""
        return self.load_fixed + self.load_linear * num_tokens


class WorkerReady(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """The Worker has loaded and profiled the model: sizes, and settings that depend on the device."""

    num_blocks: int
    max_model_len: int
    max_num_seqs: int
    max_num_batched_tokens: int
    vocab_size: int  # width of the logits: the bound of every token id
    device: str
    dtype: str
    memory: dict[str, int]  # bytes: weights, kv_cache, activations ... for logs and /metrics
    num_host_blocks: int = 0  # slots of the host tier
    cache_costs: CacheCosts | None = None
    disk_digests: list[bytes] = []  # the blocks that the disk tier claims to hold, the oldest first
    num_disk_blocks: int = 0  # the most blocks that the disk tier holds
    kv_cache_dtype: str = ""  # the storage format of keys and values: the value of dtype, or "int8", "fp8", "int4"
    hidden_size: int = 0  # numbers in an embedding
    encoder: bool = False  # a whole sequence in one step, without a KV cache
    embeds_only: bool = False  # the model generates no text, as no encoder does


class WorkerFailed(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Loading failed; `kind` is the class name in engine.errors ("ModelError", "ConfigError", "EngineError")."""

    kind: str
    message: str


def named_error(message: WorkerFailed) -> PageserveError:
    """The error that a Worker names."""
    kind = getattr(engine.errors, message.kind, EngineError)
    error = kind(message.message)
    assert isinstance(error, PageserveError)
    return error


class NewSequence(msgspec.Struct, frozen=True, array_like=True):
    """A sequence that the Worker does not hold: new, resumed after preemption (then token_ids go past the prompt), or a
    hypothesis of a beam search that continues with another token than the Worker sampled.

    `block_ids` is the block table before this step; the first `num_computed_tokens` tokens are in the cache already
    (prefix hits). `seed` drives the counter-based draw of every position. A fork starts with all tokens computed: its
    first token is drawn from the logits of the sequence `fork_of`, which the same step computes. With
    params.prompt_logprobs the first `num_scored_tokens` of the prompt need no logprobs (the very first never has any).
    """

    seq_id: int
    token_ids: list[int]
    num_prompt_tokens: int
    num_computed_tokens: int
    block_ids: list[int]
    params: SamplingParams
    seed: int
    fork_of: int | None = None
    num_scored_tokens: int = 1
    adapter_id: int = 0  # as in LoadAdapter; 0: the base model


class BlockCopy(msgspec.Struct, frozen=True, array_like=True):
    """Copy-on-write: block `target` becomes a copy of `source` and takes its place, the last of the block table."""

    seq_id: int
    source: int
    target: int


class BlockMove(msgspec.Struct, frozen=True, array_like=True):
    """A move between a block of the pool and a slot of the host tier. An offload with a `digest` is kept by the disk
    tier, too."""

    block_id: int
    slot: int
    digest: bytes = b""


class FetchBlocks(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Read a chain of blocks from the disk tier into slots of the host tier, in parallel to steps."""

    fetch_id: int
    digests: list[bytes]
    slots: list[int]


class FetchedBlocks(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """The first `num_blocks` of a FetchBlocks are in their slots; the next one is missing or damaged."""

    fetch_id: int
    num_blocks: int


class Heartbeat(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Sent to a Worker without a plan. The Worker sends it back after it has checked that its device answers."""


class PrepareGrammar(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Compile a structured output that later sequences need, in parallel to steps. A Vocabulary was sent before."""

    output: StructuredOutput


class GrammarPrepared(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """The answer to PrepareGrammar: the digest of the StructuredOutput, and "" or the reason why it did not compile."""

    digest: bytes
    error: str


class LoadAdapter(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Read a LoRA adapter from a local folder, in parallel to steps. With a `digest`, its files must still be those."""

    adapter_id: int
    path: str
    digest: bytes = b""


class AdapterLoaded(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """The answer to LoadAdapter: the digest of the adapter's files and its bytes in memory, or an error."""

    adapter_id: int
    digest: bytes = b""
    error: str = ""
    num_bytes: int = 0


class UnloadAdapter(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Forget an adapter; no later sequence uses it."""

    adapter_id: int


class SequenceStep(msgspec.Struct, frozen=True, array_like=True):
    """Compute the next `num_tokens` tokens of a sequence. With `sample`, the step reaches the last known token, and
    samples the next.

    Every sequence of a step has a SequenceStep, a new sequence, too. The SequenceStep of a fork computes no token.
    """

    seq_id: int
    num_tokens: int
    sample: bool
    new_block_ids: list[int]


OPEN_TOKEN = -1  # a token of a draft that the Worker's draft model proposes


class Draft(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Tokens proposed to follow the last known token of a sequence that decodes in this step; all of them OPEN_TOKEN in
    a draft that is open."""

    seq_id: int
    token_ids: list[int]

    @property
    def is_open(self) -> bool:
        return self.token_ids[0] == OPEN_TOKEN


class StepPlan(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """One step. The Worker applies its fields in this order: `removed` (finished, aborted or preempted sequences), then
    `new`, then the moves of blocks, then the computation.

    Blocks are read before they are overwritten: first `offloads` go from the pool to the host, then `block_copies` are
    made in order (the target of a copy may be the source of an earlier one), then `loads` come back.

    `decodes` are sequences that the Worker holds, that compute their last known token and sample the next. Most steps
    hold nothing else, so decodes are a column of ids. `decode_blocks` holds pairs: the id of a decode, and a block
    that it gets for its token and its draft. `chunks` holds all other sequences of the step.

    `drafts`: decodes that compute proposed tokens, too. The Worker samples a token at each of their positions and keeps
    the tokens up to the first one that differs from the draft (StepResult.verified).
    """

    step_id: int
    removed: list[int]
    new: list[NewSequence]
    block_copies: list[BlockCopy]
    chunks: list[SequenceStep]
    offloads: list[BlockMove] = []
    loads: list[BlockMove] = []
    decodes: list[int] = []
    decode_blocks: list[int] = []
    drafts: list[Draft] = []

    @property
    def num_rows(self) -> int:
        """Tokens that the decodes and their drafts compute."""
        return len(self.decodes) + sum([len(draft.token_ids) for draft in self.drafts])

    @property
    def num_tokens(self) -> int:
        """Tokens that this step computes."""
        return self.num_rows + sum([step.num_tokens for step in self.chunks])

    @property
    def seq_ids(self) -> list[int]:
        """The sequences that compute or sample in this step."""
        return [*self.decodes, *[step.seq_id for step in self.chunks]]

    @property
    def steps(self) -> tuple[SequenceStep, ...]:
        """Decodes, without their drafts, and chunks in the same form; slower to read than the columns."""
        blocks: dict[int, list[int]] = {}
        for seq_id, block_id in zip(self.decode_blocks[::2], self.decode_blocks[1::2], strict=True):
            blocks.setdefault(seq_id, []).append(block_id)
        decodes = (SequenceStep(seq_id, 1, True, blocks.get(seq_id, [])) for seq_id in self.decodes)
        return *decodes, *self.chunks


class SleepWorker(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Leave the device. `flush` is a last plan, which moves cached prefixes to the host; the Worker sends no result of
    it. At level 1 the Worker keeps its weights and its host tier, at level 2 it ends."""

    level: int
    flush: StepPlan | None = None


class WorkerAsleep(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """The answer to SleepWorker: every plan before is done, and the device memory is free (level 1) or will be as soon
    as the process has ended (level 2). A Heartbeat between the two messages gets no answer."""


class WakeWorker(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Sent to a Worker that sleeps at level 1, which loads again from its host memory."""


class SampledToken(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """`logprob` and `packed_top` (see engine.outputs.pack_top) are set if the sequence asked for logprobs."""

    seq_id: int
    token_id: int
    logprob: float = 0.0
    packed_top: bytes = b""

    @property
    def top(self) -> list[tuple[int, float]]:
        """(token_id, logprob), most likely first."""
        return list(zip(*unpack_top(self.packed_top), strict=True))


class StepResult(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """The sampled tokens of a step: columns `seq_ids` and `token_ids`, and `detailed` for tokens with logprobs.

    `verified` has the tokens of each sequence with a draft, at least one, in order: all but the last equal the draft.
    The token of a sequence with max_tokens 0 only reports that its prompt is computed; the Driver drops it. An embedded
    sequence has an entry in `vectors` instead: its fp32 numbers (little-endian).
    `draft_seconds` of `compute_seconds` went to the draft model.
    `failed` maps a sequence to the reason why it alone could not be sampled (non-finite logits, for example).
    `slow_masks` has the processor seconds that the masks of some sequences took, if that was long.
    """

    step_id: int
    detailed: list[SampledToken]
    failed: dict[int, str]
    compute_seconds: float
    seq_ids: list[int] = []
    token_ids: list[int] = []
    prompt_scores: list[PromptScores] = []
    vectors: dict[int, bytes] = {}
    verified: list[list[SampledToken]] = []
    draft_seconds: float = 0.0
    slow_masks: dict[int, float] = {}

    def __post_init__(self) -> None:
        if len(self.seq_ids) != len(self.token_ids):  # decoding fails, as for any message that is malformed
            raise ValueError(f"{len(self.seq_ids)} sequences, but {len(self.token_ids)} tokens")

    @property
    def samples(self) -> list[SampledToken]:
        """All sampled tokens in the same form."""
        verified = [token for tokens in self.verified for token in tokens]
        return [*map(SampledToken, self.seq_ids, self.token_ids), *self.detailed, *verified]


# Handled in parallel to steps.
SideMessage = FetchBlocks | Vocabulary | PrepareGrammar | ThinkingTags | LoadAdapter | UnloadAdapter
SideAnswer = FetchedBlocks | GrammarPrepared | AdapterLoaded | WorkerAsleep  # answers to other messages than plans
Answer = StepResult | SideAnswer  # answers of a loaded Worker
DriverMessage = StartWorker | StepPlan | SideMessage | Heartbeat | SleepWorker | WakeWorker
WorkerMessage = LoadProgress | WorkerReady | WorkerFailed | Answer | Heartbeat

_encoder = msgspec.msgpack.Encoder()


def encode_frame(message: Any) -> bytes:
    """A message as one frame, its body in msgpack."""
    return pack_frame(_encoder.encode(message))


decode_driver_message = msgspec.msgpack.Decoder(DriverMessage).decode
decode_worker_message = msgspec.msgpack.Decoder(WorkerMessage).decode
