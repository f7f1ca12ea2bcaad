"""Bad input of /v1/chat/completions and /v1/completions, by field."""

from typing import Any

from tests.server.bad_input.structured_output import STRUCTURED_OUTPUT
from tests.server.bad_input.table import HUGE, LONG, Bad, rows, values
from tests.server.bad_input.tools import TOOL_ROWS
from tests.server.tools.requests import function

INFINITY, NAN = float("inf"), float("nan")
NO_NUMBER = ("1", True, [], {}, "NaN")
NO_BOOL = (1, "true", [], 0.0)

# Wrong values of fields that chats and completions share.
BOTH: dict[str, tuple[Any, ...]] = {
    "model": (1, True, [], {}),
    "temperature": (*NO_NUMBER, -0.1, 2.1, 2.01, 1e10, HUGE, NAN, INFINITY, -INFINITY),
    "top_p": (*NO_NUMBER, -0.1, -1, 1.01, 1.5, HUGE, NAN),
    "min_p": (*NO_NUMBER, -0.1, 1.1, NAN),
    "presence_penalty": (*NO_NUMBER, -2.1, 2.01, 2.1, INFINITY),
    "frequency_penalty": (*NO_NUMBER, -2.1, -2.01, 2.1, NAN),
    "repetition_penalty": (*NO_NUMBER, 0, 5e-324, -1, 101, NAN),
    "n": (*NO_NUMBER, 0, -1, 1.5, 129, 10**6, HUGE, 1.0),
    "max_tokens": (*NO_NUMBER, -1, 0.5, 513, 2**31, 10**15, 2**63, HUGE),
    "prompt_logprobs": (*NO_NUMBER, -1, 21, 1.5, HUGE),
    "min_tokens": (*NO_NUMBER, -1, 9, 10**12, 2**63, HUGE, 1.5),
    "top_k": (*NO_NUMBER, -2, 2**31, HUGE, 0.5),
    "seed": (*NO_NUMBER, -(2**63) - 1, 2**63, 2**70, HUGE, 1.5),
    "priority": (*NO_NUMBER, 2**31, -(2**31) - 1, HUGE, 0.5),
    "stream": NO_BOOL,
    "ignore_eos": NO_BOOL,
    "skip_special_tokens": NO_BOOL,
    "include_stop_str_in_output": ("yes", 0),
    "return_token_ids": ("true",),
    "return_tokens_as_token_ids": ("true",),
    "spaces_between_special_tokens": ("yes",),
    "use_beam_search": (1,),
    "stop": (1, True, {}, [""], "", ["x"] * 17, [["a"]], ["ok", 5], ["a", "b", "c", "d", "e"], [LONG]),
    "stop_token_ids": (
        *(1, "1", {}, [-1], [260], [2**31], [10**12], [2**63], [HUGE], [0] * 1025),
        *([True], [1.0], ["1"]),
    ),
    "logit_bias": (
        *(1, [], "x", {"a": 1}, {"-1": 1}, {"1.5": 1}, {"٣": 1}, {"260": 1}),
        *({"5": value} for value in (100.5, 101, -101, 1e9, "1", True, [], NAN, HUGE)),
        *({key: 1} for key in (str(HUGE), "9" * 4000, "", " 1", "2147483648", "05", "00")),
        {"5": 100, "05": -100},
        {str(i): 1 for i in range(1025)},
    ),
    "bad_words": ("a", [1], [""], [" "], ["a"] * 257, ["x" * 257], [LONG], [["a"]]),
    "allowed_token_ids": ([], 1, "1", [True], [1.0], [-1], [260], [HUGE], [5, 10**12]),
    "cache_salt": (1, [], "x" * 129),
    "stream_options": ({"include_usage": True},),
    "tools": ([{"type": "function"}], {}, 1),
    "tool_choice": ("auto", "required", {"type": "function"}),
    "response_format": ({"type": "json_schema"}, {"type": "structural_tag"}, "text", {}),
    "structured_outputs": (
        *({}, "x", {"json": 1}, {"regex": "a", "choice": ["b"]}, {"xml": ""}),
        *({"regex": "("}, {"grammar": "start: x"}, {"json": {"not": {}}}, {"regex": LONG}),
    ),
    "truncate_prompt_tokens": (0, -2, 512, 1.5, "1", HUGE, True),
    "truncation_side": ("middle", 1, []),
    "timeout": (0, -1, 1e9, "3", True, [1]),
    "reasoning_effort": ("huge",),
    "service_tier": ("first", 1, []),
    # Fields without effect have a type all the same.
    "metadata": ("x", {str(i): "x" for i in range(17)}),
    "store": (1,),
    "user": (5,),
    "safety_identifier": ({},),
    "prompt_cache_key": (True,),
    "prompt_cache_retention": (24,),
    "prompt_cache_options": ("x",),
    "prediction": ("x",),
    # Fields of other APIs, and those that this server cannot honour.
    "suffix": ("tail",),
    "logits_processors": (["x"],),
    "prompt_embeds": ("AAAA",),
    "chat_template": ("{{ 1 }}",),
    "guided_json": ({},),
    "guided_regex": ("a+",),
    "regex": ("a+",),
    "ebnf": ("x",),
    "n_predict": (5,),
    "functions": ([{}],),
    "modalities": (["audio"],),
    "moderation": ({"model": "x"},),
}

