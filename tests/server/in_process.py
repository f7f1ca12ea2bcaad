"""Requests to the app in this process, without a socket between."""

import httpx

from tests.server.live import LiveServer


class InProcessClient:
    """Posts to the app of a live server on the server's event loop, as uvicorn would call the app."""

    def __init__(self, live: LiveServer) -> None:
        self._live = live

    def post(self, path: str, content: bytes | str, headers: dict[str, str]) -> httpx.Response:
        async def send() -> httpx.Response:
            transport = httpx.ASGITransport(self._live.app)
            async with httpx.AsyncClient(transport=transport, base_url="http://in-process") as client:
                return await client.post(path, content=content, headers=headers)

        return self._live.call(send)
