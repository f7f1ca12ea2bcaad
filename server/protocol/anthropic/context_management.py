"""`context_management` of /v1/messages: edits that shorten a prompt before the model sees it.

Anthropic documents them as context editing (beta context-management-2025-06-27); names and defaults are Anthropic's. An
edit whose type is not in KINDS is refused by name.
"""

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, FailFast, Field

from server.errors import MAX_NAME_LENGTH
from server.protocol.field_checks import field_error
from server.protocol.strict import Strict, validated

MAX_NAMES = 4096  # tools that an edit may name
Names = Annotated[list[str], FailFast(), Field(max_length=MAX_NAMES)]
Amount = Annotated[int, Field(ge=0, lt=2**31)]


class Trigger(Strict):
    """The edit applies to prompts with more than `value` input tokens or tool uses."""

    type: Literal["input_tokens", "tool_uses"]
    value: Amount


class ToolUses(Strict):
    type: Literal["tool_uses"]
    value: Amount


class LeastTokens(Strict):
    type: Literal["input_tokens"]
    value: Amount


class ThinkingTurns(Strict):
    type: Literal["thinking_turns"]
    value: Annotated[int, Field(ge=1, lt=2**31)]


class AllTurns(Strict):
    type: Literal["all"]


def _kept_turns(value: Any) -> Any:
    """`value` as a number of turns; None: all turns are kept."""
    if value == "all":
        return None
    if isinstance(value, dict) and value.get("type") == "all":
        validated(AllTurns, value)
        return None
    if isinstance(value, dict):
        return validated(ThinkingTurns, value).value
    raise field_error("invalid_type", "must be 'all' or an object with the type 'thinking_turns' and a value")


KeptTurns = Annotated[
    int | None, BeforeValidator(_kept_turns, json_schema_input_type=Literal["all"] | ThinkingTurns | AllTurns)
]


def _names_or_all(value: Any) -> Any:
    if isinstance(value, bool):
        return value
    if not isinstance(value, list) or len(value) > MAX_NAMES or not all(isinstance(name, str) for name in value):
        raise field_error("invalid_type", f"must be true, false or a list of at most {MAX_NAMES} names of tools")
    return tuple(value)


ClearedInputs = Annotated[
    bool | tuple[str, ...], BeforeValidator(_names_or_all, json_schema_input_type=bool | list[str])
]


class ClearThinking(Strict):
    """Removes the thinking of the assistant's turns, except the last `keep` turns that have thinking."""

    type: Literal["clear_thinking_20251015"]
    keep: KeptTurns = Field(1, json_schema_extra={"default": {"type": "thinking_turns", "value": 1}})


class ClearToolUses(Strict):
    """Replaces tool results, except the last `keep`, by a note; with `clear_tool_inputs` also clears their inputs."""

    type: Literal["clear_tool_uses_20250919"]
    trigger: Trigger = Trigger(type="input_tokens", value=100_000)
    keep: ToolUses = ToolUses(type="tool_uses", value=3)
    clear_at_least: LeastTokens | None = None
    exclude_tools: Names = Field(default_factory=list)
    clear_tool_inputs: ClearedInputs = False

    def clears_input_of(self, name: str) -> bool:
        cleared = self.clear_tool_inputs
        return cleared if isinstance(cleared, bool) else name in cleared


Edit = ClearThinking | ClearToolUses
KINDS: dict[str, type[ClearThinking] | type[ClearToolUses]] = {
    "clear_thinking_20251015": ClearThinking,
    "clear_tool_uses_20250919": ClearToolUses,
}


def _edit(value: Any) -> Any:
    if not isinstance(value, dict):
        raise field_error("invalid_type", "must be an object")
    kind = value.get("type")
    if not isinstance(kind, str):
        raise field_error("invalid_type", "must be a string", "type")
    if kind not in KINDS:
        known = " or ".join(map(repr, KINDS))
        text = f"is {kind[:MAX_NAME_LENGTH]!r}, an edit that this server does not support: use {known}"
        raise field_error("unsupported_value", text, "type")
    return validated(KINDS[kind], value)


EditField = Annotated[Any, BeforeValidator(_edit, json_schema_input_type=Edit)]


def _in_order(edits: list[Edit]) -> list[Edit]:
    """Checks the order and that no kind is there twice. Like Anthropic's API, thinking must be cleared first."""
    kinds = [edit.type for edit in edits]
    for i, kind in enumerate(kinds):
        if kind in kinds[:i]:
            raise field_error("invalid_value", f"may not be {kind!r} twice", i, "type")
        if kind == "clear_thinking_20251015" and i:
            raise field_error("invalid_value", f"must be first: {kind!r} comes before every other edit", i, "type")
    return edits


class ContextManagement(Strict):
    edits: Annotated[list[EditField], FailFast(), Field(max_length=16), AfterValidator(_in_order)] = Field(
        default_factory=list
    )
