"""`pageserve run-batch`: files, a server that is busy or gone, and going on where a run stopped."""

import json
import os
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import httpx
import pytest

from server.cli import main
from server.commands.batch.files import answer, keep_final, read_requests
from server.commands.batch.run import remote
from server.serve import host_models
from tests.server.live import MODEL, LiveServer, completion_body, expected_text

ROOT = Path(__file__).parents[3]


def write_requests(path: Path, bodies: list[dict], url: str = "/v1/completions") -> Path:
    lines = [{"custom_id": f"r{i}", "method": "POST", "url": url, "body": body} for i, body in enumerate(bodies)]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    return path


def answers(path: Path) -> dict[str, dict]:
    *texts, rest = path.read_text(encoding="utf-8").split("\n")  # splitlines would split within a text, too
    assert rest == ""
    lines = [json.loads(text) for text in texts]
    found = {line["custom_id"]: line for line in lines}
    assert len(found) == len(lines), "one line for each request"
    return found


def run(source: Path, target: Path, server: LiveServer, *options: str) -> int:
    return main(["run-batch", "-i", str(source), "-o", str(target), "--base-url", f"{server.url}/v1", *options])


def test_every_request_gets_a_line_and_errors_are_lines_too(server, tmp_path, capsys):
    bodies = [completion_body(prompt=[65 + i % 20] * (i + 1), max_tokens=4) for i in range(20)]
    bodies[3] |= {"temperature": 9}
    bodies[4] |= {"prompt": "naïve \u2028 text", "echo": True}
    source = write_requests(tmp_path / "in", bodies)
    assert run(source, tmp_path / "out", server, "--concurrency", "4") == 1
    found = answers(tmp_path / "out")
    assert set(found) == {f"r{i}" for i in range(20)}
    for name, line in found.items():
        assert set(line) == {"id", "custom_id", "response", "error"} and line["error"] is None
        assert line["response"]["request_id"].startswith("req-")
        assert line["response"]["status_code"] == (400 if name == "r3" else 200)
    assert found["r3"]["response"]["body"]["error"]["param"] == "temperature"
    assert found["r4"]["response"]["body"]["choices"][0]["text"].startswith("naïve \u2028 text")
    assert found["r7"]["response"]["body"]["usage"]["prompt_tokens"] == 8
    assert "19 answers and 1 error in" in capsys.readouterr().err


def test_requests_refused_for_a_wrong_key_are_sent_again(folder, tmp_path):
    source = write_requests(tmp_path / "in", [completion_body(max_tokens=2)] * 2)
    with LiveServer(folder, api_key=("sk-right",)) as server:
        assert run(source, tmp_path / "out", server, "--api-key", "sk-wrong") == 1
        assert [line["response"]["status_code"] for line in answers(tmp_path / "out").values()] == [401, 401]
        assert run(source, tmp_path / "out", server, "--api-key", "sk-right") == 0
    assert [line["response"]["status_code"] for line in answers(tmp_path / "out").values()] == [200, 200]


def test_a_second_run_sends_only_requests_without_a_final_answer(server, tmp_path):
    source = write_requests(tmp_path / "in", [completion_body(max_tokens=2)] * 6)
    assert run(source, tmp_path / "out", server) == 0
    lines = (tmp_path / "out").read_text().splitlines(keepends=True)
    busy = json.loads(lines[1]) | {"response": {"status_code": 429, "request_id": "", "body": {}}}
    gone = json.loads(lines[2]) | {"response": None, "error": {"code": "no_response", "message": ""}}
    (tmp_path / "out").write_text(
        lines[0] + json.dumps(busy) + "\n" + json.dumps(gone) + "\n" + lines[3] + lines[4][:50]
    )
    kept = {json.loads(lines[i])["custom_id"]: json.loads(lines[i])["id"] for i in (0, 3)}
    assert run(source, tmp_path / "out", server) == 0
    found = answers(tmp_path / "out")
    assert len(found) == 6 and {name: found[name]["id"] for name in kept} == kept
    before = (tmp_path / "out").read_bytes()
    assert run(source, tmp_path / "out", server) == 0
    assert (tmp_path / "out").read_bytes() == before


def test_a_queue_that_is_full_is_waited_for(folder, tmp_path):
    source = write_requests(tmp_path / "in", [completion_body(max_tokens=8)] * 12)
    engine = {"max_num_seqs": 1}
    with LiveServer(folder, "--step-seconds", "0.01", engine=engine, max_queued_requests=1) as live:
        assert run(source, tmp_path / "out", live) == 0
        shown = httpx.get(f"{live.url}/metrics").text
    assert len(answers(tmp_path / "out")) == 12
    assert '429"' in shown, "otherwise this shows nothing"


