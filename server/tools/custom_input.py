"""Extracts the input text of a custom tool's call from the JSON arguments that the model writes."""

import json
import re
from collections.abc import Iterable, Mapping

from server.protocol.tools import INPUT
from server.tools.events import Arguments, CallStart, Event, Input

HEAD = re.compile(rf'\s*\{{\s*"{INPUT}"\s*:\s*"')
PLAIN = re.compile(r'[^"\\]*')
ESCAPE = re.compile(r'\\(?:(["\\/bfnrt])|u([0-9a-fA-F]{4}))')
MEANT = {"b": "\b", "f": "\f", "n": "\n", "r": "\r", "t": "\t"}
REPLACEMENT = "\ufffd"


class StringDecoder:
    """Decodes a JSON string that arrives in any pieces. The text starts after the opening quote."""

    def __init__(self) -> None:
        self.done = False
        self._text = ""
        self._high = ""  # the first half of a surrogate pair

    def feed(self, text: str) -> str:
        text, at, found = self._text + text, 0, []
        while at < len(text) and not self.done:
            plain = PLAIN.match(text, at)
            assert plain is not None
            if plain[0]:
                found.append(self._alone() + plain[0])
                at = plain.end()
            elif text[at] == '"':
                self.done = True
            elif (escape := ESCAPE.match(text, at)) is not None:
                found.append(self._escaped(escape))
                at = escape.end()
            elif len(text) - at >= 6:
                self.done = True  # an invalid escape; the call reader passes valid JSON only
            else:
                break
        self._text = text[at:]
        return "".join(found) + (self._alone() if self.done else "")

    def finish(self) -> str:
        """The remaining text if the text ends inside the string."""
        return self._alone()

    def _alone(self) -> str:
        lone, self._high = self._high and REPLACEMENT, ""
        return lone

    def _escaped(self, escape: re.Match[str]) -> str:
        if escape[1]:
            return self._alone() + MEANT.get(escape[1], escape[1])
        code = int(escape[2], 16)
        if self._high and 0xDC00 <= code < 0xE000:
            pair, self._high = self._high + chr(code), ""
            return pair.encode("utf-16-le", "surrogatepass").decode("utf-16-le")
        before = self._alone()
        if 0xD800 <= code < 0xDC00:
            self._high = chr(code)
            return before
        return before + (REPLACEMENT if 0xDC00 <= code < 0xE000 else chr(code))


class InputReader:
    """Reads the input of one call. `quoted`: the value is itself a JSON string, because the grammar of a format with
    bare strings needs the quotes."""

    def __init__(self, quoted: bool) -> None:
        self._text = ""
        self._value: StringDecoder | None = None
        self._quoted: StringDecoder | None = StringDecoder() if quoted else None
        self._skips_quote = quoted

    def feed(self, arguments: str) -> str:
        if self._value is None:
            self._text += arguments
            head = HEAD.match(self._text)
            if head is None:
                return ""
            self._value, arguments = StringDecoder(), self._text[head.end() :]
        return self._unquoted(self._value.feed(arguments))

    def finish(self) -> str:
        """The remaining input once the call has ended or was cut off: all of it if the arguments were not one text."""
        if self._value is None:
            return _text_of(self._text)
        rest = self._unquoted(self._value.finish())
        return rest if self._quoted is None else rest + self._quoted.finish()

    def _unquoted(self, text: str) -> str:
        if self._quoted is None:
            return text
        if self._skips_quote and text:
            text, self._skips_quote = text.removeprefix('"'), False
        return self._quoted.feed(text)


def _text_of(arguments: str) -> str:
    """The input in arguments that do not start like HEAD: without a grammar a model may use another name for the text.
    Returns the JSON itself if it holds no single text."""
    try:
        value = json.loads(arguments)
    except (ValueError, RecursionError):
        return arguments
    texts = [text for text in value.values() if isinstance(text, str)] if isinstance(value, dict) else []
    text = value[INPUT] if isinstance(value, dict) and isinstance(value.get(INPUT), str) else None
    if text is None and len(texts) == len(value) == 1:
        text = texts[0]
    return arguments if text is None else text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")


class InputEvents:
    """Replaces Arguments events of custom tools by Input events. `quoted`: name of a custom tool -> see InputReader."""

    def __init__(self, quoted: Mapping[str, bool]) -> None:
        self._quoted = quoted
        self._open: tuple[int, InputReader] | None = None

    def feed(self, events: Iterable[Event]) -> list[Event]:
        found: list[Event] = []
        for event in events:
            if isinstance(event, Arguments) and self._open is not None:
                found += self._said(self._open[1].feed(event.text))
                continue
            found += self.finish()
            if isinstance(event, CallStart) and event.name in self._quoted:
                self._open = event.index, InputReader(self._quoted[event.name])
                event = CallStart(event.index, event.id, event.name, custom=True)
            found.append(event)
        return found

    def finish(self) -> list[Event]:
        """The events that end the open call: no more arguments come."""
        if self._open is None:
            return []
        rest = self._said(self._open[1].finish())
        self._open = None
        return rest

    def _said(self, text: str) -> list[Event]:
        return [Input(self._open[0], text)] if text and self._open is not None else []
