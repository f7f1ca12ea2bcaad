"""GET /debug/kv against a live server: what it says, who may ask, what it costs."""

import json
import threading

import pytest

from engine.telemetry.kv_view import KVView
from server.config import ServerConfig
from server.errors import ApiError
from server.routes.debug_kv import Window, debug_kv_enabled
from tests.server.live import LiveServer, assert_error, completion_body

FIELDS = {
    "num_blocks",
    "block_size",
    "num_running",
    "num_waiting",
    "states",
    "shared",
    "partial",
    "legend",
    "sequences",
}


def view(client) -> dict:
    response = client.get("/debug/kv")
    assert response.status_code == 200 and response.headers["cache-control"] == "no-store"
    return response.json()


def counts(found: dict) -> dict[str, int]:
    return {found["legend"][letter]["state"]: found["states"].count(letter) for letter in ".cu"} | {
        "used": found["states"].count("u") + found["states"].count("p")
    }


@pytest.fixture
def slow(folder):
    with LiveServer(folder, "--step-seconds", "0.01", engine={"num_blocks": 64}) as live, live.client() as client:
        yield live, client


def test_an_idle_pool(slow):
    found = view(slow[1])
    assert set(found) == FIELDS
    assert (found["num_blocks"], found["block_size"], found["states"]) == (64, 16, "." * 64)
    assert found["shared"] == found["partial"] == {} and found["num_running"] == found["num_waiting"] == 0


def test_a_running_request_its_samples_and_what_it_leaves_behind(slow):
    live, client = slow
    body = completion_body(stream=True, max_tokens=200, n=3, prompt=list(range(97, 97 + 26)) + [97] * 14)
    with client.stream("POST", "/v1/completions", json=body) as running:
        pieces = running.iter_text()
        pieces_of_first = next(pieces)
        with live.client() as other:
            found = view(other)
        running.close()
    assert found["num_running"] == 3
    assert list(found["shared"].values()) == [3, 3], "two full blocks of the prompt, held by three samples"
    assert {found["legend"][found["states"][int(b)]]["owner"] for b in found["shared"]} == {
        "sequences_and_prefix_cache"
    }
    assert all(0 < fill < 16 for fill in found["partial"].values())
    request_id = json.loads(pieces_of_first.removeprefix("data: ").partition("\n")[0])["id"]
    assert [(s["request_id"], s["sample"]) for s in found["sequences"]] == [(f"{request_id}-0", i) for i in range(3)]
    assert all(s["num_prompt_tokens"] == 40 < s["num_computed_tokens"] for s in found["sequences"])
    first, *others = [s["blocks"] for s in found["sequences"]]
    assert all(blocks[:2] == first[:2] and blocks[2] != first[2] for blocks in others), "shared, and then copied"
    live.wait_idle()
    threading.Event().wait(0.06)  # the view is used for 50 ms
    after = view(client)
    assert counts(after)["used"] == 0 and counts(after)["cached"] >= 2
    assert after["shared"] == after["partial"] == {}


def test_it_holds_nothing_of_what_was_asked(slow):
    live, client = slow
    text = "a secret of more than one block of 16 tokens"
    assert client.post("/v1/completions", json=completion_body(prompt=text)).status_code == 200
    raw = client.get("/debug/kv").content
    assert b"secret" not in raw and set(json.loads(raw)) == FIELDS
    keys = live.call(lambda: list(live.driver.scheduler.block_manager.cached_blocks))
    assert keys and not any(key.digest.hex()[:8].encode() in raw or key.digest[:4] in raw for key in keys)
    assert set(json.loads(raw)["states"]) <= set(".cup")


def steps(client) -> list[dict]:
    response = client.get("/debug/steps")
    assert response.status_code == 200 and response.headers["cache-control"] == "no-store"
    found = response.json()
    assert (found["max_num_seqs"], found["max_num_batched_tokens"]) == (64, 256)
    return [dict(zip(found["columns"], record, strict=True)) for record in found["steps"]]


def test_the_steps_of_a_request_are_recorded_once_somebody_looks(slow):
    live, client = slow
    assert client.post("/v1/completions", json=completion_body()).status_code == 200
    assert steps(client) == [], "nobody had looked"
    body = completion_body(prompt=[97] * 300, max_tokens=20, n=2, stop=[])
    assert client.post("/v1/completions", json=body).status_code == 200
    live.wait_idle()
    threading.Event().wait(0.06)
    found = steps(client)
    assert [step["num_chunk_tokens"] for step in found[:3]] == [256, 44, 0], "chunks of the prompt, then decodes"
    assert sum(step["num_sampled"] for step in found) == 40
    assert {step["num_decodes"] for step in found[2:]} == {2}
    assert [len(step["copies"]) for step in found[:4]] == [0, 0, 1, 0], "300 tokens leave a shared block part full"
    times = [step["finished_at"] for step in found]
    assert times == sorted(times)
    # The fake device takes 1 ms, 0.1 ms for a token of a chunk and 0.5 ms for a decode.
    assert [step["compute_seconds"] for step in found[:3]] == pytest.approx([0.0266, 0.0054, 0.002])