# The error names the place inside these.
BOTH_PLACES = rows(
    [
        ({"metadata": {"a": 5}}, "metadata.a"),
        ({"metadata": {"a": "x" * 513}}, "metadata.a"),
        ({"metadata": {"a" * 65: "x"}}, "metadata." + "a" * 64, "metadata"),
        ({"structured_outputs": {"regex": LONG}}, "structured_outputs.regex"),
        *STRUCTURED_OUTPUT,
    ]
)

CHAT_ONLY: dict[str, tuple[Any, ...]] = {
    "max_tokens": (0,),
    "max_completion_tokens": (*NO_NUMBER, 0, -1, 513, HUGE),
    "messages": ([], {}, "hi", 1, True),
    "logprobs": (1, "true", []),
    "top_logprobs": (1,),
    "add_generation_prompt": (1,),
    "prompt": ("hi",),
    "best_of": (2,),
    "continue_final_message": (1,),
    "echo": (True,),
    "verbosity": ("loud", 1, []),
    "documents": ({}, "x", [{}] * 257, [{"text": "no place for it"}]),
}

# (message, place that the error names)
MESSAGES = [
    (5, "messages[0]"),
    (None, "messages[0]"),
    ([], "messages[0]"),
    ({}, "messages[0].role"),
    ({"role": "user"}, "messages[0].content"),
    ({"role": "user", "content": None}, "messages[0].content"),
    ({"role": "user", "content": 5}, "messages[0].content"),
    ({"role": "user", "content": {}}, "messages[0].content"),
    ({"role": "user", "content": ["text"]}, "messages[0].content[0]"),
    ({"role": "user", "content": [{}]}, "messages[0].content[0].type"),
    (
        {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "http://x"}}]},
        "messages[0].content[0].type",
    ),
    ({"role": "user", "content": [{"type": "text"}]}, "messages[0].content[0].text"),
    ({"role": "user", "content": [{"type": "text", "text": 1}]}, "messages[0].content[0].text"),
    ({"role": "user", "content": [{"type": "text", "text": "a", "x": 1}]}, "messages[0].content[0].x"),
    ({"role": "tool", "content": "x"}, "messages[0].tool_call_id"),
    ({"role": "robot", "content": "x"}, "messages[0].role"),
    ({"role": 1, "content": "x"}, "messages[0].role"),
    ({"role": "user", "content": "x", "name": 1}, "messages[0].name"),
    ({"role": "user", "content": "x", "color": "red"}, "messages[0].color"),
    ({"role": "assistant", "content": "x", "tool_calls": [{"id": "1"}]}, "messages[0].tool_calls[0].function"),
    ({"role": "user", "content": "a", "refusal": "no"}, "messages[0].refusal"),
    ({"role": "user", "content": [{"type": "refusal", "refusal": "no"}]}, "messages[0].content[0].type"),
    (
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "image_url"}]},
        "messages[0].content[1].type",
    ),
    ({"role": "user", "content": [{"type": "input_audio"}]}, "messages[0].content[0].type"),
    ({"role": "user", "content": [{"type": "file"}]}, "messages[0].content[0].type"),
    ({"role": "assistant", "content": "a", "audio": {"id": "x"}}, "messages[0].audio"),
    ({"role": "function", "content": "a", "name": "f"}, "messages[0].role"),
    ({"role": "user", "content": "a", "name": "x" * 257}, "messages[0].name"),
]

# (chat_template_kwargs, place that the error names)
TEMPLATE_KWARGS = [
    ({"tokenize": True}, "chat_template_kwargs.tokenize"),
    ({"messages": "x"}, "chat_template_kwargs.messages"),
    ({"chat_template": "{{ 1 }}"}, "chat_template_kwargs.chat_template"),
    ({"add_generation_prompt": False}, "chat_template_kwargs.add_generation_prompt"),
    ({"tools": "x"}, "chat_template_kwargs.tools"),
    ({"not an identifier": 1}, "chat_template_kwargs.not an identifier"),
    ({"x": [1]}, "chat_template_kwargs.x"),
    ({"x": {}}, "chat_template_kwargs.x"),
    ({"x": "y" * 257}, "chat_template_kwargs.x"),
    ({f"x{i}": 1 for i in range(17)}, "chat_template_kwargs"),
    ([], "chat_template_kwargs"),
]

OTHER_SERVERS = [
    ({"num_ctx": 513}, "num_ctx"),
    ({"num_ctx": 0}, "num_ctx"),
    ({"options": {"num_ctx": 4096}}, "num_ctx"),
    ({"options": {"mirostat": 2}}, "options.mirostat"),
    ({"options": []}, "options"),
    ({"options": {"temperature": 0.5}, "temperature": 0.7}, "options.temperature"),
    ({"num_predict": 3, "max_tokens": 4}, "num_predict"),
    ({"num_predict": "3", "max_tokens": None}, "num_predict"),
    ({"repeat_penalty": [1]}, "repeat_penalty"),
    ({"best_of": 2}, "best_of"),
    ({"cache_prompt": "yes"}, "cache_prompt"),
    ({"session_id": 5}, "session_id"),
]

