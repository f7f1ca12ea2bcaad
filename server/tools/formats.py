"""ToolFormat: how a model writes its calls. Chosen by what its chat template says; a new format is a row in FORMATS."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from engine.text.chat_template import ChatTemplate
from engine.text.tokenizer import Tokenizer
from server.tools.calls.call_body import CallStyle, Written
from server.tools.calls.json_calls import JsonCalls
from server.tools.calls.named_calls import ARGS, NamedCalls
from server.tools.calls.xml_calls import XmlCalls
from server.tools.calls.xml_values import FUNCTION, PARAMETER

Call = tuple[str, Written]  # name, arguments


@dataclass(frozen=True)
class ToolFormat:
    """What stands around calls, and `style`: what each looks like inside. A template that holds all of `shown` and none
    of `not_shown` has it.

    With `is_list` the calls stand in one JSON array behind `begin`, else `begin` and `end` are around each, or
    `separator` between them. `bare`: a call at the very start of a message needs no `begin`. `begin_inside`: what a
    style begins with that is a call without `begin` anywhere, since models forget it.
    """

    name: str
    begin: str
    end: str = ""
    separator: str = "\n"
    style: CallStyle = field(default_factory=JsonCalls)
    shown: tuple[str, ...] = ()
    not_shown: tuple[str, ...] = ()
    space: str = ""  # between markers and call, as models write it
    is_list: bool = False
    bare: bool = False
    begin_inside: str = ""
    several: bool = True  # whether models were trained to make more than one call in a message
    short_ids: bool = False  # whether templates take ids of nine letters and digits alone

    @property
    def markers(self) -> tuple[str, ...]:
        return (self.begin, self.end, *self.style.markers)

    def write(self, calls: Sequence[Call]) -> str:
        """Calls as the model would write them."""
        written = [self.style.write(name, arguments) for name, arguments in calls]
        if self.is_list:
            return f"{self.begin}[{', '.join(written)}]"
        if self.bare:
            return self.separator.join(written)
        return self.separator.join(f"{self.begin}{self.space}{call}{self.space}{self.end}" for call in written)


# GLM's tags around each argument are a format of their own between the same markers.
HERMES = ToolFormat(
    "hermes", "<tool_call>", "</tool_call>", shown=("<tool_call>",), not_shown=("<arg_key>",), space="\n"
)
QWEN3_CODER = ToolFormat(
    "qwen3_coder",
    "<tool_call>",
    "</tool_call>",
    style=XmlCalls(),
    shown=("<tool_call>", FUNCTION, PARAMETER),
    space="\n",
    begin_inside=FUNCTION,
)
MISTRAL = ToolFormat("mistral", "[TOOL_CALLS]", separator=", ", shown=("[TOOL_CALLS]",), is_list=True, short_ids=True)
MISTRAL_V11 = ToolFormat(
    "mistral_v11", "[TOOL_CALLS]", separator="", style=NamedCalls(), shown=("[TOOL_CALLS]", ARGS), short_ids=True
)
LLAMA3 = ToolFormat(
    "llama3",
    "<|python_tag|>",
    separator="; ",
    style=JsonCalls("parameters"),
    shown=("<|python_tag|>",),
    bare=True,
    several=False,
)
# In the order in which a template is asked for them: those that show more come before those that show a part of it.
FORMATS = {form.name: form for form in (MISTRAL_V11, MISTRAL, QWEN3_CODER, HERMES, LLAMA3)}


@dataclass(frozen=True)
class ToolUse:
    """How a model and its template deal with tools. `in_template`: the template itself lists them and writes calls."""

    form: ToolFormat
    in_template: bool


def find_tool_use(template: ChatTemplate, tokenizer: Tokenizer, chosen: str | None = None) -> ToolUse:
    """`chosen` is the name of a format, None for the one that the template shows.

    A template that asks for `tools` and shows a format that is known here is used as it is. One that does not gets the
    preamble of server/tools/rendering.py, by default with Hermes' format.
    """
    knows_tools = "tools" in template.variables
    if chosen is not None:
        return ToolUse(FORMATS[chosen], knows_tools)
    found = _shown(template.source, tokenizer) if knows_tools else None
    return ToolUse(HERMES, False) if found is None else ToolUse(found, True)


def _shown(source: str, tokenizer: Tokenizer) -> ToolFormat | None:
    for form in FORMATS.values():
        if all(text in source for text in form.shown) and not any(text in source for text in form.not_shown):
            return form
    # Smaller models of Llama 3 have the token, and a template that speaks of JSON alone.
    if '"parameters"' in source and tokenizer.added_token_id(LLAMA3.begin) is not None:
        return LLAMA3
    return None
