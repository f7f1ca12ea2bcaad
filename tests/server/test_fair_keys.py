"""Two keys: whatever one request of one key asks for, small requests of the other are answered soon."""

import threading
import time

import httpx
import pytest

from tests.server.live import LiveServer, completion_body, events, expected_text

STEP_SECONDS = 0.01
MAX_TOKENS, NUM_ROWS, NUM_VISITS = 100, 8, 3  # a holder's request takes at least a second
HOLDERS = {  # all but the last hold all rows; that one all blocks but seven, and a visitor needs eight
    "samples": {"n": NUM_ROWS},
    "many prompts": {"prompt": [f"number {i}" for i in range(6)], "n": 2},
    "beam search": {"n": NUM_ROWS, "use_beam_search": True, "temperature": 0, "stream": False, "seed": None},
    "one long prompt": {"prompt": "a" * 900},
}
VISIT = completion_body(prompt="b" * 110, max_tokens=2, ignore_eos=True)


@pytest.fixture(scope="module")
def live(folder):
    engine = {"max_num_seqs": NUM_ROWS, "num_blocks": 64}
    worker = "--step-seconds", str(STEP_SECONDS), "--max-model-len", "1024"
    with LiveServer(folder, *worker, engine=engine, api_key=("holder", "other")) as server:
        yield server


def client(live: LiveServer, key: str) -> httpx.Client:
    return live.client(headers={"authorization": f"Bearer {key}"})


@pytest.mark.parametrize("kind", HOLDERS)
def test_no_request_keeps_the_other_key_out(live, kind):
    body = completion_body(**({"stream": True, "max_tokens": MAX_TOKENS, "ignore_eos": True} | HOLDERS[kind]))
    found: list[httpx.Response] = []
    displaced = live.driver.scheduler.admission.fair_share.num_displaced
    with client(live, "holder") as holder, client(live, "other") as other:
        thread = threading.Thread(target=lambda: found.append(holder.post("/v1/completions", json=body)))
        thread.start()
        try:
            time.sleep(0.3)
            waits = []
            while thread.is_alive() and len(waits) < NUM_VISITS:
                start = time.perf_counter()
                answer = other.post("/v1/completions", json=VISIT)
                waits.append(time.perf_counter() - start)
                assert answer.status_code == 200, answer.text
        finally:
            thread.join()
    assert len(waits) == NUM_VISITS and max(waits) < 1.0, waits
    assert live.driver.scheduler.admission.fair_share.num_displaced > displaced, "nothing had to give way"
    (response,) = found
    assert response.status_code == 200, response.text
    if body["stream"]:
        assert texts(response.text) == expected(body)
    else:
        choices = response.json()["choices"]
        assert len(choices) == NUM_ROWS and all(choice["finish_reason"] == "length" for choice in choices)
    live.wait_idle()


def texts(raw: str) -> dict[int, str]:
    found: dict[int, str] = {}
    for event in events(raw):
        for choice in event["choices"] if isinstance(event, dict) else ():
            found[choice["index"]] = found.get(choice["index"], "") + choice["text"]
    return found


def expected(body: dict) -> dict[int, str]:
    prompts = body["prompt"] if isinstance(body["prompt"], list) else [body["prompt"]]
    n = body.get("n", 1)
    return {
        number * n + sample: expected_text(prompt.encode(), body["seed"], MAX_TOKENS, sample)
        for number, prompt in enumerate(prompts)
        for sample in range(n)
    }
