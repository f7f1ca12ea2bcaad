"""The tools of POST /v1/responses, and the chat tools that the prompt describes in their place.

Functions and custom tools stay the same; those of a namespace get a name that includes the namespace. The client runs
`local_shell`, `shell` and `apply_patch`, whose calls have item types of their own; the model sees them as functions.
Tools that run on OpenAI's servers are left out.
"""

import hashlib
import re
from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any, Literal

from pydantic import ConfigDict, FailFast, Field, PlainValidator

from server.protocol.field_checks import field_error, known_fields
from server.protocol.grammars.lark_in_json import MAX_DEFINITION
from server.protocol.grammars.response_format import MAX_DESCRIPTION
from server.protocol.harmless import RESPONSE_TOOL_IGNORED, RESPONSE_TOOL_INERT
from server.protocol.strict import Strict
from server.protocol.tools import MAX_TOOLS, NAME, TextFormat, by_type, listed

HOSTED = (
    *("code_interpreter", "computer", "computer_use", "computer_use_preview", "file_search", "image_generation", "mcp"),
    *("programmatic_tool_calling", "tool_search", "web_search", "web_search_2025_08_26", "web_search_preview"),
    "web_search_preview_2025_03_11",
)
NOT_HERE = "runs on OpenAI's servers, not on this one: leave it out, or let the model choose"


class FunctionTool(Strict):
    inert = RESPONSE_TOOL_INERT
    ignored = RESPONSE_TOOL_IGNORED
    foreign = {"function": "name"}  # the fields of a chat's `function` stand beside `type` in this API

    type: Literal["function"]
    name: str
    description: str | None = Field(None, max_length=MAX_DESCRIPTION)
    parameters: dict[str, Any] | None = None
    strict: bool | None = None

    def for_chat(self, name: str, about: str) -> dict[str, Any]:
        fields = self.model_dump(exclude={"type"}, exclude_none=True)
        return {"type": "function", "function": fields | _named(name, about, self.description)}


class ResponseGrammarFormat(Strict):
    foreign = {"grammar": "definition"}  # a chat has syntax and definition in an object `grammar`

    type: Literal["grammar"]
    syntax: Literal["lark", "regex"]
    definition: str = Field(min_length=1, max_length=MAX_DEFINITION)


FORMATS: dict[str, type[Strict]] = {"text": TextFormat, "grammar": ResponseGrammarFormat}


class ResponseCustomTool(Strict):
    inert = RESPONSE_TOOL_INERT
    ignored = RESPONSE_TOOL_IGNORED
    foreign = {"custom": "name"}

    type: Literal["custom"]
    name: str
    description: str | None = Field(None, max_length=MAX_DESCRIPTION)
    format: Annotated[
        TextFormat | ResponseGrammarFormat,
        PlainValidator(partial(by_type, FORMATS), json_schema_input_type=TextFormat | ResponseGrammarFormat),
    ] = TextFormat(type="text")

    def for_chat(self, name: str, about: str) -> dict[str, Any]:
        form: dict[str, Any] = {"type": self.format.type}
        if isinstance(self.format, ResponseGrammarFormat):
            form["grammar"] = {"syntax": self.format.syntax, "definition": self.format.definition}
        return {"type": "custom", "custom": _named(name, about, self.description) | {"format": form}}


class NamespaceTool(Strict):
    """A group of functions and custom tools. A call names the tool and the namespace."""

    type: Literal["namespace"]
    name: str = Field(min_length=1, max_length=256)
    description: str | None = Field(None, max_length=MAX_DESCRIPTION)
    tools: Annotated[
        list[
            Annotated[
                FunctionTool | ResponseCustomTool,
                PlainValidator(
                    partial(by_type, {"function": FunctionTool, "custom": ResponseCustomTool}),
                    json_schema_input_type=FunctionTool | ResponseCustomTool,
                ),
            ]
        ],
        FailFast(),
        Field(max_length=MAX_TOOLS),
    ]


class LocalEnvironment(Strict):
    inert = {"skills": ([],)}

    type: Literal["local"]


class LocalShellTool(Strict):
    type: Literal["local_shell"]


class ShellTool(Strict):
    """A shell that the client runs: without an environment, or with a local one. Other environments are OpenAI's
    containers."""

    inert = {"allowed_callers": RESPONSE_TOOL_INERT["allowed_callers"]}

    type: Literal["shell"]
    environment: LocalEnvironment | None = None


class ApplyPatchTool(Strict):
    inert = {"allowed_callers": RESPONSE_TOOL_INERT["allowed_callers"]}

    type: Literal["apply_patch"]


class HostedTool(Strict):
    """A tool that runs on OpenAI's servers. Its fields are not checked."""

    model_config = ConfigDict(extra="allow")

    type: Literal[HOSTED]  # type: ignore[valid-type]

    @classmethod
    def _is_harmless(cls, name: str, value: Any) -> bool:
        return False


