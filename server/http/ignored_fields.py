"""`--ignore-unknown-fields`: a header of the answer names the ignored fields, and the log names each once."""

import logging
from urllib.parse import quote

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from server.protocol.unknown_fields import IgnoredFields, collected

HEADER = b"x-pageserve-ignored-fields"
PLAIN = "[]@:/!$&'()*+="  # not percent-encoded in names, as letters, digits and "_.-~" are not
MAX_LOGGED = 256  # names; after them the log says that further names are not listed

logger = logging.getLogger(__name__)


class IgnoredFieldsHeader:
    """Pure ASGI middleware, installed only with the option."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app
        self._logged: set[str] = set()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] != "POST":
            return await self._app(scope, receive, send)
        ignored = IgnoredFields()

        async def send_with_names(message: Message) -> None:
            if message["type"] == "http.response.start" and ignored.count:
                message["headers"] = [*message["headers"], (HEADER, header_of(ignored))]
                self._log(ignored, scope["path"])
            await send(message)

        token = collected.set(ignored)
        try:
            await self._app(scope, receive, send_with_names)
        finally:
            collected.reset(token)

    def _log(self, ignored: IgnoredFields, path: str) -> None:
        for name in ignored.names:
            if len(self._logged) >= MAX_LOGGED:
                return
            if name not in self._logged:
                self._logged.add(name)
                logger.warning("%s: the field %r is ignored: no API knows it", path, name)
                if len(self._logged) == MAX_LOGGED:
                    logger.warning("%d names of ignored fields are listed; further ones are not", MAX_LOGGED)


def header_of(ignored: IgnoredFields) -> bytes:
    """Names separated by commas, then the number of further fields."""
    names = [quote(name, safe=PLAIN, errors="replace") for name in ignored.names]
    more = ignored.count - len(names)
    return ", ".join([*names, *([f"+{more}"] if more else [])]).encode()
