"""Tools as chats name them."""

WEATHER = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "maxLength": 12},
        "days": {"type": "integer", "minimum": 1, "maximum": 9},
        "unit": {"enum": ["C", "F"]},
    },
    "required": ["city", "days", "unit"],
    "additionalProperties": False,
}


def function(name, parameters=None, **more):
    return {"type": "function", "function": {"name": name, "parameters": parameters, **more}}


def custom(name, syntax=None, definition="", **more):
    grammar = {"type": "grammar", "grammar": {"syntax": syntax, "definition": definition}}
    return {"type": "custom", "custom": {"name": name, **({"format": grammar} if syntax else {}), **more}}


TOOLS = [function("get_weather", WEATHER, description="the weather of some days"), function("now")]
