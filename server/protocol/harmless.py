"""The written list: fields that are not honoured, and why taking them is no lie.

IGNORED fields cannot change the output. INERT ones are taken at the values that mean what this server does anyway; any
other value is a 400 that names the field.
"""

from typing import Any

IGNORED: dict[str, str] = {
    "metadata": "labels for a stored answer; nothing is stored",
    "prediction": "a hint for speed",
    "prompt_cache_key": "a hint for speed: equal prefixes are found without it",
    "prompt_cache_options": "a hint for speed: every prefix is cached while there is room",
    "prompt_cache_retention": "a hint for speed",
    "safety_identifier": "names the end user, for the operator of a service",
    "spaces_between_special_tokens": "tokens are bytes here: no space is ever put between them",
    "store": "nothing is stored",
    "user": "names the end user, for the operator of a service",
}
INERT: dict[str, tuple[Any, ...]] = {
    "audio": (),
    "chat_template": (),  # a template of the client's would run in this process
    "logits_processors": ([],),
    "modalities": (["text"],),
    "moderation": (),
    "prompt_embeds": (),
    "service_tier": ("auto", "default"),
    "suffix": ("",),
    "web_search_options": (),
}
CHAT_INERT: dict[str, tuple[Any, ...]] = {"echo": (False,)}
MESSAGE_INERT: dict[str, tuple[Any, ...]] = {
    "annotations": ([],),
    "audio": (),
}
MESSAGE_IGNORED = {"parsed": "what openai-python adds to an answer, which may be sent back as it is"}
CALL_IGNORED = {"index": "what is left of a stream"}
FUNCTION_IGNORED = {"parsed_arguments": "what openai-python adds"}
PART_IGNORED = {"prompt_cache_breakpoint": "a hint for speed"}
STREAM_INERT: dict[str, tuple[Any, ...]] = {"continuous_usage_stats": (False,)}
# As docs/api.md lists them: where a field stands, those that are ignored, those that are inert.
WRITTEN_LIST: tuple[tuple[str, dict[str, str], dict[str, tuple[Any, ...]]], ...] = (
    ("{}", IGNORED, INERT),
    ("{} (chat)", {}, CHAT_INERT),
    ("messages[].{}", MESSAGE_IGNORED, MESSAGE_INERT),
    ("messages[].content[].{}", PART_IGNORED, {}),
    ("messages[].tool_calls[].{}", CALL_IGNORED, {}),
    ("messages[].tool_calls[].function.{}", FUNCTION_IGNORED, {}),
    ("stream_options.{}", {}, STREAM_INERT),
)
