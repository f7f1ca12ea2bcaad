"""The written list: fields that are accepted but have no effect, and why accepting them misleads no client.

IGNORED fields cannot change the output. INERT fields are accepted at the values that describe what this server does
anyway; any other value is a 400 that names the field.
"""

from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Field, TypeAdapter

IGNORED: dict[str, str] = {
    "cache_prompt": "a hint for speed: equal prefixes are found without it",
    "metadata": "labels for a stored answer; nothing is stored",
    "prompt_cache_key": "a hint for speed: equal prefixes are found without it",
    "prompt_cache_options": "a hint for speed: every prefix is cached while there is room",
    "prompt_cache_retention": "a hint for speed",
    "safety_identifier": "names the end user, for the operator of a service",
    "session_id": "names a conversation, for the operator of a service",
    "spaces_between_special_tokens": "tokens are bytes here: no space is ever put between them",
    "store": "nothing is stored",
    "user": "names the end user, for the operator of a service",
}
# Tiers of OpenAI's queue. This server has one queue; answers name its tier: "default".
ServiceTier = Literal["auto", "default", "flex", "scale", "priority", "fast", "ultrafast"]
Label = Annotated[str, Field(max_length=512)]
Hint = Annotated[dict[str, Any], Field(max_length=16)]
Metadata = Annotated[
    dict[Annotated[str, Field(max_length=64)], Annotated[str | None, Field(max_length=512)]], Field(max_length=16)
]
# Documented types of ignored fields, in words and as a type. A value of another type is a client's mistake: OpenAI
# refuses it too.
KINDS: dict[str, tuple[str, Any]] = {
    "block_binding": ("an object", Hint),
    "cache_prompt": ("true or false", bool),
    "client_metadata": ("at most 64 strings by name", Annotated[dict[str, str | None], Field(max_length=64)]),
    "defer_loading": ("true or false", bool),
    "description": ("a string", str),
    "diagnostics": ("an object", Hint),
    "metadata": ("at most 16 strings by name", Metadata),
    "prediction": ("an object", Hint),
    "prompt_cache_key": ("a string", Label),
    "prompt_cache_options": ("an object", Hint),
    "prompt_cache_retention": ("a string", Label),
    "safety_identifier": ("a string", Label),
    "session_id": ("a string", Label),
    "spaces_between_special_tokens": ("true or false", bool),
    "speed": ("`standard` or `fast`", Literal["standard", "fast"]),
    "store": ("true or false", bool),
    "task_budget": ("an object", Hint),
    "user": ("a string", Label),
}
ANYTHING: TypeAdapter[Any] = TypeAdapter(Any)
ADAPTERS = {name: TypeAdapter(kind, config=ConfigDict(strict=True)) for name, (_, kind) in KINDS.items()}
INERT: dict[str, tuple[Any, ...]] = {
    "audio": (),
    "chat_template": (),  # a client's template would run in this process
    "logits_processors": ([],),
    "modalities": (["text"],),
    "moderation": (),
    "prompt_embeds": (),
    "service_tier": ("auto", "default"),
    "suffix": ("",),
    "web_search_options": (),
}
COMPLETION_IGNORED = {"prediction": "a hint for speed, which /v1/chat/completions uses"}
CHAT_INERT: dict[str, tuple[Any, ...]] = {"best_of": (1,), "echo": (False,)}
MESSAGE_INERT: dict[str, tuple[Any, ...]] = {
    "annotations": ([],),
    "audio": (),
}
CACHE = "cache_control"  # Anthropic's mark, which clients of OpenRouter and of LiteLLM also set in chats
CACHE_IS = "a hint for speed: equal prefixes are found without it"
MESSAGE_IGNORED = {
    CACHE: CACHE_IS,
    "parsed": "openai-python adds it to an answer, which clients send back unchanged",
}
CALL_IGNORED = {"index": "left over from the chunks of a streamed answer"}
FORMAT_IGNORED = {"description": "for readers of the request; a prompt shows no part of a format"}
FUNCTION_IGNORED = {"parsed_arguments": "openai-python adds it to a call"}
PART_IGNORED = {CACHE: CACHE_IS, "prompt_cache_breakpoint": "a hint for speed"}
TOOL_IGNORED = {CACHE: CACHE_IS}
# Fields of /v1/messages. cache_control may stand on every block, message part and tool.
ANTHROPIC_IGNORED = {
    CACHE: CACHE_IS,
    "diagnostics": "asks why the cache missed an earlier request; nothing is stored to compare with",
    "inference_geo": "names a region; this server runs in one place",
    "metadata": "names the end user, for the operator of a service",
    "speed": "a hint for speed: this server has one speed",
    "user_profile_id": "names the end user, for the operator of a service",
    "workspace_id": "names an account of Anthropic's",
}
ANTHROPIC_INERT: dict[str, tuple[Any, ...]] = {
    "container": (),
    "mcp_servers": ([],),
    "safeguards": (),  # this server checks no calls: an agent must not believe that its calls are checked
    "service_tier": ("auto", "standard_only"),
}
BLOCK_IGNORED = {CACHE: CACHE_IS}
OUTPUT_CONFIG_IGNORED = {"task_budget": "tells the model how many tokens a task has; chat templates cannot"}
THINKING_IGNORED = {"block_binding": "says what becomes of another conversation's thoughts; this server accepts any"}
ANTHROPIC_TOOL_IGNORED = {
    CACHE: CACHE_IS,
    "eager_input_streaming": "inputs always stream as they are generated",
    "input_examples": "chat templates have no place for examples",
}
ANTHROPIC_TOOL_INERT: dict[str, tuple[Any, ...]] = {"allowed_callers": (["direct"],)}
# Fields of /v1/responses, and of its tools.
RESPONSES_IGNORED = {"client_metadata": "names the client's session, for the operator of a service"}
SUMMARIES = ("auto", "concise", "detailed")
REASONING_INERT: dict[str, tuple[Any, ...]] = {
    "generate_summary": SUMMARIES,
    "mode": ("standard",),
    "summary": SUMMARIES,
}
RESPONSE_TOOL_IGNORED = {
    "defer_loading": "the prompt describes every tool from the start",
    "output_schema": "for readers of the request; chat templates have no place for it",
}
RESPONSE_TOOL_INERT: dict[str, tuple[Any, ...]] = {
    "allowed_callers": (["direct"], ["direct", "programmatic"], ["programmatic", "direct"]),
    "async": (False,),
}
# Rows of the table in docs/api.md: (place of the field, ignored fields, inert fields).
WRITTEN_LIST: tuple[tuple[str, dict[str, str], dict[str, tuple[Any, ...]]], ...] = (
    ("{}", IGNORED, INERT),
    ("{} (completions)", COMPLETION_IGNORED, {}),
    ("{} (chat)", {}, CHAT_INERT),
    ("messages[].{}", MESSAGE_IGNORED, MESSAGE_INERT),
    ("messages[].content[].{}", PART_IGNORED, {}),
    ("tools[].{}", TOOL_IGNORED, {}),
    ("messages[].tool_calls[].{}", CALL_IGNORED, {}),
    ("messages[].tool_calls[].function.{}", FUNCTION_IGNORED, {}),
    ("response_format.json_schema.{}", FORMAT_IGNORED, {}),
    ("{} (responses)", RESPONSES_IGNORED, {}),
    ("reasoning.{} (responses)", {}, REASONING_INERT),
    ("tools[].{} (responses)", RESPONSE_TOOL_IGNORED, RESPONSE_TOOL_INERT),
    ("{} (messages)", ANTHROPIC_IGNORED, ANTHROPIC_INERT),
    ("messages[].content[].{} (messages)", BLOCK_IGNORED, {}),
    ("output_config.{} (messages)", OUTPUT_CONFIG_IGNORED, {}),
    ("thinking.{} (messages)", THINKING_IGNORED, {}),
    ("tools[].{} (messages)", ANTHROPIC_TOOL_IGNORED, ANTHROPIC_TOOL_INERT),
)