# The context is 512 tokens.
TOO_LONG = [
    ({"tools": [function("get", {}, description="a" * 9_000)]}, "tools"),
    ({"tools": [function("get", {"type": "object", "properties": {"b" * 9_000: {}}})]}, "tools"),
    ({"tools": [function("get", {"type": "object", "enum": list(range(20_000))})]}, "tools"),
    ({"messages": [{"role": "user", "content": "a" * 9_000}]}, "messages"),
]

CHAT = [
    *values(BOTH),
    *BOTH_PLACES,
    *values(CHAT_ONLY),
    *[Bad({"logprobs": True, "top_logprobs": value}, "top_logprobs") for value in (*NO_NUMBER, -1, 21, HUGE)],
    Bad({"logprobs": False, "top_logprobs": 0}, "top_logprobs"),
    *[Bad({"messages": [message]}, param, param) for message, param in MESSAGES],
    *[Bad({"chat_template_kwargs": kwargs}, param) for kwargs, param in TEMPLATE_KWARGS],
    *rows(TOOL_ROWS),
    *rows(OTHER_SERVERS),
    *[
        Bad(fields, param, "maximum context length is 512 tokens", "context_length_exceeded")
        for fields, param in TOO_LONG
    ],
    *[
        Bad(
            {
                "response_format": {
                    "type": "json_schema",
                    "json_schema": {"name": "a", "schema": {"type": "object"}, field: LONG},
                }
            },
            f"response_format.json_schema.{field}",
        )
        for field in ("name", "description")
    ],
]

# (prompt, place that the error names)
PROMPTS = [
    *[(value, "prompt") for value in (1, True, {}, [], 1.5)],
    *[([value], "prompt[0]") for value in (True, 1.5, {}, None)],
    ([[]], "prompt[0]"),
    (["a", 1], "prompt[1]"),
    ([1, "a"], "prompt[1]"),
    ([1, True], "prompt[1]"),
    ([1, 2.0], "prompt[1]"),
    ([[1], "a"], "prompt[1]"),
    ([[1], [2, "x"]], "prompt[1][1]"),
    ([[1], [True]], "prompt[1][0]"),
    *[([1, value], "prompt[1]") for value in (-1, 260, 2**31, 2**63, HUGE)],
    ([[1], [2, 260]], "prompt[1][1]"),
    (["a"] * 65, "prompt"),
    (["a", []], "prompt[1]"),
    ("x" * 512, "prompt"),
    (["a", "x" * 600], "prompt[1]"),
    ([7] * 512, "prompt"),
    (LONG, "prompt"),
]

COMPLETIONS_ONLY = [
    ({"logprobs": 6}, "logprobs"),
    ({"logprobs": -1}, "logprobs"),
    ({"logprobs": True}, "logprobs"),
    ({"logprobs": "1"}, "logprobs"),
    ({"echo": 1}, "echo"),
    ({"best_of": 21}, "best_of"),
    ({"n": 3, "best_of": 2}, "best_of"),
    ({"suffix": 1}, "suffix"),
    ({"best_of": "1"}, "best_of"),
    ({"messages": []}, "messages"),
    ({"max_completion_tokens": 5}, "max_completion_tokens"),
    ({"stream_options": {"include_usage": 1}, "stream": True}, "stream_options.include_usage"),
    ({"stream_options": {"foo": 1}, "stream": True}, "stream_options.foo"),
    ({"stream_options": {"continuous_usage_stats": True}, "stream": True}, "stream_options.continuous_usage_stats"),
    ({"cache_salt": ""}, "cache_salt"),
    ({"stream_options": [], "stream": True}, "stream_options"),
    ({"best_of": 1, "n": 2}, "best_of"),
    ({"best_of": 10**6}, "best_of"),
    ({"use_beam_search": True, "n": 2, "length_penalty": 1e308}, "length_penalty"),
]

SCORING = [
    ({"prompt_logprobs": 1, "stream": True}, "prompt_logprobs"),
    ({"prompt_logprobs": 1, "use_beam_search": True}, "prompt_logprobs"),
    ({"logprobs": 0, "echo": True, "use_beam_search": True}, "logprobs"),
    ({"prompt_logprobs": -1}, "prompt_logprobs"),
    ({"logprobs": 0, "echo": True, "suffix": "end"}, "suffix"),
    ({"prompt": [[]], "echo": True, "logprobs": 1}, "prompt[0]"),
    ({"max_tokens": 0, "min_tokens": 1}, "min_tokens"),
]

COMPLETIONS = [
    *values(BOTH),
    *BOTH_PLACES,
    *[Bad({"prompt": prompt}, param) for prompt, param in PROMPTS],
    *rows(COMPLETIONS_ONLY),
    *rows(SCORING),
]
