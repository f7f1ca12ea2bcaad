"""The pageserve command: dispatch, errors, offline generation, and chat against a scripted server."""

import http.server
import io
import json
import os
import pty
import re
import select
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

import server.commands.chat
from engine.llm import LLM
from engine.worker import memory_plan
from server.cli import main
from tests.checkpoints import save_fake_checkpoint
from tests.server.live import LiveServer

ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def no_settings_in_the_environment(monkeypatch):
    for name in ("OPENAI_API_KEY", "OPENAI_BASE_URL", "PAGESERVE_API_KEY", "PAGESERVE_CONFIG"):
        monkeypatch.delenv(name, raising=False)


def fails(capsys, *arguments: str, status: int = 2) -> str:
    assert main(arguments) == status
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("pageserve: error: ") and err.count("\n") == 1
    return err


# Dispatch.


def test_help_and_version(capsys):
    assert main(["--help"]) == 0
    text = capsys.readouterr().out
    assert all(f"  {command} " in text for command in ("serve", "chat", "generate", "bench", "plan"))
    assert main([]) == 2
    assert main(["--version"]) == 0
    assert capsys.readouterr().out.splitlines()[-1].startswith("pageserve 0.")


@pytest.mark.parametrize("command", ["serve", "chat", "generate"])
def test_every_command_has_help(command, capsys):
    with pytest.raises(SystemExit) as exit_:
        main([command, "--help"])
    assert exit_.value.code == 0
    assert f"usage: pageserve {command}" in capsys.readouterr().out


def test_the_command_starts_quickly_because_it_imports_little():
    script = "import sys, server.cli; server.cli.main(['--help']); print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=True)
    modules = set(done.stdout.split())
    assert not modules & {"torch", "transformers", "fastapi", "pydantic", "numpy", "tokenizers", "uvicorn", "yaml"}


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["server"], "there is no command 'server'; the commands are serve, ray, models, "),
        (["serve", "--max-num-sequences", "3"], "did you mean --max-num-seqs?"),
        (["serve", "--host", "a..b"], "host: 'a..b' is not an address of this machine (not a host name)."),
        (["serve", "--host", ""], "host: '' is not an address of this machine"),
        (["serve", "--enforce-eager"], "there is no setting --enforce-eager"),
        (["serve", "--port", "http"], "--port: port must be an integer from 0 to 65535, not 'http'."),
        (["serve", "--port"], "argument --port: expected one argument"),
        (["serve", "a", "b"], "unexpected argument 'b'"),
        (["serve", "--api-key", "a", "b"], "--api-key has several values, the last may be MODEL: write MODEL first"),
        (["ray", "--lora", "a=b", "c"], "or --lora before each"),
        (["serve", "--api-key", "a", "b", "--model", "/nowhere/c"], "--model: there is no folder /nowhere/c"),
        (["serve", "a", "--model", "b"], "two models are named: a and --model b."),
        (["serve", "--config", "/nowhere.yaml"], "config file /nowhere.yaml: No such file or directory."),
        (["serve", "--pipeline-parallel-size", "2"], "pipeline parallelism is not served"),
        (["serve", "--api-key-file", "/nowhere"], "api_key_file: cannot read /nowhere"),
        (["serve", "--chat-template", "{{ x }}\n{% if %}"], "chat_template: line 2: Expected an expression"),
        (["serve", "--chat-template", "{{ messages | sorted }}"], "chat_template: line 1: No filter named 'sorted'"),
        (["serve", "--otlp-traces-endpoint", "localhost:4318"], "otlp_traces_endpoint must look like http://localhost"),
        (["generate", "x", "--top-p", "7"], "top_p must be a finite number"),
        (["generate", "x", "--max-tokens", "many"], "argument --max-tokens: invalid int value: 'many'"),
        (["generate", "x", "--prompts", "file"], "not both"),
        (["generate", "--prompts", "/nowhere"], "--prompts: cannot read /nowhere: No such file or directory."),
        (["generate", "--prompts", "/dev/null"], "there is no prompt"),
        (["chat", "hi", "--base-url", "ftp://x"], "--base-url must look like http://127.0.0.1:8000, not 'ftp://x'."),
        (["chat", "hi", "--base-url", "http://x:port"], "--base-url: Invalid port"),
        (["chat", "hi", "--temprature", "1"], "did you mean --temperature?"),
    ],
)
def test_mistakes_end_in_one_line_and_status_2(arguments, message, capsys):
    assert message in fails(capsys, *arguments)


