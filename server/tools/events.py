"""What the text of an answer turns out to be, piece by piece."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Content:
    text: str


@dataclass(frozen=True, slots=True)
class Reasoning:
    text: str


@dataclass(frozen=True, slots=True)
class CallStart:
    """Call number `index`; its arguments follow, in pieces of JSON, or with `custom` its input, in pieces of text."""

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
