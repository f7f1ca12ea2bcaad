"""Forms that hold from where a model has ended its thinking: the thinking itself is free."""

import json
from collections.abc import Sequence

from engine.structured_output import StructuredOutput
from engine.text.tokenizer import Tokenizer
from engine.thinking import BEGIN, END
from server.tools.calls.lark import ANY_TEXT, json_rule, marker_rule, regex, up_to

GAP = r"/[ \t\r\n]{1,8}/"  # between the thinking and the answer


def rules_before_main(tokenizer: Tokenizer, opened: bool) -> list[str]:
    """Lark rules with a start that ends in `main`. `opened`: the prompt has begun the thinking; else it may begin."""
    end = marker_rule(END, tokenizer)
    thought = f"thought: {'FREE_TEXT? ' + end}" if end.startswith("<[") else f"thought[lazy]: {up_to(END)}"
    begin = "start: thought GAP? main" if opened else f"start: ({marker_rule(BEGIN, tokenizer)} thought GAP?)? main"
    return [begin, thought, f"FREE_TEXT: {ANY_TEXT}", f"GAP: {GAP}"]


def after_thinking(output: StructuredOutput, before: Sequence[str]) -> StructuredOutput:
    """The same form, behind the thinking. A Lark grammar has a start of its own and is left as it is: it holds from
    the first token on."""
    if output.kind == "grammar":
        return output
    text = "\n".join([*before, f"main: {_main(output)}"]) + "\n"
    return StructuredOutput("grammar", text, json_values=output.holds_json)


def _main(output: StructuredOutput) -> str:
    if output.kind == "regex":
        return f"/{regex(output.text)}/"
    if output.kind == "choice":
        return " | ".join(json.dumps(choice, ensure_ascii=False) for choice in json.loads(output.text))
    schema = json.loads(output.text) if output.kind == "json_schema" else {"type": "object"}
    return json_rule(schema if isinstance(schema, dict) else {}, strict=not output.lenient)