def test_a_wrong_variable_is_named(capsys, monkeypatch):
    monkeypatch.setenv("PAGESERVE_BLOCKSIZE", "16")
    assert "did you mean PAGESERVE_BLOCK_SIZE?" in fails(capsys, "serve")


def test_serve_hands_both_configs_to_the_server(monkeypatch, tmp_path):
    seen = []

    async def run(server_config, engine_config):
        seen.append((server_config, engine_config))
        return 7

    monkeypatch.setattr("server.serve.run", run)
    (tmp_path / "keys").write_text("k1\n")
    arguments = ["serve", "some/model", "--port", "0", "--api-key-file", str(tmp_path / "keys"), "--num-blocks", "9"]
    assert main(arguments) == 7
    ((server_config, engine_config),) = seen
    assert (server_config.port, server_config.api_key_file) == (0, str(tmp_path / "keys"))
    assert (engine_config.model, engine_config.num_blocks) == ("some/model", 9)


def test_an_open_server_is_refused_with_advice(capsys):
    assert main(["serve", "--host", "0.0.0.0"]) == 2
    said = capsys.readouterr().err
    assert "no API key is set" in said and "--allow-unauthenticated" in said and said.count("\n") == 1


def test_plan_and_bench_pass_their_arguments_on(monkeypatch):
    commands = []
    monkeypatch.setattr(
        subprocess, "run", lambda command, env: commands.append(command) or subprocess.CompletedProcess([], 3)
    )
    assert main(["plan", "some/model", "--max-num-seqs", "4"]) == 3
    assert commands == [[sys.executable, "-m", "engine.worker.memory_plan", "some/model", "--max-num-seqs", "4"]]
    monkeypatch.setattr("server.commands.bench.main", lambda arguments: len(arguments))
    assert main(["bench", "--peer", "x"]) == 2


@pytest.fixture
def plan_in_this_process(monkeypatch):
    def run(command, env):
        with pytest.MonkeyPatch.context() as patch:
            for name in ("PAGESERVE_PORT", memory_plan.UNUSED_VARIABLE):
                patch.setenv(name, env[name])
            return subprocess.CompletedProcess([], memory_plan.main(command[3:]))

    monkeypatch.setenv("PAGESERVE_PORT", "80")  # is left out as well
    monkeypatch.setattr(subprocess, "run", run)


@pytest.mark.parametrize("name", ["default", "replica", "cpu", "gpu"])
def test_plan_reads_the_files_of_serve(name, plan_in_this_process, capsys):
    assert main(["plan", "--config", str(ROOT / f"configs/{name}.yaml"), "--device", "cpu", "--memory", "8GiB"]) == 0
    assert "bundled model" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("line", "message"),
    [("max_num_seq: 4", "did you mean max_num_seqs?"), ("models: [a=b]", "here is one model, which `model` names")],
)
def test_plan_refuses_other_lines_of_a_file(line, message, plan_in_this_process, capsys, tmp_path):
    (tmp_path / "c.yaml").write_text(f"port: 80\n{line}\n")
    assert message in fails(capsys, "plan", "--config", str(tmp_path / "c.yaml"), "--device", "cpu")


def test_generate_does_not_choose_among_several_models(capsys):
    config = str(ROOT / "configs/several-models.yaml")
    assert "models: there are several; name the one" in fails(capsys, "generate", "a", "--config", config)


# generate: a real engine with a fake device.


@pytest.fixture
def model(tmp_path, monkeypatch) -> str:
    command = (sys.executable, "-m", "tests.fake_worker")
    from_config = LLM.from_config
    monkeypatch.setattr(LLM, "from_config", lambda config: from_config(config, worker_command=command))
    return str(save_fake_checkpoint(tmp_path / "model"))


