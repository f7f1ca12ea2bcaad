"""ResponseAnswer: one answer of /v1/responses, collected whole or told by the events of a stream."""

import time
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import msgspec

from engine.outputs import CompletionOutput, FinishReason, RequestOutput
from engine.text.tokenizer import Tokenizer
from server.errors import ApiError, error_object
from server.intake.conversation import Conversation
from server.output.logprobs import Entry, LogprobAligner
from server.output.response_output import EventWriter, ResponseOutput
from server.output.timings import Timings
from server.protocol.responses.request import ResponseRequest
from server.protocol.responses.response_tools import FunctionTool, HostedTool, NamespaceTool, ResponseCustomTool, Tool
from server.tools.events import Content, Event


class ResponseAnswer:
    """Reads the outputs of one sample into `result`, or into the events of a stream."""

    def __init__(
        self,
        request: ResponseRequest,
        response_id: str,
        tokenizer: Tokenizer,
        conversation: Conversation,
        timings: Timings,
    ) -> None:
        self._generation, self._reader, self._timings = conversation.generation, conversation.reader(), timings
        self._return_timings = request.return_timings
        self._events = EventWriter(request.stream)
        tools = request.tool_set.by_chat_name
        self._output = ResponseOutput(self._events, tokenizer, tools, request.encrypts_reasoning)
        self._aligner: LogprobAligner | None = None
        if request.logprobs:
            self._aligner = LogprobAligner(tokenizer, True, visible=conversation.visible_token_ids)
        self._num_characters = 0  # the texts of the outputs so far have so many
        self._pending: list[tuple[str, Entry]] = []  # tokens that no part has yet, with their texts
        self._finish_reason: FinishReason | None = None
        self._head = {"id": response_id, "object": "response", "created_at": int(time.time())}
        self._settings = _settings(request)

    def add(self, sample: CompletionOutput) -> None:
        """Read an output of the sample."""
        for piece in [sample] if self._aligner is None else self._by_token(sample, self._aligner):
            for part in self._reader.feed(piece):
                self._output.feed(part, self._entries_of(part))
        if sample.finish_reason is not None:
            self._finish_reason = sample.finish_reason
            cut = self._is_cut or self._reader.unfinished  # a stop token may cut a call
            self._output.finish("incomplete" if cut else "completed", [entry for _, entry in self._pending])

    def _by_token(self, sample: CompletionOutput, aligner: LogprobAligner) -> Iterator[CompletionOutput]:
        """The output in pieces, each of which brings one token, so that a token is not taken for one of another part.

        Once only text can follow, the output stays whole.
        """
        entries = aligner.align(sample)
        if self._reader.passes:
            self._pending += [("", entry) for entry in entries]
            yield sample
            return
        text, begin = sample.text, self._num_characters
        self._num_characters += len(text)
        starts = [0, *(start - begin for start, _ in entries), len(text)]
        pieces = [text[start:end] for start, end in pairwise(starts)]
        yield msgspec.structs.replace(sample, text=pieces[0], finish_reason=None)
        for piece, entry in zip(pieces[1:], entries, strict=True):
            self._pending.append((piece, entry))
            yield msgspec.structs.replace(sample, text=piece, token_ids=(), finish_reason=None)
        yield msgspec.structs.replace(sample, text="", token_ids=())

    def _entries_of(self, part: Event) -> list[Entry]:
        """Take the pending tokens for a part: for text of the message, those from the start of the text on.

        Tokens of reasoning, calls and markers are dropped.
        """
        pending, self._pending = self._pending, []
        if not isinstance(part, Content):
            return []
        text = "".join(piece for piece, _ in pending)
        begin = 0 if text.startswith(part.text) else text.rfind(part.text)
        entries, at = [], 0
        for piece, entry in pending:
            end = at + len(piece)
            if end > begin or at >= begin:
                entries.append(entry)
            at = end
        return entries

    def opening(self) -> bytes:
        """The events before the first output."""
        for state in ("created", "in_progress"):
            self._events.write(f"response.{state}", response=self._response("in_progress"))
        return self._events.flush()

    def encode(self, prompt_index: int, output: RequestOutput) -> bytes:
        """The events of one output."""
        for sample in output.outputs:
            self.add(sample)
        return self._events.flush()

    def ending(self) -> bytes:
        """The events after the last output."""
        response = self.result()
        self._events.write(f"response.{response['status']}", response=response)
        return self._events.flush()

    def failure(self, error: ApiError) -> bytes:
        """OpenAI's two events of a failure: the error, and the failed response."""
        about = error_object(error)
        self._events.write("error", code=about["code"], message=about["message"], param=about["param"])
        code = "rate_limit_exceeded" if error.status == 429 else "server_error"
        failed = self._response("failed", error={"code": code, "message": about["message"]})
        self._events.write("response.failed", response=failed)
        return self._events.flush()

    def result(self) -> dict[str, Any]:
        """The whole response, once the generation has ended."""
        known: dict[str, Any] = {"usage": self._usage()}
        if self._return_timings:
            known["timings"] = self._timings()
        if self._is_cut:
            return self._response("incomplete", incomplete_details={"reason": "max_output_tokens"}, **known)
        return self._response("completed", completed_at=int(time.time()), **known)

    @property
    def _is_cut(self) -> bool:
        return self._finish_reason is FinishReason.LENGTH

    def _response(self, status: str, **known: Any) -> dict[str, Any]:
        unknown = {"completed_at": None, "error": None, "incomplete_details": None, "usage": None}
        return {**self._head, "status": status, **self._settings, "output": self._output.items, **unknown, **known}

    def _usage(self) -> dict[str, Any]:
        usage = self._generation.usage()
        cached = usage["prompt_tokens_details"]["cached_tokens"]
        return {
            "input_tokens": usage["prompt_tokens"],
            "input_tokens_details": {"cached_tokens": cached, "cache_write_tokens": 0},
            "output_tokens": usage["completion_tokens"],
            "output_tokens_details": {"reasoning_tokens": self._reader.num_reasoning_tokens},
            "total_tokens": usage["total_tokens"],
        }


