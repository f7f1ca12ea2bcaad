"""ToolFormat: how a model writes its calls. The chat template decides which one; a new format is a row in FORMATS."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from engine.text.chat_template import ChatTemplate
from engine.text.tokenizer import Tokenizer
from server.tools.calls.call_body import CallStyle, Written
from server.tools.calls.json_calls import JsonCalls
from server.tools.calls.named_calls import ARGS, NamedCalls
from server.tools.calls.xml_calls import XmlCalls
from server.tools.calls.xml_values import FUNCTION, PARAMETER
from server.tools.harmony import CALL, CALL_ARGUMENTS, CALL_BEGIN, CHANNEL, FINAL, MESSAGE, NEXT, PREAMBLE

Call = tuple[str, Written]  # name, arguments


@dataclass(frozen=True)
class ToolFormat:
    """The markers around calls, and `style`: the form of a call between its markers.

    A template has the format if its source contains all of `shown` and none of `not_shown`. With `is_list` the calls
    form one JSON array after `begin`; else `begin` and `end` enclose each call, or `separator` separates them. `bare`:
    a call at the very start of a message needs no `begin`. `begin_inside`: the first characters of a call inside its
    markers, which start a call even without `begin`, because models forget it.
    """

    name: str
    begin: str
    end: str = ""
    separator: str = "\n"
    style: CallStyle = field(default_factory=JsonCalls)
    shown: tuple[str, ...] = ()
    not_shown: tuple[str, ...] = ()
    space: str = ""  # white space that models write between markers and call
    is_list: bool = False
    bare: bool = False
    begin_inside: str = ""
    before_text: str = ""  # marker before the text of an answer
    preamble: tuple[str, str] = ("", "")  # markers before and after a text that calls follow
    several: bool = True  # models were trained to make more than one call in a message
    several_shown: bool = True  # templates show all calls of a message of the history, not its first call alone
    thought_or_text: bool = False  # templates refuse reasoning beside a text that precedes a call
    needs_description: bool = False  # templates fail where a tool has no description
    short_ids: bool = False  # templates accept only ids of nine letters and digits

    @property
    def markers(self) -> tuple[str, ...]:
        return (self.begin, self.end, *self.style.markers)

    def write(self, calls: Sequence[Call]) -> str:
        """The text of `calls` as the model would write it."""
        written = [self.style.write(name, arguments) for name, arguments in calls]
        if self.is_list:
            return f"{self.begin}[{', '.join(written)}]"
        if self.bare:
            return self.separator.join(written)
        return self.separator.join(f"{self.begin}{self.space}{call}{self.space}{self.end}" for call in written)


# GLM uses the same markers, but a different format between them, with tags around each argument. Apriel and Hunyuan
# write all calls between <tool_calls> and </tool_calls>.
HERMES = ToolFormat(
    "hermes", "<tool_call>", "</tool_call>", shown=("<tool_call>",), not_shown=("<arg_key>", "<tool_calls>"), space="\n"
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
    not_shown=(FUNCTION,),  # functionary, which uses the tag for Python code alone
    bare=True,
    several=False,
    several_shown=False,
)
HARMONY = ToolFormat(
    "harmony",
    CALL_BEGIN,
    CALL,
    style=NamedCalls(CALL_ARGUMENTS, call_id=""),
    shown=(CHANNEL, MESSAGE, "functions."),
    before_text=FINAL,
    preamble=(PREAMBLE, NEXT),
    several=False,
    several_shown=False,
    thought_or_text=True,
    needs_description=True,
)
# A template's source is searched for the formats in this order: formats with more `shown` texts come first.
FORMATS = {form.name: form for form in (HARMONY, MISTRAL_V11, MISTRAL, QWEN3_CODER, HERMES, LLAMA3)}


@dataclass(frozen=True)
class ToolUse:
    """How a model and its template handle tools. `in_template`: the template itself lists tools and writes calls."""

    form: ToolFormat
    in_template: bool


def find_tool_use(template: ChatTemplate, tokenizer: Tokenizer, chosen: str | None = None) -> ToolUse:
    """`chosen`: name of a format; None: the format that the template shows.

    A template that uses the variable `tools` and shows a known format is used unchanged. Any other template gets the
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
    # Small Llama 3 models have the token, but a template that mentions only JSON.
    if '"parameters"' in source and tokenizer.added_token_id(LLAMA3.begin) is not None:
        return LLAMA3
    return None
