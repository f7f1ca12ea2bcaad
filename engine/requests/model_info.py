"""ModelInfo: the model that is loaded. Checks if a request can run on it, or can still run when it is loaded anew."""

from dataclasses import dataclass

from engine.errors import ContextLengthError, InvalidRequestError, PromptSize
from engine.executor.step import WorkerReady
from engine.memory.sequence import Sequence
from engine.request import Request
from engine.sampling_params import Pooling, check_beams
from engine.structured_output import Vocabulary
from engine.thinking import ThinkingTags, check_budget

EMBEDS_ONLY = "model_not_supported"


@dataclass(frozen=True)
class ModelInfo:
    """The served model. `vocab_size` is the width of the logits; `memory` is in bytes.

    `pooling` makes an embedding of hidden states. `thinking_tags` is None for a model that does not think.
    """

    max_model_len: int
    vocab_size: int
    num_blocks: int
    block_size: int
    max_num_seqs: int
    max_num_batched_tokens: int
    device: str
    dtype: str
    kv_cache_dtype: str
    memory: dict[str, int]
    hidden_size: int  # numbers of an embedding
    embeds_only: bool  # generates no text
    eos_token_ids: list[int]
    pooling: Pooling
    thinking_tags: ThinkingTags | None

    @classmethod
    def of(
        cls,
        ready: WorkerReady,
        block_size: int,
        *,
        eos_token_ids: list[int],
        pooling: Pooling,
        thinking_tags: ThinkingTags | None,
    ) -> "ModelInfo":
        """The facts that the Worker reports, with the context cut to what its pool holds."""
        return cls(
            max_model_len=min(ready.max_model_len, ready.num_blocks * block_size),
            vocab_size=ready.vocab_size,
            num_blocks=ready.num_blocks,
            block_size=block_size,
            max_num_seqs=ready.max_num_seqs,
            max_num_batched_tokens=ready.max_num_batched_tokens,
            device=ready.device,
            dtype=ready.dtype,
            kv_cache_dtype=ready.kv_cache_dtype or ready.dtype,
            memory=ready.memory,
            hidden_size=ready.hidden_size,
            embeds_only=ready.embeds_only,
            eos_token_ids=eos_token_ids,
            pooling=pooling,
            thinking_tags=thinking_tags,
        )

    def vocabulary(self, tokenizer_json: str) -> Vocabulary:
        """The vocabulary that grammars are compiled for."""
        return Vocabulary(tokenizer_json, self.vocab_size, self.eos_token_ids)

    def on(self, ready: WorkerReady) -> "ModelInfo":
        """The same model on a new Worker, whose limits may differ."""
        return ModelInfo.of(
            ready,
            self.block_size,
            eos_token_ids=self.eos_token_ids,
            pooling=self.pooling,
            thinking_tags=self.thinking_tags,
        )


def check_request(request: Request, model: ModelInfo) -> int:
    """Return the most tokens, prompt included, that a sample of `request` may have.

    Raises InvalidRequestError, or its ContextLengthError, for a request that can never run on this model.
    """
    max_num_tokens = _max_num_tokens(request, model)
    check_budget(request.params, model.thinking_tags)
    if request.beam_search is not None:
        max_num_seqs = min(model.max_num_seqs, model.max_num_batched_tokens)
        check_beams(request.beam_search, model.eos_token_ids, model.vocab_size, max_num_seqs)
    return max_num_tokens


def _max_num_tokens(request: Request, model: ModelInfo) -> int:
    ids, params, limit = request.prompt_token_ids, request.params, model.max_model_len
    if model.embeds_only and params.pooling is None:
        raise InvalidRequestError(
            "This model embeds text (POST /v1/embeddings) and generates none.", "model", EMBEDS_ONLY
        )
    if not ids:
        raise InvalidRequestError("The prompt is empty: at least one token is needed.", request.prompt_param)
    if len(ids) > (longest := limit - params.generates):
        raise ContextLengthError(
            f"This model's maximum context length is {limit} tokens, of which a prompt may have {longest}; this one "
            f"has {len(ids)} tokens. Shorten it.",
            request.prompt_param,
            PromptSize(len(ids), longest, limit),
        )
    if min(ids) < 0 or max(ids) >= model.vocab_size:
        wrong = next(i for i in ids if not 0 <= i < model.vocab_size)
        raise InvalidRequestError(
            f"The prompt holds token id {wrong}; this model's ids are 0 to {model.vocab_size - 1}.",
            request.prompt_param,
        )
    params.check_token_ids(model.vocab_size)
    if params.max_tokens is None:
        return limit
    if len(ids) + params.max_tokens > limit:
        raise ContextLengthError(
            f"This model's maximum context length is {limit} tokens; the prompt has {len(ids)} tokens and max_tokens "
            f"is {params.max_tokens}. Lower max_tokens to {limit - len(ids)} or shorten the prompt.",
            "max_tokens",
            PromptSize(len(ids), longest, limit, params.max_tokens),
        )
    return len(ids) + (params.max_tokens or 1)  # with max_tokens 0, a sampled token says that the prompt is computed


def fits_still(seq: Sequence, model: ModelInfo) -> bool:
    """True if a live sequence can be finished on a new Worker, whose pool may be smaller: up to its own limit, or up to
    the new context if it was to run up to the old one (max_tokens was not given)."""
    limit = model.max_model_len
    if seq.max_num_tokens - (not seq.params.generates) <= limit:
        return True
    return seq.params.max_tokens is None and len(seq.token_ids) < limit


def cut_to_context(seq: Sequence, model: ModelInfo) -> None:
    """Cut a sequence that `fits_still` to the context of the new Worker."""
    if seq.params.max_tokens is None:
        seq.max_num_tokens = min(seq.max_num_tokens, model.max_model_len)
