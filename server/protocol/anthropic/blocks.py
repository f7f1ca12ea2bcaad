"""The content blocks of Anthropic's messages: the fields of each type, and the text of documents and search results."""

from typing import Any

from server.protocol.field_checks import field_error, known_fields
from server.protocol.harmless import CACHE

TEXTS = ("text", "document", "search_result")  # blocks that users and tools write, and that become text
# Type of a block -> (required fields with their types, optional fields).
FIELDS: dict[str, tuple[dict[str, type], tuple[str, ...]]] = {
    "text": ({"text": str}, ("citations",)),
    "thinking": ({"thinking": str}, ("signature",)),
    "tool_use": ({"id": str, "name": str, "input": dict}, ("caller",)),
    "tool_result": ({"tool_use_id": str}, ("content", "is_error")),
    "tool_reference": ({"tool_name": str}, ()),
    "tool_addition": ({"tool": dict}, ()),
    "tool_removal": ({"tool": dict}, ()),
    "document": ({"source": dict}, ("title", "context", "citations")),
    "search_result": ({"source": str, "title": str, "content": list}, ("citations",)),
}
NAMES_OF_TYPES: dict[type, str] = {str: "a string", dict: "an object", list: "a list"}
# Blocks of tools that run on Anthropic's servers, and thinking that only Anthropic can read. A client that changed
# servers still sends them; prompts omit them. A compaction without a summary has no effect at Anthropic either.
FOREIGN_BLOCKS = frozenset(
    "advisor_tool_result bash_code_execution_tool_result code_execution_tool_result compaction fallback "
    "mcp_tool_listing mcp_tool_result mcp_tool_use redacted_thinking server_tool_use tool_search_tool_result "
    "text_editor_code_execution_tool_result web_fetch_tool_result web_search_tool_result".split()
)


def read_blocks(value: Any, kinds: tuple[str, ...], *path: str | int) -> list[dict[str, Any]]:
    """The content `value`, which stands at `path`, as a list of blocks of `kinds`, each with the fields of its type.
    Documents and search results come as text. Raises InvalidRequestError."""
    if isinstance(value, str):
        return [{"type": "text", "text": value}]
    if not isinstance(value, list):
        raise field_error("invalid_type", "must be a string or a list of blocks", *path)
    return [_block(block, kinds, *path, i) for i, block in enumerate(value)]


def _block(block: Any, kinds: tuple[str, ...], *path: str | int) -> dict[str, Any]:
    if not isinstance(block, dict):
        raise field_error("invalid_type", "must be an object", *path)
    kind = block.get("type")
    if isinstance(kind, str) and kind in FOREIGN_BLOCKS and "thinking" in kinds:  # a turn of the assistant
        is_summary = kind == "compaction" and isinstance(block.get("content"), str)
        return {"type": "text", "text": block["content"]} if is_summary else {"type": kind}
    if kind not in kinds:
        text = f"must be {' or '.join(map(repr, kinds))} here: this server takes text only"
        raise field_error("unsupported_value", text, *path, "type")
    required, others = FIELDS[kind]
    text = f"is not a field of a block of type {kind}"
    fields = known_fields(block, ("type", CACHE, *required, *others), *path, text=text)
    for name, python_type in required.items():
        if not isinstance(fields.get(name), python_type):
            raise field_error("invalid_type", f"must be {NAMES_OF_TYPES[python_type]}", *path, name)
    if kind == "document":
        return {"type": "text", "text": _document_text(fields, *path)}
    return {"type": "text", "text": _search_result_text(fields, *path)} if kind == "search_result" else fields


def _document_text(fields: dict[str, Any], *path: str | int) -> str:
    """The text of a document, in plain text or in blocks of text, below its title and its context."""
    _refuse_citations(fields, *path)
    source = fields["source"]
    if source.get("type") == "content":
        body = _joined(source.get("content"), *path, "source", "content")
    elif source.get("type") != "text":
        text = "must be 'text' or 'content': this server takes text only"
        raise field_error("unsupported_value", text, *path, "source", "type")
    elif not isinstance(body := source.get("data"), str):
        raise field_error("invalid_type", "must be a string", *path, "source", "data")
    head = {name: "" if fields.get(name) is None else fields[name] for name in ("title", "context")}
    for name, part in head.items():
        if not isinstance(part, str):
            raise field_error("invalid_type", "must be a string", *path, name)
    return "\n".join(part for part in (*head.values(), body) if part)


def _search_result_text(fields: dict[str, Any], *path: str | int) -> str:
    """The text of a search result, below its title and its source."""
    _refuse_citations(fields, *path)
    body = _joined(fields["content"], *path, "content")
    return "\n".join(part for part in (fields["title"], fields["source"], body) if part)


def _joined(content: Any, *path: str | int) -> str:
    return "\n".join(block["text"] for block in read_blocks(content, ("text",), *path))


def _refuse_citations(fields: dict[str, Any], *path: str | int) -> None:
    if fields.get("citations") not in (None, {}, {"enabled": False}):
        raise field_error("unsupported_value", "is not supported by this server: leave it out", *path, "citations")
