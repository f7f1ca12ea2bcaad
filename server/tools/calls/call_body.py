"""CallBody: reader of one call between its markers. CallStyle: how calls of one form are written, read and forced."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from server.protocol.tools import FunctionDefinition

Written = dict[str, Any] | str  # arguments of an earlier call: an object, or a text that is no JSON object
Schemas = Mapping[str, dict[str, Any]]  # name of a function -> JSON schema of its arguments


class NotACallError(ValueError):
    """No continuation can make the text a call."""


class SchemaError(ValueError):
    """A function's schema cannot be enforced. `path`: the wrong part, below the function's parameters."""

    def __init__(self, function: str, path: str, text: str) -> None:
        super().__init__(text)
        self.function, self.path = function, path


class CallBody(Protocol):
    """Reads one call. Call `feed` with the whole text of the call so far, each time with more at the end."""

    @property
    def consumed(self) -> int:
        """Index in the text up to which `pieces` has returned its arguments."""

    def feed(self, text: str) -> int | None:
        """The index at which the call ends, or None if it goes on. Raises NotACallError."""

    def start(self) -> str | None:
        """The name, as soon as the text has it and the start of the arguments. Call it before `pieces`."""

    def pieces(self) -> str:
        """The new part of the arguments since the last call of `pieces`, as JSON."""

    def whole(self) -> tuple[str, str] | None:
        """(name, arguments) of a call that has ended; None if it lacks one of them."""


class CallStyle(Protocol):
    """The form of a call between its markers."""

    @property
    def markers(self) -> Sequence[str]:
        """Markers inside a call; they may be special tokens."""

    @property
    def bare_strings(self) -> bool:
        """True if string arguments are written as bare text, not as JSON with quotes."""

    @property
    def ends(self) -> Sequence[str]:
        """Texts that end an argument written as bare text."""

    @property
    def arguments_are(self) -> str:
        """Phrase of the prompt's preamble that says how to write the arguments."""

    def write(self, name: str, arguments: Written) -> str: ...

    def body(self, schemas: Schemas, marked: bool) -> CallBody:
        """A reader of one call. `marked`: a marker precedes the call, so a name without arguments is a call too."""

    def rules(self, label: str, function: FunctionDefinition, marker: Callable[[str], str]) -> list[str]:
        """Lark rules of a call: `call_{label}` and the rules that it uses, whose names end in `label` too.

        `marker` turns a marker into its Lark form. Raises SchemaError.
        """


def held_back(text: str, marker: str) -> int:
    """Length of the longest suffix of `text` that is a proper prefix of `marker`, so may become the marker."""
    for length in range(min(len(marker) - 1, len(text)), 0, -1):
        if text.endswith(marker[:length]):
            return length
    return 0
