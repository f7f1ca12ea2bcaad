"""Bad tools and tool choices of chats."""

from tests.server.tools.requests import TOOLS, custom, function

CALLS = [{"id": "c1", "type": "function", "function": {"name": "now", "arguments": "{}"}}]


# (fields, place that the error names)
TOOL_ROWS = [
    ({"tools": [function("a b")]}, "tools[0].function.name"),
    ({"tools": [function("x" * 129)]}, "tools[0].function.name"),
    ({"tools": [function("a"), function("a")]}, "tools[1].function.name"),
    ({"tools": [function("a")] * 1025}, "tools"),
    ({"tools": [function("a", {"type": "array"})]}, "tools[0].function.parameters.type"),
    ({"tools": [function("a", [])]}, "tools[0].function.parameters"),
    ({"tools": [function("a", color=1)]}, "tools[0].function.color"),
    ({"tools": [{"type": "web_search", "anything": 1}]}, "tools[0].type"),
    ({"tools": [{"function": {"name": "a"}}]}, "tools[0].type"),
    ({"tools": [{"type": "custom"}]}, "tools[0].custom"),
    ({"tools": [{"type": "custom", "name": "a"}]}, "tools[0].name"),
    ({"tools": [{"type": "custom", "custom": {"name": "a b"}}]}, "tools[0].custom.name"),
    ({"tools": [{"type": "custom", "custom": {"name": "a", "format": {"type": "x", "y": 1}}}]},
     "tools[0].custom.format.type"),
    ({"tools": [custom("a", "lark", "start: <[5]>")]}, "tools[0].custom.format.grammar.definition"),
    ({"tools": [custom("a", "lark", "start: B")]}, "tools[0].custom.format.grammar.definition"),
    ({"tools": [custom("a", "regex", "(")], "tool_choice": "required"}, "tools[0].custom.format.grammar.definition"),
    ({"tools": [custom(f"a{i}", "lark", 'start: "b"') for i in range(17)]},
     "tools[16].custom.format.grammar.definition"),
    ({"tools": [custom("a"), function("a")]}, "tools[1].function.name"),
    ({"tools": [custom("a")], "tool_choice": {"type": "custom", "custom": {"name": "b"}}}, "tool_choice"),
    ({"tools": [custom("a")], "tool_choice": {"type": "custom", "function": {"name": "a"}}}, "tool_choice.function"),
    ({"tool_choice": "auto"}, "tool_choice"),
    ({"tools": TOOLS, "tool_choice": "some"}, "tool_choice"),
    ({"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "other"}}}, "tool_choice"),
    ({"tools": TOOLS, "tool_choice": {"type": "function"}}, "tool_choice.function"),
    ({"tools": TOOLS, "tool_choice": {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": []}}},
     "tool_choice.allowed_tools.tools"),
    ({"tools": TOOLS, "parallel_tool_calls": 1}, "parallel_tool_calls"),
    ({"tools": TOOLS, "structured_outputs": {"regex": "a"}}, "structured_outputs"),
    ({"tools": TOOLS, "use_beam_search": True}, "tools"),
    ({"functions": [{"name": "a"}]}, "functions"),
    ({"function_call": "auto"}, "function_call"),
    ({"messages": [{"role": "assistant", "tool_calls": CALLS * 129}]}, "messages[0].tool_calls",
     "messages[0].tool_calls has more than 128 calls in one turn: leave some out."),
    ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0].tool_call_id"),
    ({"messages": [{"role": "user", "content": "x", "tool_calls": CALLS}]}, "messages[0].tool_calls"),
    ({"messages": [{"role": "assistant", "content": "x", "function_call": {}}]}, "messages[0].function_call"),
]  # fmt: skip
