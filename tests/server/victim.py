"""A client whose streams go on beside bad input."""

import threading

import httpx

from tests.server.live import completion_body, events, expected_text

COMPLETIONS = "/v1/completions"


class Victim(threading.Thread):
    """Streams all the while; every stream must be complete and say exactly what it says alone."""

    def __init__(self, url: str) -> None:
        super().__init__(daemon=True)
        self.url, self.ended, self.count, self.failure = url, threading.Event(), 0, None

    def run(self) -> None:
        expected = expected_text(b"victim", 5, 100)
        try:
            with httpx.Client(base_url=self.url, timeout=30) as client:
                while not self.ended.is_set():
                    body = completion_body(prompt="victim", seed=5, max_tokens=100, stream=True)
                    *chunks, done = events(client.post(COMPLETIONS, json=body).text)
                    assert done == "[DONE]"
                    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == expected
                    self.count += 1
                    self.ended.wait(0.02)
        except BaseException as error:
            self.failure = error
