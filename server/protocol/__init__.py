"""Request models of the OpenAI endpoints: a module for each kind, what they share in strict.py and generation.py."""

from server.protocol.chat_completions import ChatCompletionRequest
from server.protocol.chat_message import Message
from server.protocol.completions import CompletionRequest, Prompt, parse_prompts
from server.protocol.generation_request import GenerationRequest
from server.protocol.harmless import IGNORED, INERT
from server.protocol.strict import Strict, field_error, parse_request

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
