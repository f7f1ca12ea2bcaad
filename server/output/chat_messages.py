"""Chat answers with calls or reasoning in them, whole and streamed."""

from collections.abc import Sequence
from typing import Any

from engine.outputs import CompletionOutput, RequestOutput
from engine.text.tokenizer import Tokenizer
from server.http.body import encode_json
from server.intake.answer_form import AnswerForm
from server.output.chat_chunks import ChatChunks, chat_aligner
from server.output.collect import Choice
from server.output.logprobs import LogprobAligner, chat_logprobs
from server.protocol import ChatCompletionRequest
from server.tools.events import Arguments, CallStart, Content, Event, Input, Reasoning
from server.tools.message_reader import MessageReader


class MessageChoice(Choice):
    """One sample, read into a message while it is generated."""

    def __init__(self, reader: MessageReader, aligner: LogprobAligner | None) -> None:
        super().__init__("", aligner)
        self.reader = reader
        self._events: list[Event] = []

    def add(self, output: CompletionOutput) -> None:
        super().add(output)
        self._events += self.reader.feed(output)

    @property
    def finished_by(self) -> str | None:
        """The finish_reason of a chat; "tool_calls" where the message ends with calls."""
        return self.reader.finish_reason

    @property
    def num_reasoning_tokens(self) -> int:
        """Thinking tokens so far."""
        return self.reader.num_reasoning_tokens

    def message(self) -> dict[str, Any]:
        """The whole message: the sum of a stream's deltas."""
        text = "".join(event.text for event in self._events if isinstance(event, Content))
        thought = "".join(event.text for event in self._events if isinstance(event, Reasoning))
        starts = [event for event in self._events if isinstance(event, CallStart)]
        bodies: list[list[str]] = [[] for _ in starts]
        for event in self._events:
            if isinstance(event, Arguments | Input):
                bodies[event.index].append(event.text)
        calls = [_begun(start, "".join(body)) for start, body in zip(starts, bodies, strict=True)]
        return {
            "role": "assistant",
            "content": text or None,
            "refusal": None,
            **({"reasoning_content": thought} if thought else {}),
            **({"tool_calls": calls} if calls else {}),
        }


class MessageChunks(ChatChunks):
    """The frames of a streamed answer: a delta per event. The role comes before the first delta.

    Some clients fail if the first chunk of choice 1 comes before any chunk of choice 0, so roles come in order.
    """

    def __init__(
        self,
        request: ChatCompletionRequest,
        head: dict[str, Any],
        tokenizer: Tokenizer,
        prompt_ids: list[int],
        form: AnswerForm,
    ) -> None:
        super().__init__(request, head, tokenizer, prompt_ids, form.visible_token_ids)
        self._readers = [form.reader() for _ in range(request.n)]
        self._passes = False  # True once only plain text can follow

    @property
    def text_frame(self) -> None:
        """None: readers see every output."""
        return None

    @property
    def num_reasoning_tokens(self) -> int:
        """Thinking tokens of all samples so far."""
        return sum(reader.num_reasoning_tokens for reader in self._readers)

    def encode(self, prompt_index: int, output: RequestOutput) -> bytes:
        if self._passes:
            return super().encode(prompt_index, output)
        frames = [frame for sample in output.outputs for frame in self._frames(sample)]
        self._passes = not any(self._roles) and all(reader.passes for reader in self._readers)
        return b"".join(frames)

    def _frames(self, sample: CompletionOutput) -> list[bytes]:
        i = sample.index
        reader = self._readers[i]
        deltas = [_delta(event) for event in reader.feed(sample)]
        details = self._details(sample)
        if details and not deltas:
            deltas = [{}]
        frames = []
        ended = sample.finish_reason is not None
        if self._roles[i] and (deltas or ended):
            frames += [self._role(j, {}) for j in range(i) if self._roles[j]]
            frames.append(self._role(i, deltas[0] if deltas else {}))
        for delta in deltas:
            rest = {"logprobs": None, "finish_reason": None, **details}
            frames.append(self._chunk(i, {"delta": delta, **rest}))
            details = {}
        if ended:
            reasons = {"finish_reason": reader.finish_reason, "stop_reason": sample.stop_reason}
            frames.append(self._chunk(i, {"delta": {}, "logprobs": None, **reasons}))
        return frames

    def _role(self, i: int, first: dict[str, Any]) -> bytes:
        """The chunk with the role. Its content is null unless the message begins with content."""
        role, self._roles[i] = self._roles[i], b""
        return role if "content" in first else role.replace(b'"content":""', b'"content":null', 1)

    def _details(self, sample: CompletionOutput) -> dict[str, Any]:
        """The fields that the client asks for beside the message: logprobs, token ids."""
        aligner = self._aligners[sample.index]
        entries = [] if aligner is None else aligner.align(sample)
        with_ids = self._return_token_ids and sample.token_ids
        return {
            **({"logprobs": chat_logprobs(entries, self._names)} if entries else {}),
            **({"token_ids": sample.token_ids} if with_ids else {}),
        }

    def _chunk(self, i: int, rest: dict[str, Any]) -> bytes:
        return b"%b%d,%b%b" % (self._template.start, i, encode_json(rest)[1:-1], self._template.end)


def chat_choices(request: ChatCompletionRequest, tokenizer: Tokenizer, form: AnswerForm | None) -> Sequence[Choice]:
    """The n samples of a whole answer; `form` None: plain text."""
    if form is None:
        return [Choice("", chat_aligner(request, tokenizer)) for _ in range(request.n)]
    return message_choices(request, tokenizer, form)


def message_choices(request: ChatCompletionRequest, tokenizer: Tokenizer, form: AnswerForm) -> list[MessageChoice]:
    """The n samples of a whole answer with calls or reasoning in it."""
    return [
        MessageChoice(form.reader(), chat_aligner(request, tokenizer, form.visible_token_ids)) for _ in range(request.n)
    ]


def _delta(event: Event) -> dict[str, Any]:
    if isinstance(event, Content):
        return {"content": event.text}
    if isinstance(event, Reasoning):
        return {"reasoning_content": event.text}
    if isinstance(event, Arguments):
        return {"tool_calls": [{"index": event.index, "function": {"arguments": event.text}}]}
    if isinstance(event, Input):
        return {"tool_calls": [{"index": event.index, "custom": {"input": event.text}}]}
    return {"tool_calls": [{"index": event.index, **_begun(event)}]}


def _begun(event: CallStart, body: str = "") -> dict[str, Any]:
    """The call with `body` as its arguments or input."""
    if event.custom:
        return {"id": event.id, "type": "custom", "custom": {"name": event.name, "input": body}}
    return {"id": event.id, "type": "function", "function": {"name": event.name, "arguments": body}}
