"""The messages of a chat, text only. Add a new role or kind of part here."""

from typing import Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, BeforeValidator, Field, model_validator

from server.protocol.field_checks import field_error, known_fields
from server.protocol.harmless import MESSAGE_IGNORED, MESSAGE_INERT, PART_IGNORED
from server.protocol.strict import Strict
from server.protocol.tools import ToolCallsField

# Type of a part -> the field that holds its text.
TEXT_OF_PART = {"text": "text", "refusal": "refusal"}


def _message_text(value: Any) -> Any:
    """Returns the content as one text: the string, or the texts of its parts joined by newlines; "" for no part. Other
    parts are field errors."""
    if isinstance(value, str) or value is None:
        return value
    if not isinstance(value, list):
        raise field_error("invalid_type", "must be a string or a list of parts")
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
    known_fields(part, ("type", field, *PART_IGNORED), i, text=f"is not a field of a {kind} part")
    return text


class TextPart(BaseModel):
    type: Literal["text"]
    text: str


class RefusalPart(BaseModel):
    type: Literal["refusal"]
    refusal: str


Content = Annotated[str, BeforeValidator(_message_text, json_schema_input_type=str | list[TextPart | RefusalPart])]


# Field -> the only role whose messages may have the field.
ROLE_OF = {
    "refusal": "assistant",
    "reasoning_content": "assistant",
    "reasoning": "assistant",
    "tool_calls": "assistant",
    "tool_call_id": "tool",
}

# Roles whose messages must have content. An assistant's turn may be empty (max_tokens), and so may a tool's result.
NEED_CONTENT = ("system", "developer", "user")


class Message(Strict):
    """One turn of a conversation.

    An assistant's `refusal` is used as the content if there is no content. `reasoning` is the name that newer vLLM and
    other servers give to `reasoning_content`.
    """

    ignored = MESSAGE_IGNORED
    inert = MESSAGE_INERT
    renamed: ClassVar = {"function_call": "tool_calls"}

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Content = ""  # may be absent in messages of the assistant and of tools
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
                raise field_error("unsupported_value", f"is allowed only in messages of the {owner}", name)
        for i, part in enumerate(content if isinstance(content, list) and role != "assistant" else ()):
            if isinstance(part, dict) and part.get("type") == "refusal":
                raise field_error(
                    "unsupported_value", "may be 'refusal' only in messages of the assistant", "content", i, "type"
                )
        called = fields.get("tool_calls") or fields.get("function_call")  # function_call is refused by name later
        if role in NEED_CONTENT and content is None and refusal is None and not called:
            raise field_error("missing_required_parameter", "is required", "content")
        if role == "tool" and fields.get("tool_call_id") is None:
            raise field_error("missing_required_parameter", "is required", "tool_call_id")
        return fields if content not in (None, []) or refusal is None else {**fields, "content": refusal}

    def for_template(self, has_developer: bool = False) -> dict[str, Any]:
        """The message as a chat template gets it. A template that does not know the role `developer` gets `system`."""
        role = "system" if self.role == "developer" and not has_developer else self.role
        named = {} if self.name is None else {"name": self.name}
        thought = self.reasoning if self.reasoning_content is None else self.reasoning_content
        thoughts = {} if thought is None else {"reasoning_content": thought}
        return {"role": role, "content": self.content, **named, **thoughts}

    @property
    def num_chars(self) -> int:
        """Lower bound of the characters that the message adds to the prompt: at least one, where the message begins."""
        return max(1, len(self.content) + sum(len(call.function.name) for call in self.tool_calls))
