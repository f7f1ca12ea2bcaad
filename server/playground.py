"""The page at /: static files of server/page. They hold no secrets and no data of requests.

The files need no API key: the page asks for a key and sends it with each of its requests. The server reads all files at
its start, so no path of a client is ever opened.
"""

import hashlib
from dataclasses import dataclass
from importlib.resources import files

from starlette.requests import Request as HttpRequest
from starlette.responses import Response

MEDIA_TYPES = {
    "html": "text/html; charset=utf-8",
    "css": "text/css; charset=utf-8",
    "js": "text/javascript; charset=utf-8",
    "svg": "image/svg+xml",
}
# No content of other origins, no inline scripts or styles, no HTML made from text, no frame around the page.
CONTENT_SECURITY_POLICY = "; ".join(
    (
        "default-src 'none'",
        "script-src 'self'",
        "style-src 'self'",
        "img-src 'self'",
        "connect-src 'self'",
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
        "require-trusted-types-for 'script'",
        "trusted-types 'none'",
    )
)
HEADERS = {
    "content-security-policy": CONTENT_SECURITY_POLICY,
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "referrer-policy": "no-referrer",
    "x-content-type-options": "nosniff",
    "cache-control": "no-cache",  # the browser asks each time and gets a 304
}


@dataclass(frozen=True)
class PageFile:
    content: bytes
    media_type: str
    etag: str

    def response(self, if_none_match: str | None) -> Response:
        headers = HEADERS | {"etag": self.etag}
        if if_none_match is not None and self.etag in (tag.strip() for tag in if_none_match.split(",")):
            return Response(status_code=304, headers=headers)
        return Response(self.content, headers=headers, media_type=self.media_type)


def _read_page() -> dict[str, PageFile]:
    """URL path -> file. index.html is served at /, the other files under /page/."""
    page = {}
    for file in files("server").joinpath("page").iterdir():
        content = file.read_bytes()
        etag = f'"{hashlib.sha256(content).hexdigest()[:16]}"'
        path = "/" if file.name == "index.html" else f"/page/{file.name}"
        page[path] = PageFile(content, MEDIA_TYPES[file.name.rpartition(".")[2]], etag)
    return page


PAGE = _read_page()
PAGE_PATHS = frozenset(PAGE)


async def get_page(http: HttpRequest, served: object) -> Response:
    """A file of the page; 304 where the client has it."""
    return PAGE[http.scope["path"]].response(http.headers.get("if-none-match"))