Tool = FunctionTool | ResponseCustomTool | NamespaceTool | LocalShellTool | ShellTool | ApplyPatchTool | HostedTool
TOOLS: dict[str, type[Strict]] = {
    "function": FunctionTool,
    "custom": ResponseCustomTool,
    "namespace": NamespaceTool,
    "local_shell": LocalShellTool,
    "shell": ShellTool,
    "apply_patch": ApplyPatchTool,
}
KINDS = TOOLS | dict.fromkeys(HOSTED, HostedTool)


def parse_tool(value: Any) -> Tool:
    """`value` as the tool of its type. Field errors name the field below the tool."""
    if isinstance(value, dict) and value.get("type") == "shell" and isinstance(value.get("environment"), dict):
        if value["environment"].get("type") in ("container_auto", "container_reference"):
            return HostedTool.model_construct(type="shell", **{k: v for k, v in value.items() if k != "type"})
    tool: Tool = by_type(KINDS, value)
    return tool


ToolField = Annotated[Tool, PlainValidator(parse_tool, json_schema_input_type=Tool)]
ToolsField = Annotated[list[ToolField], FailFast(), Field(max_length=MAX_TOOLS)]

STRINGS = {"type": "array", "items": {"type": "string"}}
MILLISECONDS = {"type": "integer", "minimum": 0, "maximum": 2**31 - 1}
# Tools that the client runs, as functions: name -> (description for the model, properties, required properties).
CLIENT_RUN: dict[str, tuple[str, dict[str, Any], list[str]]] = {
    "local_shell": (
        "Runs a command on the user's machine, without a shell around it, and returns what it prints.",
        {
            "command": STRINGS | {"minItems": 1, "description": "the program and its arguments"},
            "working_directory": {"type": "string"},
            "timeout_ms": MILLISECONDS,
            "env": {"type": "object", "additionalProperties": {"type": "string"}},
        },
        ["command"],
    ),
    "shell": (
        "Runs shell commands on the user's machine, one after the other, and returns what they print.",
        {
            "commands": STRINGS | {"minItems": 1},
            "timeout_ms": MILLISECONDS,
            "max_output_length": MILLISECONDS | {"description": "characters"},
        },
        ["commands"],
    ),
    "apply_patch": (
        "Creates, changes or deletes a file by a diff.",
        {
            "type": {"enum": ["create_file", "update_file", "delete_file"]},
            "path": {"type": "string"},
            "diff": {"type": "string", "description": "in the V4A format; empty to delete the file"},
        },
        ["type", "path", "diff"],
    ),
}


@dataclass(frozen=True)
class Offered:
    """A tool that the prompt describes. `path`: its place in the request. `kind`: type of its calls. `name` and
    `namespace`: as the client sent them. `chat`: the tool in the form of a chat request."""

    path: str
    kind: str
    name: str
    namespace: str | None
    chat: dict[str, Any]

    @property
    def chat_name(self) -> str:
        return str(self.chat[self.chat["type"]]["name"])

    @property
    def chosen(self) -> dict[str, Any]:
        """The tool_choice of a chat that chooses this tool."""
        return {"type": self.chat["type"], self.chat["type"]: {"name": self.chat_name}}


def chat_name(namespace: str | None, name: str) -> str:
    """The name of a tool in the prompt: the same in every request, and at most 128 characters long."""
    if namespace is None:
        return name
    joined = f"{namespace}__{name}"
    if NAME.fullmatch(joined):
        return joined
    digest = hashlib.sha256(joined.encode("utf-8", "surrogatepass")).hexdigest()[:12]
    return f"{re.sub('[^a-zA-Z0-9_-]', '_', joined)[:115]}_{digest}"


