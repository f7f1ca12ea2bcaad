"""The chunks of a streamed chat, made as bytes."""

from typing import Any

from engine.outputs import CompletionOutput, RequestOutput
from engine.text.tokenizer import Tokenizer
from server.http.body import encode_json
from server.output.logprobs import LogprobAligner, TokenNames, chat_logprobs, token_names
from server.output.sse import ChunkTemplate
from server.protocol import ChatCompletionRequest


def chat_aligner(
    request: ChatCompletionRequest, tokenizer: Tokenizer, visible: tuple[int, ...] = ()
) -> LogprobAligner | None:
    """An aligner for one sample; None without logprobs. `visible`: special tokens that stand in the text."""
    return LogprobAligner(tokenizer, request.skip_special_tokens, visible=visible) if request.logprobs else None


class ChatChunks:
    """The frames of a streamed chat: per sample one with the role, those with text, one with the finish_reason."""

    def __init__(
        self,
        request: ChatCompletionRequest,
        head: dict[str, Any],
        tokenizer: Tokenizer,
        prompt_ids: list[int],
        visible_token_ids: tuple[int, ...] = (),
    ) -> None:
        self._template = ChunkTemplate(head, request)
        self.ending = self._template.ending
        self._names: TokenNames = tokenizer
        if request.logprobs:
            self._names = token_names(tokenizer, request.return_tokens_as_token_ids)
        self._return_token_ids = request.return_token_ids
        starts = [b"%b%d," % (self._template.start, i) for i in range(request.n)]
        plain_end = b',"logprobs":null,"finish_reason":null' + self._template.end
        role = b'"delta":{"role":"assistant","content":"","refusal":null}' + plain_end
        self._roles = [start + role for start in starts]
        if request.return_token_ids:  # once, on the first chunk of the first choice
            first = ChunkTemplate({**head, "prompt_token_ids": prompt_ids}, request)
            self._roles[0] = b"%b0,%b" % (first.start, role)
        self._starts = [start + b'"delta":{"content":' for start in starts]
        self._finish_starts = [start + b'"delta":{},"logprobs":null,"finish_reason":' for start in starts]
        self._end = b"}" + plain_end
        self._aligners = [chat_aligner(request, tokenizer, visible_token_ids) for _ in starts]

    @property
    def num_reasoning_tokens(self) -> int:
        """Thinking tokens of all samples so far; plain text has none."""
        return 0

    @property
    def text_frame(self) -> tuple[bytes, bytes] | None:
        """See EventStream."""
        single = len(self._starts) == 1 and self._aligners[0] is None and not self._return_token_ids
        return (self._starts[0], self._end) if single else None

    def encode(self, prompt_index: int, output: RequestOutput) -> bytes:
        frames = []
        for sample in output.outputs:
            i = sample.index
            if self._roles[i]:
                frames.append(self._roles[i])
                self._roles[i] = b""
            aligner = self._aligners[i]
            if aligner is not None or self._return_token_ids:
                frames.append(self._detailed(sample, aligner))
            elif sample.text:
                frames.append(self._starts[i] + encode_json(sample.text) + self._end)
            if sample.finish_reason is not None:
                frames.append(self._finish(sample))
        return b"".join(frames)

    def _detailed(self, sample: CompletionOutput, aligner: LogprobAligner | None) -> bytes:
        """The frame of a sample with the fields that the client asks for beside the text: logprobs, token ids."""
        entries = [] if aligner is None else aligner.align(sample)
        with_ids = self._return_token_ids and sample.token_ids
        if not (sample.text or entries or with_ids):
            return b""
        logprobs = None if aligner is None else chat_logprobs(entries, self._names)
        rest = {"logprobs": logprobs, "finish_reason": None, **({"token_ids": sample.token_ids} if with_ids else {})}
        text = encode_json(sample.text)
        return self._starts[sample.index] + text + b"}," + encode_json(rest)[1:-1] + self._template.end

    def _finish(self, sample: CompletionOutput) -> bytes:
        reasons = encode_json(sample.finish_reason) + b',"stop_reason":' + encode_json(sample.stop_reason)
        return self._finish_starts[sample.index] + reasons + self._template.end
