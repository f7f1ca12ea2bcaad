"""Bad fields of /v1/embeddings, /tokenize and /detokenize."""

from tests.fake_device import HIDDEN_SIZE
from tests.server.bad_input.table import rows

EMBEDDINGS = rows(
    [
        ({"input": None}, "input"),
        ({"input": ""}, "input"),
        ({"input": []}, "input"),
        ({"input": ["a", ""]}, "input[1]"),
        ({"input": [[]]}, "input[0]"),
        ({"input": [[97], []]}, "input[1]"),
        ({"input": 5}, "input"),
        ({"input": {"a": 1}}, "input"),
        ({"input": [True]}, "input[0]"),
        ({"input": ["a", 5]}, "input[1]"),
        ({"input": [1, "a"]}, "input[1]"),
        ({"input": [1, 260]}, "input[1]"),
        ({"input": [[1], [5, -1]]}, "input[1][1]"),
        ({"input": [10**60]}, "input[0]"),
        ({"input": ["x"] * 2049}, "input"),
        ({"input": "x" * 513}, "input"),
        ({"input": ["a", "x" * 513]}, "input[1]"),
        ({"input": "x" * 100_000}, "input"),
        ({"input": [97] * 513}, "input"),
        ({"input": ["x" * 500] * 601}, "input"),
        ({"model": None}, "model"),
        ({"dimensions": 0}, "dimensions"),
        ({"dimensions": HIDDEN_SIZE + 1}, "dimensions"),
        ({"dimensions": -1}, "dimensions"),
        ({"dimensions": 2.0}, "dimensions"),
        ({"dimensions": True}, "dimensions"),
        ({"encoding_format": "binary"}, "encoding_format"),
        ({"encoding_format": 1}, "encoding_format"),
        ({"truncate_prompt_tokens": 0}, "truncate_prompt_tokens"),
        ({"truncate_prompt_tokens": -2}, "truncate_prompt_tokens"),
        ({"truncate_prompt_tokens": 513}, "truncate_prompt_tokens"),
        ({"add_special_tokens": "no"}, "add_special_tokens"),
        ({"temperature": 1}, "temperature"),
        ({"dimension": 2}, "dimension"),
    ]
)

TOKENIZE = rows(
    [
        ({}, "prompt"),
        ({"prompt": 5}, "prompt"),
        ({"prompt": ["a"]}, "prompt"),
        ({"prompt": None}, "prompt"),
        ({"prompt": "x", "messages": []}, "messages"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "user"}]}, "messages[0].content"),
        ({"prompt": "x", "add_special_tokens": 1}, "add_special_tokens"),
        ({"prompt": "x", "return_token_strs": "yes"}, "return_token_strs"),
        ({"prompt": "x", "return_token_str": True}, "return_token_str"),
        ({"prompt": "x" * 7000}, "prompt"),
        ({"prompt": "x", "model": 1}, "model"),
    ]
)

DETOKENIZE = rows(
    [
        ({}, "tokens"),
        ({"tokens": "abc"}, "tokens"),
        ({"tokens": [1, -1]}, "tokens[1]"),
        ({"tokens": [1, 2, 260]}, "tokens[2]"),
        ({"tokens": [2**31]}, "tokens[0]"),
        ({"tokens": [10**60]}, "tokens[0]"),
        ({"tokens": [True]}, "tokens[0]"),
        ({"tokens": [1.0]}, "tokens[0]"),
        ({"tokens": [[1]]}, "tokens[0]"),
        ({"tokens": [97] * 513}, "tokens"),
        ({"tokens": [97], "skip_special_tokens": True}, "skip_special_tokens"),
    ]
)
