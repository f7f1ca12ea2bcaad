"""Events that readers make of the text of an answer: pieces of content, reasoning and calls."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Content:
    text: str


@dataclass(frozen=True, slots=True)
class Reasoning:
    text: str


@dataclass(frozen=True, slots=True)
class CallStart:
    """The start of call number `index`. Pieces of its arguments (JSON) follow, with `custom` of its input (text)."""

    index: int
    id: str
    name: str
    custom: bool = False


@dataclass(frozen=True, slots=True)
class Arguments:
    index: int
    text: str


@dataclass(frozen=True, slots=True)
class Input:
    index: int
    text: str


Event = Content | Reasoning | CallStart | Arguments | Input