def test_requests_with_a_final_error_are_sent_once_in_a_run(folder, tmp_path):
    """A request that kills Workers must not be sent eight times: the last of them would end the server."""
    third = expected_text(b"hello", 1, 3).encode()[-1]
    late = completion_body(prompt=[5], max_tokens=200, timeout=0.05)
    source = write_requests(tmp_path / "in", [completion_body(), late])
    with LiveServer(folder, "--fail-on-token", str(third), "--step-seconds", "0.03") as live:
        for runs in (1, 2):
            assert run(source, tmp_path / "out", live) == 1
            assert [answers(tmp_path / "out")[f"r{i}"]["response"]["status_code"] for i in (0, 1)] == [500, 408]
            shown = httpx.get(f"{live.url}/metrics").text
            for code in (500, 408):
                assert f'pageserve:http_requests_total{{code="{code}",route="/v1/completions"}} {runs}.0' in shown


def test_without_a_server_the_error_is_a_line(tmp_path, monkeypatch, server, capsys):
    monkeypatch.setattr("server.commands.batch.run.ATTEMPTS", 2)
    monkeypatch.setattr("server.commands.batch.run.FIRST_DELAY", 0.01)
    source = write_requests(tmp_path / "in", [completion_body(), completion_body()])
    nobody = ["run-batch", "-i", str(source), "-o", str(tmp_path / "out"), "--base-url", "http://127.0.0.1:9/v1"]
    assert main(nobody) == 1
    line = answers(tmp_path / "out")["r0"]
    assert line["response"] is None and line["error"]["code"] == "no_response"
    assert capsys.readouterr().err.count("no answer from the server (All connection attempts failed)") == 1
    assert run(source, tmp_path / "out", server) == 0


async def test_a_server_may_be_named_with_and_without_its_version(server):
    for url in (server.url, f"{server.url}/", f"{server.url}/v1", f"{server.url}/v1/"):
        async with remote(url, "key", 1) as client:
            assert (await client.get("/v1/models")).json()["data"][0]["id"] == MODEL


GOOD = {"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": {}}


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "not JSON"),
        ("[" * 100_000, "not JSON"),
        ("[]", "must be an object with custom_id"),
        (json.dumps(GOOD | {"custom_id": 7}), "custom_id must be a string"),
        (json.dumps(GOOD | {"body": "text"}), "body must be an object"),
        (json.dumps(GOOD | {"method": "GET"}), "method must be POST, not 'GET'"),
        (json.dumps(GOOD | {"url": "http://other/v1/completions"}), "url must be a path"),
        (json.dumps(GOOD | {"url": "/v1/completions\t"}), "url must be a path of at most 1024 visible ASCII"),
        (json.dumps(GOOD | {"url": "/v1/" + "x" * 70_000}), "url must be a path of at most 1024 visible ASCII"),
        (json.dumps(GOOD | {"body": {"stream": True}}), "body.stream must be left out"),
        (json.dumps(GOOD), "custom_id 'a' occurs twice"),
        (
            json.dumps(GOOD | {"custom_id": "b", "body": {"temperature": float("nan")}}),
            "the request cannot be sent as JSON (Out of range",
        ),
        (
            json.dumps(GOOD | {"custom_id": "b", "body": {"temperature": 0}}).replace("0}", "1e999}"),
            "the request cannot be sent as JSON",
        ),
        (json.dumps(GOOD | {"custom_id": "b", "body": {"prompt": "O\ud800"}}), "surrogates not allowed"),
        (json.dumps(GOOD | {"custom_id": "\ud800"}), "surrogates not allowed"),
        (json.dumps(GOOD | {"custom_id": "b"}).replace("{}", "[" * 500 + "]" * 500), "body"),
    ],
)
def test_a_wrong_line_is_named_before_anything_is_asked(tmp_path, capsys, line, message):
    (tmp_path / "in").write_text(json.dumps(GOOD) + "\n\n" + line + "\n")
    assert main(["run-batch", "-i", str(tmp_path / "in"), "-o", str(tmp_path / "out"), "--base-url", "http://h"]) == 2
    error = capsys.readouterr().err
    assert "line 3: " in error and message in error and error.count("\n") == 1
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["-i", "missing", "-o", "x"], "No such file"),
        (["-i", "in", "-o", "./in"], "--output must be another file"),
        (["-i", "in", "-o", "x", "--concurrency", "0"], "--concurrency must be at least 1"),
        (["-i", "in", "-o", "x", "--base-url", "localhost"], "--base-url must look like http"),
        (["-i", "in", "-o", "x", "--base-url", "http://host:port"], "--base-url: Invalid port"),
        (["-i", "in", "-o", "x", "--max-num-seq", "3"], "max-num-seqs"),
        (["-o", "x"], "--input"),
        (
            ["-i", "in", "-o", "x", "--base-url", "http://127.0.0.1:9", "--max-num-seqs", "4"],
            "--max-num-seqs has no effect with --base-url: leave it out.",
        ),
        (
            ["-i", "in", "-o", "x", "--base-url", "http://127.0.0.1:9", "--max-loaded", "1"],
            "--max-loaded has no effect with --base-url: leave it out.",
        ),
        (["-i", "nothing", "-o", "x"], "--input: cannot read nothing: No such file or directory."),
        (["-i", "in", "-o", "no/x", "--base-url", "http://127.0.0.1:9"], "--output: cannot write no/x: No such file"),
    ],
)
def test_a_wrong_command_line(tmp_path, monkeypatch, capsys, arguments, message):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "in").write_text(json.dumps(GOOD) + "\n")
    assert main(["run-batch", *arguments]) in (1, 2)
    assert message in capsys.readouterr().err


