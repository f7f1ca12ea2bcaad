"""Bad fields of /v1/messages: (fields, start of the message)."""

SCHEMA = {
    "type": "object",
    "properties": {"animal": {"enum": ["fox", "cat"]}},
    "required": ["animal"],
    "additionalProperties": False,
}
TOOL = {"name": "find", "description": "finds animals", "input_schema": SCHEMA}
USE = {"type": "tool_use", "id": "t2", "name": "find", "input": {}}
WEB_SEARCH = {"type": "web_search_20250305", "name": "web_search", "max_uses": 8}
EDIT = {"type": "clear_tool_uses_20250919"}
THINKING = {"type": "clear_thinking_20251015"}


def _search_result(**fields):
    found = {"type": "search_result", "title": "Foxes", "source": "fox.txt", "content": []}
    return {"messages": [{"role": "user", "content": [found | fields]}]}


def _document(source, **more):
    return {"messages": [{"role": "user", "content": [{"type": "document", "source": source, **more}]}]}


FIELDS = [
    ({"max_tokens": None}, "max_tokens is required"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"max_tokens": 600}, "input length and `max_tokens` exceed context limit: 24 + 600 > 512, decrease"),
    ({"messages": []}, "messages must hold"),
    ({"messages": "hello"}, "messages must be a list"),
    ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0].role"),
    ({"messages": [{"role": "user", "content": 1}]}, "messages[0].content"),
    ({"messages": [{"role": "user", "content": "x", "name": "y"}]}, "messages[0].name"),
    ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, "messages[0].content[0].type"),
    ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages[0].content[0].text"),
    ({"messages": [{"role": "user", "content": [{"type": "text", "text": "x", "y": 1}]}]}, "messages[0].content"),
    ({"system": 1}, "system"),
    ({"temperature": 1.5}, "temperature"),
    ({"top_p": 2}, "top_p"),
    ({"top_k": -2}, "top_k"),
    ({"stop_sequences": [""]}, "stop"),
    ({"stop_sequences": "x"}, "stop_sequences"),
    ({"stop": ["x"]}, "stop"),
    ({"tools": [{"name": "f"}]}, "tools[0].input_schema"),
    ({"tools": [{"type": "web_search_2025", "name": "web_search"}]}, "tools[0].type must be 'custom', or the type of"),
    ({"tools": [{"type": "bash_20250124", "name": "bash"}]}, "tools[0].type is 'bash_20250124', whose schema only"),
    ({"tools": [{"type": "computer_20250124", "name": "computer", "display_width_px": 8}]}, "tools[0].type is 'comp"),
    ({"tools": [WEB_SEARCH], "tool_choice": {"type": "any"}}, "tool_choice cannot be 'any': web_search runs on Anthr"),
    (
        {"tools": [WEB_SEARCH, TOOL], "tool_choice": {"type": "tool", "name": "web_search"}},
        "tool_choice cannot be 'web_search': web_search runs on Anthropic's servers, not on this one",
    ),
    (
        {"tools": [WEB_SEARCH], "tool_choice": {"type": "tool", "name": "other"}},
        "tool_choice names a tool that is not among the tools",
    ),
    ({"messages": [{"role": "user", "content": [{"type": "server_tool_use"}]}]}, "messages[0].content[0].type"),
    (_document({"type": "base64", "data": "eA=="}), "messages[0].content[0].source.type must be 'text' or"),
    (_document({"type": "text"}), "messages[0].content[0].source.data must be a string"),
    (_document({"type": "text", "data": "x"}, title=1), "messages[0].content[0].title must be a string"),
    (_document({"type": "text", "data": "x"}, citations={"enabled": True}), "messages[0].content[0].citations is not"),
    (_document("x"), "messages[0].content[0].source must be an object"),
    (
        _document({"type": "content", "content": [{"type": "image"}]}),
        "messages[0].content[0].source.content[0].type must be 'text' here",
    ),
    (_document({"type": "content"}), "messages[0].content[0].source.content must be a string or a list of blocks"),
    (_search_result(title=None), "messages[0].content[0].title must be a string"),
    (_search_result(source=1), "messages[0].content[0].source must be a string"),
    (_search_result(content="x"), "messages[0].content[0].content must be a list"),
    (_search_result(content=[{"type": "image"}]), "messages[0].content[0].content[0].type must be 'text' here"),
    (_search_result(citations={"enabled": True}), "messages[0].content[0].citations is not supported"),
    (
        {"output_format": {"type": "json_schema", "schema": {}}},
        "output_format is not a field of this request; did you mean output_config.format?",
    ),
    ({"tool_choice": {"type": "any"}}, "tool_choice"),
    ({"tool_choice": {"type": "tool"}}, "tool_choice.name"),
    ({"thinking": {"type": "always"}}, "thinking.type"),
    ({"output_config": {"format": {"type": "json_schema"}}}, "output_config.format.schema"),
    ({"output_config": {"format": {"type": "json_schema", "schema": {"type": 1}}}}, "output_config.format"),
    ({"service_tier": "priority"}, "service_tier"),
    ({"container": "c"}, "container"),
    ({"unheard_of": 1}, "unheard_of"),
]
TOOL_ROWS = [
    ({"tools": [TOOL, TOOL]}, "tools[1].name"),
    ({"tools": [TOOL | {"name": "a b"}]}, "tools[0].name"),
    ({"tools": [TOOL | {"name": "x" * 129}]}, "tools[0].name must be up to 128 letters"),
    ({"tools": [TOOL] * 1025}, "tools may hold at most 1024 entries"),
    ({"tools": [TOOL | {"input_schema": {"type": "array"}}]}, "tools[0].input_schema.type"),
    ({"tools": [TOOL], "tool_choice": {"type": "tool", "name": "other"}}, "tool_choice"),
    (
        {"messages": [{"role": "user", "content": "find it"}, {"role": "assistant", "content": [USE | {"id": ""}]}]},
        "messages[1].content[0].id",
    ),
    (
        {
            "messages": [
                {"role": "user", "content": "find it"},
                {"role": "assistant", "content": [USE | {"name": "n" * 257}]},
            ]
        },
        "messages[1].content[0].name",
    ),
]
EDITS = [
    ([{"type": "compact_20260112"}], "edits[0].type is 'compact_20260112', an edit that this server does not"),
    ([{}], "edits[0].type must be a string"),
    (["x"], "edits[0] must be an object"),
    ({}, "edits must be a list"),
    ([EDIT, THINKING], "edits[1].type must be first"),
    ([EDIT, EDIT], "edits[1].type may not be 'clear_tool_uses_20250919' twice"),
    ([EDIT | {"keep": 3}], "edits[0].keep must be an object"),
    ([EDIT | {"keep": {"type": "tool_uses", "value": -1}}], "edits[0].keep.value"),
    ([EDIT | {"keep": {"type": "input_tokens", "value": 1}}], "edits[0].keep.type"),
    ([EDIT | {"trigger": {"type": "turns", "value": 1}}], "edits[0].trigger.type"),
    ([EDIT | {"trigger": {"type": "tool_uses"}}], "edits[0].trigger.value is required"),
    ([EDIT | {"exclude_tools": "find"}], "edits[0].exclude_tools must be a list"),
    ([EDIT | {"clear_tool_inputs": [1]}], "edits[0].clear_tool_inputs must be true, false or a list"),
    ([EDIT | {"keeps": 1}], "edits[0].keeps is not a field of this request; did you mean keep?"),
    ([THINKING | {"keep": "some"}], "edits[0].keep must be 'all' or an object"),
    ([THINKING | {"keep": {"type": "thinking_turns", "value": 0}}], "edits[0].keep.value"),
]

MESSAGES = [
    *FIELDS,
    *TOOL_ROWS,
    *[({"context_management": {"edits": edits}}, f"context_management.{start}") for edits, start in EDITS],
    *[
        ({field: {"a": 1}}, f"{field} is not supported by this server: leave it out.")
        for field in ("container", "mcp_servers")
    ],
]
