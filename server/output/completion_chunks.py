"""The chunks of a streamed completion, made as bytes."""

from typing import Any

from engine.outputs import CompletionOutput, RequestOutput
from engine.text.tokenizer import Tokenizer
from server.http.body import encode_json
from server.output.logprobs import Entry, LogprobAligner, completion_logprobs, token_names
from server.output.prompt_logprobs import PromptReports
from server.output.sse import ChunkTemplate
from server.protocol import CompletionRequest


def completion_aligner(request: CompletionRequest, tokenizer: Tokenizer, echo: str) -> LogprobAligner | None:
    """An aligner for one sample, whose text begins with `echo`; None without logprobs."""
    if request.logprobs is None:
        return None
    return LogprobAligner(tokenizer, request.skip_special_tokens, len(echo), keep_all=request.echo)


class CompletionChunks:
    """The frames of a streamed completion, one per sample and output; the last of a sample has its finish_reason."""

    def __init__(
        self,
        request: CompletionRequest,
        head: dict[str, Any],
        tokenizer: Tokenizer,
        echoes: list[str],
        prompt_ids: list[list[int]],
        reports: PromptReports,
    ) -> None:
        self._template = ChunkTemplate(head, request)
        self.ending = self._template.ending
        self._names = token_names(tokenizer, request.return_tokens_as_token_ids)
        self._n = request.n
        self._prompt_ids = [ids for ids in prompt_ids for _ in range(request.n)] if request.return_token_ids else None
        starts = [b"%b%d," % (self._template.start, i) for i in range(len(echoes) * request.n)]
        self._starts = [start + b'"text":' for start in starts]
        self._end = b',"logprobs":null,"finish_reason":null' + self._template.end
        self._echoes = [echo for echo in echoes for _ in range(request.n)]
        self._aligners = [completion_aligner(request, tokenizer, echo) for echo in self._echoes]
        self._reports = reports
        self._unreported = set(range(len(starts))) if request.num_echo_logprobs is not None else set()

    @property
    def text_frame(self) -> tuple[bytes, bytes] | None:
        """See EventStream."""
        single = len(self._starts) == 1 and self._aligners[0] is None and self._prompt_ids is None
        return (self._starts[0], self._end) if single else None

    def encode(self, prompt_index: int, output: RequestOutput) -> bytes:
        frames = []
        for sample in output.outputs:
            i = prompt_index * self._n + sample.index
            text = sample.text
            if i in self._unreported:  # the echo is a chunk of its own: a thread has encoded its logprobs
                self._unreported.discard(i)
                text_then_logprobs = (
                    encode_json(self._echoes[i]) + b',"logprobs":' + self._reports.encoded[prompt_index]
                )
                frames.append(self._starts[i] + text_then_logprobs + b',"finish_reason":null' + self._template.end)
                self._echoes[i] = ""
            if self._echoes[i]:
                text, self._echoes[i] = self._echoes[i] + text, ""
            aligner = self._aligners[i]
            entries = None if aligner is None else aligner.align(sample)
            if self._prompt_ids is not None:
                frames.append(self._with_ids(i, sample, text, entries))
            elif sample.finish_reason is None and entries is None:
                if text:
                    frames.append(self._starts[i] + encode_json(text) + self._end)
            elif text or entries or sample.finish_reason is not None:
                frames.append(self._frame(i, text, self._rest(sample, entries)))
        return b"".join(frames)

    def _rest(self, sample: CompletionOutput, entries: list[Entry] | None) -> dict[str, Any]:
        """The fields of a chunk after its text."""
        logprobs = None if entries is None else completion_logprobs(entries, self._names)
        rest: dict[str, Any] = {"logprobs": logprobs, "finish_reason": sample.finish_reason}
        return rest if sample.finish_reason is None else rest | {"stop_reason": sample.stop_reason}

    def _with_ids(self, i: int, sample: CompletionOutput, text: str, entries: list[Entry] | None) -> bytes:
        assert self._prompt_ids is not None
        rest = self._rest(sample, entries) | {"token_ids": sample.token_ids}
        if self._prompt_ids[i]:
            rest["prompt_token_ids"], self._prompt_ids[i] = self._prompt_ids[i], []
        return self._frame(i, text, rest)

    def _frame(self, i: int, text: str, rest: dict[str, Any]) -> bytes:
        return self._starts[i] + encode_json(text) + b"," + encode_json(rest)[1:-1] + self._template.end