def test_lines_of_an_output_that_are_not_final_are_dropped(tmp_path):
    [request] = read_requests(write_requests(tmp_path / "in", [{}]))
    good = json.dumps(answer(request, 200, "", {}))
    for half in ("", good, good[:-1], good[:12], "{"):
        (tmp_path / "out").write_text("\n".join([good, good, "", '{"custom_id": "x", "response": {}}', half]))
        assert keep_final(tmp_path / "out") == {"r0": True}
        assert (tmp_path / "out").read_text() == good + "\n"


@pytest.mark.parametrize(
    "other", ["my notes\n", "my notes", "[]\n", "null\n", '{"custom_id": "x", "body": {}}\n', "\0\1\n"]
)
def test_a_file_that_is_no_output_is_left_alone(tmp_path, capsys, other):
    (tmp_path / "in").write_text(json.dumps(GOOD) + "\n")
    good = json.dumps(answer(next(read_requests(tmp_path / "in")), 200, "", {})) + "\n"
    (tmp_path / "out").write_text(good + other)
    assert main(["run-batch", "-i", str(tmp_path / "in"), "-o", str(tmp_path / "out")]) == 2
    assert "out, line 2: not an answer of a batch; name another file." in capsys.readouterr().err
    assert (tmp_path / "out").read_text() == good + other
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in", "out"]


@pytest.mark.slow
def test_a_model_loaded_here_killed_and_run_again(tmp_path):
    """The bundled model, through the same routes, without a port; SIGINT in the middle, then the rest."""
    messages = [{"role": "user", "content": "Tell me a story about a fox."}]
    bodies = [{"model": "m", "messages": messages, "max_tokens": 40, "seed": i} for i in range(60)]
    bodies[0] |= {"max_tokens": 500, "ignore_eos": True}  # not finished when the first answer is there
    source = write_requests(tmp_path / "in", bodies, "/v1/chat/completions")
    target = tmp_path / "out"
    options = ["--served-model-name", "m", "--concurrency", "8", "--device", "cpu"]
    command = [sys.executable, "-m", "server.cli", "run-batch", "-i", str(source), "-o", str(target), *options]
    (tmp_path / "keys").write_text("a-key-in-a-file")
    environ = {
        **os.environ,  # keys and limits of a server do not apply to a batch with its own model
        "PAGESERVE_API_KEY": "a-key-of-the-server",
        "PAGESERVE_API_KEY_FILE": str(tmp_path / "keys"),
        "PAGESERVE_REQUESTS_PER_MINUTE": "1",
        "PAGESERVE_MAX_CONCURRENT_REQUESTS": "1",
        "PAGESERVE_TOKENS_PER_MINUTE": "1",
    }
    first = subprocess.Popen(command, cwd=ROOT, env=environ, stderr=subprocess.PIPE, text=True)
    end = time.monotonic() + 120
    while not (target.exists() and target.stat().st_size) and time.monotonic() < end:
        time.sleep(0.01)
    first.send_signal(signal.SIGINT)
    assert "interrupted" in first.communicate(timeout=30)[1] and first.returncode == 130
    early = len(target.read_text().splitlines())
    assert 0 < early < 60
    second = subprocess.run(command, cwd=ROOT, env=environ, capture_output=True, text=True, timeout=120)
    assert second.returncode == 0, second.stderr
    assert f"60 requests, {early} already answered" in second.stderr
    texts = {line["response"]["body"]["choices"][0]["message"]["content"] for line in answers(target).values()}
    assert len(answers(target)) == 60 and len(texts) > 30