class ToolSet:
    """All tools of a request."""

    def __init__(self, tools: Iterable[tuple[str, Tool]], added: Iterable[tuple[str, Tool]] = ()) -> None:
        """`tools`: (path in the request, tool). `added`: tools of the input, which replace tools of the same name."""
        self.hosted: list[str] = []
        self.offered = [one for path, tool in tools for one in self._offer(path, tool)]
        places = {one.chat_name: i for i, one in enumerate(self.offered)}
        for one in [one for path, tool in added for one in self._offer(path, tool)]:
            at = places.setdefault(one.chat_name, len(self.offered))
            self.offered[at : at + 1] = [one]
        self.by_chat_name = {one.chat_name: one for one in self.offered}

    def _offer(self, path: str, tool: Tool) -> Iterable[Offered]:
        if not isinstance(tool, HostedTool):
            return _offered(path, tool)
        self.hosted += [tool.type] if tool.type not in self.hosted else []
        return ()

    def chat_choice(self, value: Any) -> Any:
        """tool_choice in the form of a chat; None if no tool is offered. Field errors name the part below it."""
        if isinstance(value, str):
            if value == "required" and not self.offered and self.hosted:
                raise field_error("unsupported_value", f"cannot be 'required': {self.hosted[0]} {NOT_HERE}")
            return value if self.offered else None
        if value["type"] != "allowed_tools":
            return self._one(value, ()).chosen
        found: list[Offered] = []
        for i, part in enumerate(value["tools"]):
            if part["type"] == "namespace":
                found += self._of_namespace(part, i)
            elif part["type"] not in HOSTED:
                found.append(self._one(part, ("tools", i)))
            elif value["mode"] == "required" and len(value["tools"]) == 1:
                raise field_error("unsupported_value", f"{part['type']} {NOT_HERE}", "tools", i, "type")
        if not found:
            return "none" if self.offered else None
        return {"type": "allowed_tools", "allowed_tools": {"mode": value["mode"], "tools": [t.chosen for t in found]}}

    def _one(self, choice: dict[str, Any], at: tuple[str | int, ...]) -> Offered:
        kind = choice["type"]
        if kind in HOSTED:
            raise field_error("unsupported_value", f"cannot be {kind}, which {NOT_HERE}", *at)
        name, namespace = choice.get("name", kind), choice.get("namespace")
        same = [one for one in self.offered if one.kind == kind and one.name == name]
        found = [one for one in same if one.namespace == namespace] or ([] if namespace else same)
        if len(found) != 1:
            text = "names a tool that several namespaces have: add the namespace" if found else "is not among the tools"
            raise field_error("invalid_value", text, *at)
        return found[0]

    def _of_namespace(self, choice: dict[str, Any], i: int) -> list[Offered]:
        found = [one for one in self.offered if one.namespace == choice["name"]]
        if not found:
            raise field_error("invalid_value", "is not among the tools", "tools", i)
        return found


def _offered(path: str, tool: Tool) -> Iterable[Offered]:
    if isinstance(tool, NamespaceTool):
        about = f"{tool.name}: {tool.description}\n\n" if tool.description else ""
        for i, inner in enumerate(tool.tools):
            chat = inner.for_chat(chat_name(tool.name, inner.name), "" if i else about)
            yield Offered(f"{path}.tools[{i}]", inner.type, inner.name, tool.name, chat)
    elif isinstance(tool, FunctionTool | ResponseCustomTool):
        yield Offered(path, tool.type, tool.name, None, tool.for_chat(tool.name, ""))
    else:
        text, properties, required = CLIENT_RUN[tool.type]
        schema = {"type": "object", "properties": properties, "required": required, "additionalProperties": False}
        function = {"name": tool.type, "description": text, "parameters": schema, "strict": True}
        yield Offered(path, tool.type, tool.type, None, {"type": "function", "function": function})


def _named(name: str, about: str, description: str | None) -> dict[str, Any]:
    text = f"{about}{description or ''}".strip()
    return {"name": name, **({"description": text[:MAX_DESCRIPTION]} if text else {})}


# tool_choice


def parse_choice(value: Any) -> Any:
    """Checks the shape of tool_choice; ToolSet checks it against the tools. Field errors name the part below it."""
    if isinstance(value, str):
        if value not in ("none", "auto", "required"):
            raise field_error("invalid_value", "must be 'none', 'auto', 'required' or an object")
        return value
    if not isinstance(value, dict):
        raise field_error("invalid_type", "must be 'none', 'auto', 'required' or an object")
    if value.get("type") != "allowed_tools":
        _check_chosen(value, (), ("allowed_tools",))
        return value
    known_fields(value, ("type", "mode", "tools"))
    tools = value.get("tools")
    if not isinstance(tools, list) or not 1 <= len(tools) <= MAX_TOOLS:
        raise field_error("invalid_type", f"must be a list of 1 to {MAX_TOOLS} tools", "tools")
    if value.get("mode") not in ("auto", "required"):
        raise field_error("invalid_value", "must be 'auto' or 'required'", "mode")
    for i, tool in enumerate(tools):
        _check_chosen(tool, ("tools", i), ("namespace",))
    return value


def _check_chosen(value: Any, at: tuple[str | int, ...], more: tuple[str, ...]) -> None:
    if not isinstance(value, dict):
        raise field_error("invalid_type", "must be an object with a type", *at)
    kind = value.get("type")
    kinds = (*(kind for kind in TOOLS if kind != "namespace"), *more)
    if kind in HOSTED:
        return
    if not isinstance(kind, str) or kind not in kinds:
        raise field_error("unsupported_value", f"must be {listed(kinds)}", *at, "type")
    if kind in ("function", "custom", "namespace"):
        if not isinstance(value.get("name"), str):
            raise field_error("invalid_type", "must be a string", *at, "name")
        known_fields(value, ("type", "name", "namespace"), *at)
        if not isinstance(value.get("namespace"), str | None):
            raise field_error("invalid_type", "must be a string", *at, "namespace")
    else:
        known_fields(value, ("type",), *at)
