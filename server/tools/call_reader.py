"""CallReader: finds the calls in a text that arrives in pieces.

The result does not depend on how the text is split; tests feed every split. Text is held back as long as it may become
a marker or the white space around a marker. A call is held back until it is complete and its name is a tool's. If a
grammar guarantees that (`certain`), the name suffices, and arguments pass as they arrive. Text that starts like a call
but turns out to be none is content.
"""

from collections.abc import Collection

from server.errors import new_id
from server.tools.calls.call_body import CallBody, NotACallError, Schemas, held_back
from server.tools.calls.json_object import SPACE
from server.tools.events import Arguments, CallStart, Content, Event
from server.tools.formats import ToolFormat


class CallReader:
    """A state machine: call `feed` with each piece of the text, then `finish` once."""

    def __init__(
        self,
        form: ToolFormat,
        schemas: Schemas,
        certain: bool = False,
        hidden: Collection[str] = (),
        only_calls: bool = False,
    ) -> None:
        """`schemas`: schemas of the tools. `hidden`: markers that are special tokens, which are removed from content.

        `only_calls`: a grammar allows only calls, so no text is content, not even a marker that was cut off.
        """
        self._form, self._schemas, self._certain, self._hidden = form, schemas, certain, hidden
        self._only_calls = only_calls
        self._begin_inside = "" if certain else form.begin_inside  # with a grammar the marker is always there
        self.num_calls = 0
        self.unfinished = False  # the last call was cut off
        self._text = ""  # text that is not decided yet
        self._space = ""  # white space between the text and a marker
        self._committed = False  # CallStart was emitted for the current call
        self._state = self._in_text
        self._started = False  # the message has text or a call
        self._has_content = False
        self._after_call = False
        self._begin_body("")

    def feed(self, text: str) -> list[Event]:
        self._text += text
        return self._advance()

    def finish(self, cut: bool) -> list[Event]:
        """The last events. `cut`: max_tokens cut the text off, so an incomplete call counts as a call."""
        events: list[Event] = []
        while self._state != self._in_text:
            if self._state == self._behind_call:
                self._text, self._state = "", self._in_text
            elif self._state == self._in_call and (self._committed or (cut and self._start_call(events))):
                self._text, self._state = "", self._in_text
                self._committed, self.unfinished = False, True
            elif cut and self._marker and self._body.start() is None:
                self._text, self._state = "", self._in_text  # drops the start of a call that has no name yet
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

    # Each state consumes what it can of self._text. It returns True if the next state should run at once.

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
        """(index, marker) of the first call; (index from which a marker may still begin, None) if there is no call."""
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
        self._marker = marker  # with the text up to the call: content only if the call turns out to be none
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
            self._start_call(events)
        if end is None:
            return False
        if not self._committed and not self._whole_call(events):
            return self._release(events)
        self._text, self._committed, self._after_call = self._text[end:], False, True
        self._space = ""
        self._state = self._behind_call
        return True

    def _behind_call(self, events: list[Event]) -> bool:
        """Reads what follows a call: the end marker, a separator before another call, or text."""
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
        """True if `rest` may still become the end marker of the call."""
        return not rest or (self._form.end != rest and self._form.end.startswith(rest))

    def _release(self, events: list[Event]) -> bool:
        """Gives up a text that started like a call: its first part becomes content, the rest is read again."""
        if self._committed:  # only if the text violates the grammar
            self._text, self._committed, self.unfinished = self._text[self._body.consumed :], False, True
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

    def _start_call(self, events: list[Event]) -> bool:
        """Emits the name and the start of the arguments. Returns False if the text does not have them yet."""
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
