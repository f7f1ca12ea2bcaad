"""Two facts for schemathesis: the name of the model, and that an answer of 4 tokens tells as much as one of 2,000.

Without it nearly every generated body would end as a 404 for its model.
"""

import os
from typing import Any

import schemathesis

MODEL = os.environ["CLIENTS_MODEL"]
MAX_TOKENS = 4
LIMITS = ("max_tokens", "max_completion_tokens", "max_output_tokens")
# Bounds answers that could otherwise fill the context.
DEFAULTS = {"/v1/chat/completions": "max_tokens", "/v1/responses": "max_output_tokens"}


@schemathesis.hook
def before_call(context: Any, case: Any, kwargs: dict[str, Any]) -> None:
    body = case.body
    if not isinstance(body, dict):
        return
    if isinstance(body.get("model"), str):
        body["model"] = MODEL
    for name in LIMITS:
        if type(body.get(name)) is int:
            body[name] = min(body[name], MAX_TOKENS)
    field = DEFAULTS.get(case.operation.path)
    if field is not None and all(body.get(name) is None for name in LIMITS):
        body[field] = MAX_TOKENS