def test_lines_choose_among_several_models_loaded_here(folder, tmp_path, monkeypatch, capsys):
    """One of them is awake at a time."""
    command = (sys.executable, "-m", "tests.fake_worker")
    monkeypatch.setattr("server.commands.batch.run.host_models", partial(host_models, worker_command=command))
    bodies = [completion_body(model=name, max_tokens=2 + i) for i, name in enumerate(("a", "org/b", "a", "c", "org/b"))]
    source = write_requests(tmp_path / "in", bodies)
    models = ["--model", f"a={folder}", "--model", f"org/b={folder}", "--max-loaded", "1", "--load-format", "dummy"]
    assert main(["run-batch", "-i", str(source), "-o", str(tmp_path / "out"), *models]) == 1
    found = [line["response"]["body"] for _, line in sorted(answers(tmp_path / "out").items())]
    assert [body.get("model") for body in found] == ["a", "org/b", "a", None, "org/b"]
    assert found[3]["error"]["code"] == "model_not_found"
    texts = [body["choices"][0]["text"] for body in found if "choices" in body]
    assert texts == [expected_text(b"hello", 1, 2 + i) for i in (0, 1, 2, 4)]
    assert main(["run-batch", "-i", str(source), "-o", str(tmp_path / "x"), "--model", "a=x", "--model", "y"]) == 2
    assert "several models need names" in capsys.readouterr().err


def test_the_output_stays_the_file_that_it_is(server, tmp_path):
    """The target of a link, and the file's permissions."""
    source, real = write_requests(tmp_path / "in", [completion_body(), completion_body()]), tmp_path / "real"
    (tmp_path / "out").symlink_to(real)
    assert run(source, tmp_path / "out", server) == 0
    real.chmod(0o600)
    lines = real.read_text().splitlines(keepends=True)
    real.write_text(lines[0])
    assert run(source, tmp_path / "out", server) == 0
    assert (tmp_path / "out").is_symlink() and real.stat().st_mode & 0o777 == 0o600
    assert len(answers(real)) == 2


def test_files_beside_the_output_are_not_overwritten(server, tmp_path):
    source, other = write_requests(tmp_path / "in", [completion_body()] * 2), tmp_path / "other"
    other.write_text("precious")
    for name in ("out.kept", "out.tmp"):
        (tmp_path / name).symlink_to(other)
    for _ in range(2):
        assert run(source, tmp_path / "out", server) == 0
    assert other.read_text() == "precious" and (tmp_path / "out.kept").is_symlink()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in", "other", "out", "out.kept", "out.tmp"]


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can make links of others")
def test_a_link_of_another_user_is_not_followed(tmp_path, capsys):
    source = write_requests(tmp_path / "in", [completion_body()])
    (tmp_path / "out").symlink_to(tmp_path / "chosen by another")
    os.lchown(tmp_path / "out", 12345, 12345)
    assert main(["run-batch", "-i", str(source), "-o", str(tmp_path / "out"), "--base-url", "http://h"]) == 2
    assert "is a link that another user made" in capsys.readouterr().err
    assert not (tmp_path / "chosen by another").exists()


@pytest.mark.parametrize("kind", ["a folder", "a pipe"])
def test_the_output_is_a_regular_file(tmp_path, capsys, kind):
    (tmp_path / "in").write_text(json.dumps(GOOD) + "\n")
    (tmp_path / "out").mkdir() if kind == "a folder" else os.mkfifo(tmp_path / "out")
    assert main(["run-batch", "-i", str(tmp_path / "in"), "-o", str(tmp_path / "out"), "--base-url", "http://h"]) == 2
    assert "is not a regular file; name one." in capsys.readouterr().err


def test_answers_to_other_requests_do_not_count(server, tmp_path, capsys):
    wrong = write_requests(tmp_path / "wrong", [completion_body(temperature=-1)] * 3)
    assert run(wrong, tmp_path / "out", server) == 1
    good = tmp_path / "good"
    request = {"custom_id": "other", "method": "POST", "url": "/v1/completions", "body": completion_body()}
    good.write_text(json.dumps(request) + "\n")
    assert run(good, tmp_path / "out", server) == 0
    assert "1 request, 0 already answered\n1 answer and 0 errors in" in capsys.readouterr().err
    assert len(answers(tmp_path / "out")) == 4