def test_evictions_hits_and_preemptions_belong_to_their_step(slow):
    """64 blocks of 16 tokens: three prompts of 28 blocks do not fit side by side, nor into the cache."""
    live, client = slow
    steps(client)

    def ask(letter: str) -> list[dict]:
        known = {step["step_id"] for step in steps(client)}
        assert client.post("/v1/completions", json=completion_body(prompt=letter * 440)).status_code == 200
        live.wait_idle()
        threading.Event().wait(0.06)
        return [step for step in steps(client) if step["step_id"] not in known]

    def total(found: list[dict], name: str) -> int:
        return sum(step[name] for step in found)

    first, again = ask("a"), ask("a")
    assert total(first, "num_hit_tokens") == 0 and total(again, "num_hit_tokens") == 27 * 16
    assert total(first + again, "num_evicted") == 0
    ask("b")
    third = ask("c")
    assert total(third, "num_evicted") == len({b for step in third for b in step["evicted"]}) > 0
    together = completion_body(prompt=["d" * 300, "e" * 300, "f" * 300], max_tokens=60, ignore_eos=True)
    known = {step["step_id"] for step in steps(client)}
    assert client.post("/v1/completions", json=together).status_code == 200
    threading.Event().wait(0.06)
    assert total([step for step in steps(client) if step["step_id"] not in known], "num_preempted") > 0


@pytest.mark.parametrize("path", ["/debug/kv", "/debug/steps"])
def test_it_is_guarded_like_the_api(folder, path):
    with LiveServer(folder, api_key=("sk-one",)) as live, live.client() as client:
        assert_error(client.get(path), 401, code="invalid_api_key")
        assert client.get(path, headers={"authorization": "Bearer sk-one"}).status_code == 200


def test_several_keys_are_several_tenants_who_must_not_watch_each_other(folder):
    bearer = {"authorization": "Bearer sk-one"}
    with LiveServer(folder, api_key=("sk-one", "sk-two")) as live, live.client() as client:
        assert "--debug-kv" in assert_error(client.get("/debug/kv", headers=bearer), 404, code="not_found")
        assert_error(client.get("/debug/kv"), 401)
        assert "/debug/kv" not in client.get("/openapi.json", headers=bearer).json()["paths"]


@pytest.mark.parametrize(("setting", "num_keys", "enabled"), [
    (None, 0, True), (None, 1, True), (None, 2, False), (True, 2, True), (False, 0, False), (False, 1, False),
])  # fmt: skip
def test_the_setting_and_its_default(setting, num_keys, enabled):
    keys = tuple(f"sk-{i}" for i in range(num_keys))
    assert debug_kv_enabled(ServerConfig(debug_kv=setting, api_key=keys)) is enabled


def test_it_is_off_with_a_flag(folder):
    with LiveServer(folder, debug_kv=False) as live, live.client() as client:
        for path in ("/debug/kv", "/debug/steps"):
            assert path in assert_error(client.get(path), 404, code="not_found")


def test_while_loading_there_is_nothing_to_see(folder):
    with LiveServer(folder, "--load-seconds", "1.0", wait=False) as live, live.client() as client:
        for path in ("/debug/kv", "/debug/steps"):
            assert_error(client.get(path), 503, code="service_unavailable")


def test_metrics_count_it_under_its_own_route(slow):
    view(slow[1])
    assert 'pageserve:http_requests_total{code="200",route="/debug/kv"}' in slow[1].get("/metrics").text


class SlowDriver:
    """Takes `cost` seconds of `now` for every view, and counts them."""

    def __init__(self, cost: float) -> None:
        self.cost, self.now, self.num_views = cost, 100.0, 0

    def kv_view(self) -> KVView:
        self.num_views += 1
        self.now += self.cost
        return KVView(1, 16, self.num_views, 0, ".", {}, {})


@pytest.mark.parametrize(("cost", "num_views"), [(0.0, 20), (0.001, 20), (0.01, 5), (0.1, 1)])
def test_many_who_poll_cost_a_20th_of_the_loop_at_most(cost, num_views):
    driver = SlowDriver(cost)
    window = Window("/debug/kv", driver.kv_view, True, lambda: driver.now)
    end = driver.now + 1.0
    while driver.now < end:
        shown = json.loads(window.response().body)["num_running"]
        assert shown == driver.num_views
        driver.now += 0.001
    assert driver.num_views == pytest.approx(num_views, abs=1)
    assert driver.num_views * cost <= 0.05 * 1.0 + cost


def test_a_view_is_never_older_than_what_it_is_good_for():
    driver = SlowDriver(0.0)
    window = Window("/debug/kv", driver.kv_view, True, lambda: driver.now)
    window.response()
    driver.now += 0.051
    assert json.loads(window.response().body)["num_running"] == 2


def test_a_window_that_is_off_asks_the_driver_nothing():
    driver = SlowDriver(0.0)
    with pytest.raises(ApiError):
        Window("/debug/kv", driver.kv_view, False).response()
    assert driver.num_views == 0


def test_polling_under_load_disturbs_no_stream(slow):
    """Polled without a pause while 8 streams run: all of them complete, with the tokens of an undisturbed run."""
    live, client = slow
    bodies = [completion_body(prompt=f"prompt {i}", max_tokens=40, seed=i) for i in range(8)]
    results: list[str | None] = [None] * 8

    def ask(index: int) -> None:
        with live.client() as own:
            results[index] = own.post("/v1/completions", json=bodies[index]).json()["choices"][0]["text"]

    threads = [threading.Thread(target=ask, args=(i,)) for i in range(8)]
    for thread in threads:
        thread.start()
    num_polls = 0
    while any(thread.is_alive() for thread in threads):
        found = view(client)
        assert sum(counts(found).values()) == 64
        num_polls += 1
    assert num_polls > 5
    assert results == [client.post("/v1/completions", json=body).json()["choices"][0]["text"] for body in bodies]
