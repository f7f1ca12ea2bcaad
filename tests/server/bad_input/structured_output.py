"""Bad response_format and structured_outputs, of chats and completions."""

OBJECT = {"type": "object", "properties": {"name": {"type": "string"}}}


def json_schema(schema=OBJECT, **more):
    return {"type": "json_schema", "json_schema": {"name": "fox", "schema": schema, **more}}


DEEP = {"type": "string"}
for _ in range(100):
    DEEP = {"type": "array", "items": DEEP}

# (fields, place that the error names, words of the message)
STRUCTURED_OUTPUT = [
    ({"response_format": {"type": "json_schema"}}, "response_format", "json_schema"),
    ({"response_format": {"type": "json_schema", "json_schema": {"schema": {}}}},
                "response_format.json_schema.name", "required"),
    ({"response_format": json_schema() | {"json_schema": {"name": "a b", "schema": {}}}},
                 "response_format.json_schema.name", "64"),
    ({"response_format": json_schema(strikt=True)}, "response_format.json_schema.strikt", "field"),
    ({"response_format": {"type": "structural_tag"}}, "response_format.type", "json_object"),
    ({"response_format": json_schema({"not": {}}, strict=True)}, "response_format.json_schema.schema.not", "not"),
    ({"response_format": json_schema({"type": "strin"})}, "response_format", "strin"),
    ({"response_format": json_schema({"$ref": "#"})}, "response_format", "no text matches"),
    ({"response_format": json_schema(DEEP)}, "response_format", "nested deeper"),
    ({"response_format": {"type": "json_object"}, "structured_outputs": {"regex": "a"}},
             "structured_outputs", "combined"),
    ({"structured_outputs": {}}, "structured_outputs", "exactly one"),
    ({"structured_outputs": {"regex": "a", "choice": ["b"]}}, "structured_outputs", "exactly one"),
    ({"structured_outputs": {"json_object": False}}, "structured_outputs", "exactly one"),
    ({"structured_outputs": {"choice": ["a", 1]}}, "structured_outputs.choice[1]", "string"),
    ({"structured_outputs": {"regex": ""}}, "structured_outputs.regex", "empty"),
    ({"structured_outputs": {"regex": "a" * 300_000}}, "structured_outputs.regex", "262144"),
    ({"structured_outputs": {"json": {"enum": list(range(300_000))}}}, "structured_outputs.json",
                     "262144"),
    ({"structured_outputs": {"regex": "a(?=b)"}}, "structured_outputs", "look-around"),
    ({"structured_outputs": {"grammar": 'start: "a"\n  | b'}}, "structured_outputs", "unknown name"),
    ({"structured_outputs": {"regex": "\ud800"}}, "structured_outputs.regex", "structured_outputs"),
    ({"guided_json": {}}, "guided_json", "structured_outputs.json"),
    ({"structured_outputs": {"regex": "a"}, "use_beam_search": True, "n": 2}, "structured_outputs", "beam"),
    ({"response_format": {"type": "json_object"}, "use_beam_search": True, "n": 2}, "response_format",
                   "beam"),
]  # fmt: skip
