"""The messages of a conversation, text only. A new role or kind of part is added here."""

from typing import Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, BeforeValidator, Field, model_validator

from server.protocol.harmless import MESSAGE_IGNORED, MESSAGE_INERT, PART_IGNORED
from server.protocol.strict import Strict, field_error
from server.protocol.tools import ToolCallsField
from server.protocol.unknown_fields import unknown_field

# Type of a part -> the field that holds its text.
TEXT_OF_PART = {"text": "text", "refusal": "refusal"}


def _message_text(value: Any) -> Any:
    """Content as one text: a string, or the texts of its parts joined by newlines. Anything but text is refused."""
    if isinstance(value, str) or value is None:
        return value
    if not isinstance(value, list):
        raise field_error("invalid_type", "must be a string or a list of parts")
    if not value:
        raise field_error("invalid_value", "must hold at least one part")
    return "\n".join(_part_text(part, i) for i, part in enumerate(value))


def _part_text(part: Any, i: int) -> str:
    if not isinstance(part, dict):
        raise field_error("invalid_type", "must be an object", i)
    kind = part.get("type")
    field = TEXT_OF_PART.get(kind) if isinstance(kind, str) else None
    if field is None:
        raise field_error("unsupported_value", "must be 'text': this server takes text only", i, "type")
    text = part.get(field)
    if not isinstance(text, str):
        raise field_error("invalid_type", "must be a string", i, field)
    extra = [name for name, value in part.items() if name not in ("type", field, *PART_IGNORED) and value is not None]
    for name in extra:
        unknown_field(f"is not a field of a {kind} part", i, name)
    return text


class TextPart(BaseModel):
    type: Literal["text"]
    text: str


class RefusalPart(BaseModel):
    type: Literal["refusal"]
    refusal: str


Content = Annotated[str, BeforeValidator(_message_text, json_schema_input_type=str | list[TextPart | RefusalPart])]


# Field -> the role that it belongs to.
ROLE_OF = {
    "refusal": "assistant",
    "reasoning_content": "assistant",
    "reasoning": "assistant",
    "tool_calls": "assistant",
    "tool_call_id": "tool",
}

# A turn of the assistant, and the answer of a tool, may be empty: max_tokens or the tool made it so.
NEED_CONTENT = ("system", "developer", "user")


class Message(Strict):
    """One turn of a conversation. An assistant's `refusal` stands for its content where there is none, `reasoning`,
    the name that newer vLLM and others give it, for `reasoning_content`."""

    ignored = MESSAGE_IGNORED
    inert = MESSAGE_INERT
    renamed: ClassVar = {"function_call": "tool_calls"}

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Content = ""  # may be absent of the assistant and of a tool
    name: str | None = Field(None, max_length=256)
    refusal: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    tool_calls: ToolCallsField = Field(default_factory=list)
    tool_call_id: str | None = Field(None, max_length=256)

    @model_validator(mode="before")
    @classmethod
    def _fields_of_its_role(cls, fields: Any) -> Any:
        if not isinstance(fields, dict):
            return fields
        content, refusal, role = fields.get("content"), fields.get("refusal"), fields.get("role")
        for name, owner in ROLE_OF.items():
            if role != owner and fields.get(name) not in (None, []):
                raise field_error("unsupported_value", f"belongs to messages of the {owner}", name)
        for i, part in enumerate(content if isinstance(content, list) and role != "assistant" else ()):
            if isinstance(part, dict) and part.get("type") == "refusal":
                raise field_error("unsupported_value", "may be 'refusal' only of the assistant", "content", i, "type")
        called = fields.get("tool_calls") or fields.get("function_call")  # of which the latter is refused by name
        if role in NEED_CONTENT and content is None and refusal is None and not called:
            raise field_error("missing_required_parameter", "is required", "content")
        if role == "tool" and fields.get("tool_call_id") is None:
            raise field_error("missing_required_parameter", "is required", "tool_call_id")
        return fields if content is not None or refusal is None else {**fields, "content": refusal}

    def for_template(self, has_developer: bool = False) -> dict[str, Any]:
        """What a chat template gets; `developer` is `system` to one that does not know the role."""
        role = "system" if self.role == "developer" and not has_developer else self.role
        named = {} if self.name is None else {"name": self.name}
        thought = self.reasoning if self.reasoning_content is None else self.reasoning_content
        thoughts = {} if thought is None else {"reasoning_content": thought}
        return {"role": role, "content": self.content, **named, **thoughts}

    @property
    def num_chars(self) -> int:
        """Of what the prompt holds of it, at least."""
        return len(self.content) + sum(len(call.function.name) for call in self.tool_calls)
