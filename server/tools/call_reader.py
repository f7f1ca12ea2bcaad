"""CallReader: the calls in a text that arrives in pieces.

Whatever the pieces, the result is the same; tests feed every split. Text is held back for as long as it may become a
marker or the white space around one, and a call until it is known to be one: it is whole and its name is among the
tools'. Where a grammar holds the model to that (`certain`), the name is enough, and arguments pass as they come.
What looked like a call and is none is content.
"""

from collections.abc import Collection

from server.errors import new_id
from server.tools.calls.call_body import CallBody, NotACallError, Schemas, held_back
from server.tools.calls.json_object import SPACE
from server.tools.events import Arguments, CallStart, Content, Event
from server.tools.formats import ToolFormat


class CallReader:
    """Feed it text, in any pieces, and `finish` it once."""

    def __init__(
        self,
        form: ToolFormat,
        schemas: Schemas,
        certain: bool = False,
        hidden: Collection[str] = (),
        only_calls: bool = False,
    ) -> None:
        """`schemas`: of the tools. `hidden`: special tokens among the markers, no text where they mark nothing.

        `only_calls`: a grammar allows nothing else, so a marker that was cut is no content, either.
        """
        self._form, self._schemas, self._certain, self._hidden = form, schemas, certain, hidden
        self._only_calls = only_calls
        self._begin_inside = "" if certain else form.begin_inside  # a grammar asks for the marker before it
        self.num_calls = 0
        self.unfinished = False  # whether the last call was cut
        self._text = ""  # what was not decided yet
        self._space = ""  # between the text and a marker
        self._committed = False  # whether the call in work was told of
        self._state = self._in_text
        self._started = False  # whether the message has text, or a call
        self._has_content = False
        self._after_call = False
        self._begin_body("")

    def feed(self, text: str) -> list[Event]:
        self._text += text
        return self._advance()

    def finish(self, cut: bool) -> list[Event]:
        """No more text comes; `cut`: it would have gone on, so a call that has begun is one."""
        events: list[Event] = []
        while self._state != self._in_text:
            if self._state == self._behind_call:
                self._text, self._state = "", self._in_text
            elif self._state == self._in_call and (self._committed or (cut and self._starts_call(events))):
                self._text, self._state = "", self._in_text
                self._committed, self.unfinished = False, True
            elif cut and self._marker and self._body.start() is None:
                self._text, self._state = "", self._in_text  # of a call that has no name yet
            else:
                self._release(events)
                events += self._advance()
        self._say(self._text.rstrip(SPACE) if self._after_call else self._text, events)
        self._text = ""
        return events

    def _advance(self) -> list[Event]:
        events: list[Event] = []
        while self._state(events):
            pass
        return events

    # Each state takes what it can from self._text; true: another state goes on.

    def _in_text(self, events: list[Event]) -> bool:
        text, form = self._text, self._form
        if form.bare and not self._started and text.lstrip(SPACE)[:1] == "{":
            self._text = text.lstrip(SPACE)
            self._space = text[: len(text) - len(self._text)]
            return self._enter("")
        at, begin = self._find_begin(text)
        if begin is None:
            at = len(text[:at].rstrip(SPACE))
            self._say(text[:at], events)
            self._text = text[at:]
            return False
        end = len(text[:at].rstrip(SPACE))
        self._say(text[:end], events)
        self._space = text[end:at]
        if begin != form.begin:
            self._text = text[at:]
            return self._enter("")
        self._text = text[at + len(begin) :]
        self._begin_body(begin)
        self._state = self._before_list if form.is_list else self._before_call
        return True

    def _find_begin(self, text: str) -> tuple[int, str | None]:
        """(where a call begins, with what); (from where on one may begin, None) where there is none."""
        begins = [begin for begin in (self._form.begin, self._begin_inside) if begin]
        found = [(at, begin) for begin in begins if (at := text.find(begin)) >= 0]
        known = len(text) - max(held_back(text, begin) for begin in begins)
        return min(found, default=(known, None))

    def _before_list(self, events: list[Event]) -> bool:
        rest = self._text.lstrip(SPACE)
        if not rest:
            return False
        if rest[0] != "[":
            return self._release(events)
        self._marker += self._text[: len(self._text) - len(rest) + 1]
        self._text, self._state = rest[1:], self._before_call
        return True

    def _before_call(self, events: list[Event]) -> bool:
        rest = self._text.lstrip(SPACE)
        if not rest:
            return False
        marker = self._marker + self._text[: len(self._text) - len(rest)]
        self._text = rest
        return self._enter(marker)

    def _enter(self, marker: str) -> bool:
        self._begin_body(marker)
        self._state = self._in_call
        return True

    def _begin_body(self, marker: str) -> None:
        self._marker = marker  # and all before the call that is no content if it is one
        self._body: CallBody = self._form.style.body(self._schemas, bool(marker))
        self._committed = False

    def _in_call(self, events: list[Event]) -> bool:
        try:
            end = self._body.feed(self._text)
        except NotACallError:
            return self._release(events)
        if self._committed:
            self._send_arguments(events)
        elif self._certain:
            self._starts_call(events)
        if end is None:
            return False
        if not self._committed and not self._whole_call(events):
            return self._release(events)
        self._text, self._committed, self._after_call = self._text[end:], False, True
        self._space = ""
        self._state = self._behind_call
        return True

    def _behind_call(self, events: list[Event]) -> bool:
        """Its end marker, another call of a list, or nothing: then it is text."""
        form, rest = self._form, self._text.lstrip(SPACE)
        if self._may_end(rest):
            return False
        closing = "]" if form.is_list else form.end
        separator = form.separator.strip()
        if closing and rest.startswith(closing):
            self._text, self._state = rest[len(closing) :], self._in_text
        elif separator and rest.startswith(separator):
            self._text, self._state = rest[len(separator) :], self._before_call
            self._begin_body(separator)
        else:
            self._state = self._in_text
        return True

    def _may_end(self, rest: str) -> bool:
        """Whether `rest` may become what belongs behind a call."""
        return not rest or (self._form.end != rest and self._form.end.startswith(rest))

    def _release(self, events: list[Event]) -> bool:
        """What began like a call is none: its first part is content, and the rest is looked at again."""
        if self._committed:  # only where a grammar did not hold
            self._text, self._committed, self.unfinished = self._text[self._body.taken :], False, True
        elif self._marker:
            self._say(self._space + self._marker, events)
        else:
            self._say(self._space + self._text[:1], events)
            self._text = self._text[1:]
        self._space = ""
        self._state = self._in_text
        return True

    def _say(self, text: str, events: list[Event]) -> None:
        if self._only_calls:
            return
        for marker in self._hidden:
            text = text.replace(marker, "")
        if self._after_call and not self._has_content:
            text = text.lstrip(SPACE)
        if text:
            self._started = True
            self._has_content = self._has_content or bool(text.strip(SPACE))
            events.append(Content(text))

    def _whole_call(self, events: list[Event]) -> bool:
        call = self._body.whole()
        if call is None or call[0] not in self._schemas:
            return False
        index = self._tell(call[0], events)
        events.append(Arguments(index, call[1]))
        return True

    def _starts_call(self, events: list[Event]) -> bool:
        """Whether the text so far has the name and the start of the arguments; they are told then."""
        name = self._body.start()
        if name is None or name not in self._schemas:
            return False
        self._tell(name, events)
        self._committed = True
        self._send_arguments(events)
        return True

    def _send_arguments(self, events: list[Event]) -> None:
        if piece := self._body.pieces():
            events.append(Arguments(self.num_calls - 1, piece))

    def _tell(self, name: str, events: list[Event]) -> int:
        self._started = True
        events.append(CallStart(self.num_calls, new_id("call_"), name))
        self.num_calls += 1
        return self.num_calls - 1
