"""AnswerForm: how the answer to one chat request is held to a form, and how the answer is read."""

from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

from engine.sampling_params import SamplingParams
from engine.structured_output import StructuredOutput
from engine.thinking import ThinkingTags
from server.protocol.tools import CustomTool, LarkFunction, Tool
from server.tools.call_reader import CallReader
from server.tools.custom_input import InputEvents
from server.tools.formats import ToolFormat
from server.tools.harmony import HarmonyAnswer, HarmonySplitter
from server.tools.message_reader import MessageReader
from server.tools.reasoning import ReasoningSplitter


@dataclass(frozen=True)
class AnswerForm:
    """`tool_format`: the format of calls; None where the model may call no tool. `only_calls`: the answer has no text
    beside its calls. `grammar`: the form of the whole text. `opened`: the answer begins inside the thinking; None where
    thinking is not told from the rest. `tags`: the tokens that mark thinking. `thinking_budget`: most tokens of
    thinking. `visible_token_ids`: special tokens that the reader needs in the text. `hidden`: markers that the client
    must not see. `harmony`: the answer is a sequence of harmony messages."""

    tool_format: ToolFormat | None = None
    tools: Sequence[Tool | CustomTool] = ()
    grammar: StructuredOutput | None = None
    opened: bool | None = None
    tags: ThinkingTags | None = None
    thinking_budget: int | None = None
    visible_token_ids: tuple[int, ...] = ()
    hidden: Sequence[str] = ()
    only_calls: bool = False
    harmony: HarmonyAnswer | None = None

    def reader(self) -> MessageReader:
        """A reader for one sample."""
        schemas = {tool.function.name: tool.function.schema for tool in self.tools}
        splitter: ReasoningSplitter | HarmonySplitter | None = None
        if self.harmony is not None:
            splitter = self.harmony.splitter(schemas)
        elif self.opened is not None:
            splitter = ReasoningSplitter(self.opened, self.tags)
        if self.tool_format is None:
            return MessageReader(splitter, None)
        certain = self.grammar is not None
        calls = CallReader(self.tool_format, schemas, certain, self.hidden, self.only_calls)
        bare = self.tool_format.style.bare_strings
        customs = {
            tool.function.name: bare and isinstance(tool.function, LarkFunction)
            for tool in self.tools
            if isinstance(tool, CustomTool)
        }
        return MessageReader(splitter, calls, InputEvents(customs) if customs else None)

    def apply(self, params: SamplingParams) -> SamplingParams:
        """`params` that hold the generated text to this form."""
        return msgspec.structs.replace(
            params,
            structured_output=self.grammar or params.structured_output,
            visible_token_ids=self.visible_token_ids,
            thinking_token_budget=self.thinking_budget,
            thinking_opened=bool(self.opened),
        )