def generate(capsys, *arguments: str) -> list[str]:
    assert main(["generate", *arguments, "--load-format", "dummy", "--sampling-seed", "3"]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    *lines, rest = out.split("\n")
    assert rest == ""
    return lines


def test_generate_prints_one_completion_bare_and_several_with_headings(model, capsys):
    (bare,) = generate(capsys, "hello", "--model", model, "--max-tokens", "5")
    assert len(bare) == 5
    lines = generate(capsys, "hello", "world", "--model", model, "--max-tokens", "5")
    assert lines[:3] == ["--- prompt 1 of 2, sample 1", bare, "--- prompt 2 of 2, sample 1"]


def test_generate_json_from_a_file_and_from_stdin(model, capsys, tmp_path, monkeypatch):
    (tmp_path / "prompts.txt").write_text("fir\u2028st\n\nsecond\n", encoding="utf-8")
    common = ("--model", model, "--max-tokens", "4", "--n", "2", "--json")
    lines = generate(capsys, "--prompts", str(tmp_path / "prompts.txt"), *common)
    results = [json.loads(line) for line in lines]
    assert [result["prompt"] for result in results] == ["fir\u2028st", "second"]
    assert results[1]["usage"] == {"prompt_tokens": 6, "completion_tokens": 8}
    assert [(s["index"], len(s["text"]), s["finish_reason"]) for s in results[0]["outputs"]] == [
        (0, 4, "length"),
        (1, 4, "length"),
    ]
    monkeypatch.setattr(sys, "stdin", io.StringIO("one prompt\nof two lines\n"))
    (line,) = generate(capsys, *common)
    assert json.loads(line)["prompt"] == "one prompt\nof two lines"


def test_prompts_that_are_no_text_are_named(capsys, tmp_path):
    (tmp_path / "prompts.txt").write_bytes(b"\xff")
    assert "prompts.txt is not UTF-8 text." in fails(capsys, "generate", "--prompts", str(tmp_path / "prompts.txt"))


def test_generate_chat_uses_the_template(model, capsys):
    (line,) = generate(capsys, "hi", "--chat", "--json", "--model", model, "--max-tokens", "1")
    assert json.loads(line)["usage"]["prompt_tokens"] == len("user\nhi\nassistant\n") + 3


def test_generate_without_a_model_says_so(capsys):
    assert "/nowhere/model" in fails(capsys, "generate", "x", "--model", "/nowhere/model")


def test_a_reader_that_left_is_no_traceback(model):
    script = (
        "import sys; from engine.llm import LLM; original = LLM.from_config; "
        "LLM.from_config = lambda c: original(c, worker_command=(sys.executable, '-m', 'tests.fake_worker')); "
        "from server.cli import main; "
        f"sys.exit(main(['generate', 'a', '--load-format', 'dummy', '--model', {model!r}]))"
    )
    done = subprocess.run(
        ["bash", "-c", f'set -o pipefail; {sys.executable} -c "$1" | true', "bash", script],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert (done.returncode, done.stdout, done.stderr) == (1, "", "")


# chat.


class ScriptedServer(http.server.BaseHTTPRequestHandler):
    """Answers /v1/models with `models`, and each chat request with the next of `answers`: pieces of text, or
    (status, body)."""

    models: list | None = [{"id": "tiny"}]
    answers: list = []
    requests: list = []

    def do_GET(self):
        self.reply(200, json.dumps({"object": "list", "data": self.models}).encode())

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.requests.append((self.headers.get("Authorization"), body))
        answer = self.answers.pop(0)
        if isinstance(answer, tuple):
            self.reply(*answer)
            return
        chunks = [{"choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}}]}]
        chunks += [
            piece if isinstance(piece, dict) else {"choices": [{"delta": {"content": piece}}]} for piece in answer
        ]
        lines = [": keep-alive", *(f"data: {json.dumps(chunk, ensure_ascii=False)}" for chunk in chunks)]
        ended = not answer or answer[-1] != {"choices": []}
        self.reply(200, "\n\n".join([*lines, *(["data: [DONE]"] if ended else []), ""]).encode())

    def reply(self, status: int, body: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *arguments):
        pass


@pytest.fixture
def scripted():
    handler = type("Handler", (ScriptedServer,), {"answers": [], "requests": []})
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as httpd:
        thread = threading.Thread(target=httpd.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        handler.url = f"http://127.0.0.1:{httpd.server_address[1]}"
        yield handler
        httpd.shutdown()
        thread.join()


def type_lines(monkeypatch, *lines) -> None:
    """Stand in for the terminal: each line is typed, an exception type is raised in its place."""
    script = iter(lines)

    def next_line(prompt: str) -> str:
        line = next(script, EOFError)
        if not isinstance(line, str):
            raise line
        return line

    monkeypatch.setattr("builtins.input", next_line)
    monkeypatch.setattr(sys.stdin, "isatty", lambda: True, raising=False)


def test_one_question_streams_one_answer(scripted, capsys):
    scripted.answers = [["Hel", "lo", "\u2028\x85", "."]]  # line ends to Python, not to SSE
    arguments = ("--base-url", scripted.url, "--api-key", "k", "--system", "Be brief.", "--max-tokens", "9")
    assert main(["chat", "Say", "hello", *arguments]) == 0
    assert capsys.readouterr().out == "Hello\u2028\x85.\n"
    ((authorization, body),) = scripted.requests
    assert authorization == "Bearer k"
    assert body == {
        "model": "tiny",
        "messages": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Say hello"}],
        "stream": True,
        "max_tokens": 9,
    }


def test_the_question_may_come_from_a_pipe(scripted, capsys, monkeypatch):
    scripted.answers = [["yes"]]
    monkeypatch.setattr(sys, "stdin", io.StringIO("Really?\n"))
    assert main(["chat", "--base-url", scripted.url + "/v1/", "--model", "named"]) == 0
    assert scripted.requests[0][1]["model"] == "named"
    assert scripted.requests[0][1]["messages"] == [{"role": "user", "content": "Really?"}]


@pytest.mark.parametrize(
    ("command", "typed"),
    [
        (["chat", "--base-url", "http://127.0.0.1:9", "--model", "m"], "h\udce9llo"),
        (["chat", "--base-url", "http://127.0.0.1:9", "--model", "m", "--system", "h\udce9", "hello"], ""),
        (["generate", "--device", "cpu"], "h\udce9llo"),
        (["generate", "--device", "cpu", "h\udce9llo"], ""),
    ],
)
def test_typed_messages_must_be_text(command, typed, capsys, monkeypatch):
    monkeypatch.setattr(sys, "stdin", io.StringIO(typed))
    assert main(command) == 2
    assert "is not UTF-8 text" in capsys.readouterr().err


def test_a_pipe_without_a_message_asks_nothing(scripted, capsys, monkeypatch):
    monkeypatch.setattr(sys, "stdin", io.StringIO(" \n"))
    assert main(["chat", "--base-url", scripted.url, "--model", "named"]) == 2
    assert "there is no message on stdin" in capsys.readouterr().err and not scripted.requests


def test_a_conversation_remembers_until_reset(scripted, capsys, monkeypatch):
    scripted.answers = [["one"], ["two"], ["three"]]
    type_lines(monkeypatch, "a", "", KeyboardInterrupt, "b", "/reset", "/what", "c", "/exit")
    assert main(["chat", "--base-url", scripted.url]) == 0
    contents = [[message["content"] for message in body["messages"]] for _, body in scripted.requests]
    assert contents == [["a"], ["a", "one", "b"], ["c"]]
    assert capsys.readouterr().out.count(server.commands.chat.HELP) == 2


@pytest.mark.parametrize(
    ("name", "end", "message"),
    [
        ("reasoning_content", "length", "the answer ended in its reasoning (length); raise --max-tokens."),
        ("reasoning", "length", "the answer ended in its reasoning (length); raise --max-tokens."),
        ("content", "length", "the answer has no text (length); raise --max-tokens."),
        ("content", "stop", "the answer has no text (stop)."),
    ],
)
def test_an_answer_without_text_says_why(name, end, message, scripted, capsys):
    text = "" if name == "content" else "Let me think"
    chunks = [{"delta": {name: text}}, {"delta": {}, "finish_reason": end}]
    scripted.answers = [[{"choices": [chunk]} for chunk in chunks]]
    assert message in fails(capsys, "chat", "hi", "--base-url", scripted.url, status=1)


def test_a_line_that_is_no_text_is_not_sent_and_the_conversation_goes_on(scripted, capsys, monkeypatch):
    scripted.answers = [["one"]]
    type_lines(monkeypatch, "caf\udce9", "b")  # as the C locale reads a byte that is no UTF-8
    assert main(["chat", "--base-url", scripted.url]) == 0
    assert [body["messages"] for _, body in scripted.requests] == [[{"role": "user", "content": "b"}]]
    assert "not UTF-8 text; it was not sent" in capsys.readouterr().err


@pytest.mark.parametrize("flag", ["--temperature", "--top-p"])
@pytest.mark.parametrize("number", ["nan", "inf", "1e999", "x"])
def test_numbers_that_json_does_not_have_are_refused(flag, number, capsys):
    assert f"argument {flag}: {number!r} is not a finite number" in fails(capsys, "chat", "hi", flag, number)


@pytest.mark.parametrize(
    "command", [["chat", "hi"], ["models"], ["bench"], ["run-batch", "-i", "in", "-o", "out"]], ids=str
)
@pytest.mark.parametrize("given", [["--api-key", "sk-\u043a"], ["--api-key", "sk-a\r\nx: y"], []], ids=str)
def test_a_key_that_no_header_can_carry_is_refused_and_not_shown(command, given, capsys, monkeypatch):
    monkeypatch.setenv("OPENAI_API_KEY", "sk-\u043a")
    err = fails(capsys, *command, *given, "--base-url", "http://127.0.0.1:9")
    assert "argument --api-key: the key (also from OPENAI_API_KEY" in err and "sk-" not in err


def test_the_line_end_of_a_file_is_no_part_of_a_key(scripted, monkeypatch):
    scripted.answers = [["yes"]]
    monkeypatch.setenv("OPENAI_API_KEY", "sk-a\r\n")
    assert main(["chat", "hi", "--base-url", scripted.url]) == 0
    assert scripted.requests[0][0] == "Bearer sk-a"


def test_models_of_other_servers_are_listed(scripted, capsys):
    scripted.models = [{"id": "base", "root": None, "max_model_len": 4096}, {"id": "lora", "max_model_len": None}]
    assert main(["models", "--base-url", scripted.url]) == 0
    assert capsys.readouterr().out.splitlines()[1:] == ["base         4096", "lora"]
    scripted.models = None  # Ollama without a model
    assert main(["models", "--base-url", scripted.url]) == 0
    assert capsys.readouterr().out == "name  state  context  model\n"


@pytest.mark.parametrize("models", [["a"], [{"name": "a"}], 5], ids=str)
def test_a_list_of_models_in_another_form_is_named(models, scripted, capsys):
    scripted.models = models
    assert "does not list models as an OpenAI server does" in fails(
        capsys, "models", "--base-url", scripted.url, status=1
    )


def test_errors_do_not_end_a_conversation(scripted, capsys, monkeypatch):
    refusal = json.dumps({"error": {"message": "too long", "code": "context_length_exceeded"}}).encode()
    scripted.answers = [
        (400, refusal),
        ["part", {"error": {"message": "the engine ended"}}],
        ["cut", {"choices": []}],
        ["odd", {"choices": [{"index": 0}]}],
        ["new", {"error": "a text"}],
        (200, b"data: <html>\n\n"),
        (502, b"<html>bad gateway</html>"),
        ["fine"],
    ]
    type_lines(monkeypatch, *(f"q{i}" for i in range(1, 9)))
    assert main(["chat", "--base-url", scripted.url]) == 0
    out, err = capsys.readouterr()
    assert "400: too long" in err and "the engine ended" in err and "502" in err
    assert "closed the stream before the answer was complete" in err
    for data in ('{"choices": [{"index": 0}]}', '{"error": "a text"}', "<html>"):
        assert f"an event that is no chat chunk: {data}" in err
    contents = [message["content"] for message in scripted.requests[-1][1]["messages"]]
    # Questions without any answer are forgotten.
    assert contents == ["q2", "part", "q3", "cut", "q4", "odd", "q5", "new", "q8"]
    assert out.endswith("fine\n\n")


def test_ctrl_c_stops_an_answer_only(scripted, capsys, monkeypatch):
    scripted.answers = [["a", "b", "c"], ["next"]]
    original = server.commands.chat.ChatClient.ask

    def interrupted(self, text):
        for number, piece in enumerate(original(self, text)):
            if text == "first" and number == 1:
                raise KeyboardInterrupt
            yield piece

    monkeypatch.setattr(server.commands.chat.ChatClient, "ask", interrupted)
    type_lines(monkeypatch, "first", "second")
    assert main(["chat", "--base-url", scripted.url]) == 0
    assert "a [stopped]\nnext\n" in capsys.readouterr().out


IN_A_TERMINAL = """
import fcntl, os, runpy, sys, termios
os.setsid()
fcntl.ioctl(0, termios.TIOCSCTTY, 0)
sys.argv[0] = "pageserve"
runpy.run_module("server.cli", run_name="__main__")
"""


def test_text_typed_during_an_answer_is_shown_at_the_next_prompt(scripted):
    rest = threading.Event()
    waiting = threading.Event()

    def reply(self, status, body):
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        middle = body.find(b"END")
        if middle >= 0:
            self.wfile.write(body[:middle])
            waiting.set()
            rest.wait(30)
            body = body[middle:]
        self.wfile.write(body)

    scripted.reply = reply
    scripted.answers = [["BEGIN", "END"], ["fine"]]
    ours, theirs = pty.openpty()
    command = [sys.executable, "-c", IN_A_TERMINAL, "chat", "--base-url", scripted.url]
    with subprocess.Popen(command, cwd=ROOT, stdin=theirs, stdout=theirs, stderr=theirs) as process:
        os.close(theirs)
        shown = b""

        def read_until(text: bytes) -> None:
            nonlocal shown
            while text not in shown:
                assert select.select([ours], [], [], 30)[0], shown
                shown += os.read(ours, 4096)

        read_until(b"> ")
        os.write(ours, b"hello\n")
        assert waiting.wait(30)
        read_until(b"BEGIN")
        os.write(ours, b"typed\n")
        time.sleep(0.1)  # the terminal would echo it at once
        rest.set()
        read_until(b"fine")
        os.write(ours, b"/exit\n")
        assert process.wait(30) == 0
    os.close(ours)
    answer, _, after = shown.partition(b"END")
    assert b"typed" not in answer and b"BEGIN" in answer
    assert b"> typed" in after
    assert [message["content"] for message in scripted.requests[-1][1]["messages"]] == ["hello", "BEGINEND", "typed"]


@pytest.mark.parametrize("command", [["chat", "hi"], ["models"]], ids=" ".join)
def test_without_a_server_it_says_how_to_start_one(command, capsys):
    err = fails(capsys, *command, "--base-url", "http://127.0.0.1:9", status=1)
    assert re.search("no server answers at http://127.0.0.1:9/v1/?; start one with `pageserve serve`", err)


def test_where_a_key_is_wrong_the_commands_say_how_to_give_one(capsys, folder):
    with LiveServer(folder, api_key=("sk-right",)) as live:
        err = fails(capsys, "chat", "hi", "--base-url", live.url, "--api-key", "sk-wrong", status=1)
        assert fails(capsys, "models", "--base-url", live.url, "--api-key", "sk-wrong", status=1) == err
        assert main(["bench", "--base-url", live.url, "--api-key", "sk-wrong"]) == 2
    assert "(Give --api-key KEY or the variable OPENAI_API_KEY.)" in err
    assert "requires an API key: give --api-key KEY or the variable OPENAI_API_KEY" in capsys.readouterr().err