def _shown(tool: Tool) -> dict[str, Any]:
    """A tool in the answer's `tools`; functions show all their fields."""
    if isinstance(tool, FunctionTool):
        return tool.model_dump() | {"strict": bool(tool.strict)}
    fields = tool.model_dump(exclude={"format", "tools"}, exclude_none=True)
    if isinstance(tool, ResponseCustomTool):
        fields["format"] = tool.format.model_dump()
    if isinstance(tool, NamespaceTool):
        fields |= {"description": tool.description or "", "tools": [_shown(inner) for inner in tool.tools]}
    return fields


def _settings(request: ResponseRequest) -> dict[str, Any]:
    """The fields of a response that repeat the request; fields of features that this server lacks are null."""
    tools = [_shown(tool) for tool in request.tools if not isinstance(tool, HostedTool)]
    verbosity = {} if request.text.verbosity is None else {"verbosity": request.text.verbosity}
    limit = {} if request.reasoning.max_tokens is None else {"max_tokens": request.reasoning.max_tokens}
    return {
        "model": request.model,
        "instructions": request.instructions,
        "max_output_tokens": request.max_output_tokens,
        "temperature": request.temperature,
        "top_p": request.top_p,
        "top_logprobs": request.top_logprobs,
        "text": {"format": request.text.format, **verbosity},
        "tools": tools,
        "tool_choice": request.tool_choice,
        "parallel_tool_calls": request.parallel_tool_calls,
        "max_tool_calls": request.max_tool_calls,
        "reasoning": {"effort": request.reasoning.effort, "summary": None, **limit},
        "truncation": request.truncation,
        "metadata": request.metadata,
        "user": request.user,
        "safety_identifier": request.safety_identifier,
        "prompt_cache_key": request.prompt_cache_key,
        "service_tier": "default",
        "store": False,
        "background": False,
        "previous_response_id": None,
    }
