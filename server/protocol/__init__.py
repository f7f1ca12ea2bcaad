"""Decides which requests are valid: the request and answer models of every endpoint, and the errors of their fields."""

from server.protocol.chat_completions import ChatCompletionRequest
from server.protocol.chat_message import Message
from server.protocol.completions import CompletionRequest, Prompt, parse_prompts
from server.protocol.field_checks import field_error
from server.protocol.generation_request import GenerationRequest
from server.protocol.harmless import IGNORED, INERT
from server.protocol.strict import Strict, parse_request

__all__ = [
    "IGNORED",
    "INERT",
    "ChatCompletionRequest",
    "CompletionRequest",
    "GenerationRequest",
    "Message",
    "Prompt",
    "Strict",
    "field_error",
    "parse_prompts",
    "parse_request",
]
