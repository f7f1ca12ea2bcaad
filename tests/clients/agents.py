"""The coding agents whose scripted task `make clients` runs: how each is installed, started, kept at home and judged.

A new agent is an entry of AGENTS. `command` and `environment` may hold {url} (of the server, without /v1), {scratch}
(the folder that the agent works in) and {home}.
"""

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from tests.clients.forcing_proxy import Call, Script

MODEL = "pageserve"
FILE, TEXT, SAID = "made.txt", "a tool call made this", "the file is made"
TASK = f"Make a file {FILE} that says: {TEXT}"
# Whatever an agent looks up elsewhere ends at a closed port of this machine.
NOWHERE = "http://127.0.0.1:9"
ISOLATED = {
    **dict.fromkeys(("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "http_proxy", "https_proxy", "all_proxy"), NOWHERE),
    **dict.fromkeys(("NO_PROXY", "no_proxy"), "127.0.0.1,localhost"),
    "DO_NOT_TRACK": "1",
    "TERM": "dumb",
}


@dataclass(frozen=True)
class Agent:
    """`executable` lies in the folder of npm packages and environments that the Makefile makes."""

    executable: str
    command: tuple[str, ...]
    environment: dict[str, str]
    script: Callable[[Path], Script]
    files: dict[str, str] = field(default_factory=dict)  # of its settings: path below {home} -> text
    says: Callable[[str], str] = lambda output: output  # what it answers in the end, of what it prints
    route: str = "/v1/chat/completions"  # that it talks to


def _claude_script(scratch: Path) -> Script:
    check = {"command": f"cat {FILE}", "description": "Show the file"}
    write = {"file_path": str(scratch / FILE), "content": TEXT}
    return Script((Call("Write", write), Call("Bash", check)), SAID)


def _claude_says(output: str) -> str:
    answer = json.loads(output.strip().splitlines()[-1])
    assert answer["is_error"] is False and answer["num_turns"] == 3, answer
    return str(answer["result"])


def _opencode_script(scratch: Path) -> Script:
    check = {"command": f"cat {FILE}", "description": "Show the file"}
    write = {"filePath": str(scratch / FILE), "content": TEXT}
    return Script((Call("write", write), Call("bash", check)), SAID)


def _aider_script(scratch: Path) -> Script:
    """aider reads files out of a text: it uses no tools."""
    return Script((), f"{FILE}\n```\n{TEXT}\n```\n\n{SAID}")


def _codex_script(scratch: Path) -> Script:
    """The second tool is in a namespace; there is no such agent to close, which codex tells the model."""
    write = {"cmd": f"echo '{TEXT}' > {FILE}"}
    return Script((Call("exec_command", write), Call("close_agent", {"target": "nobody"})), SAID)


# No sandbox within what may be a container without user namespaces: the script is ours.
CODEX_SETTINGS = f"""model = "{MODEL}"
model_provider = "local"
approval_policy = "never"
sandbox_mode = "danger-full-access"
check_for_update_on_startup = false

[analytics]
enabled = false

[model_providers.local]
name = "local"
base_url = "{{url}}/v1"
wire_api = "responses"
request_max_retries = 0
stream_max_retries = 0
"""
# Braces are doubled, for {url} is filled in.
OPENCODE_SETTINGS = """{{
  "provider": {{
    "local": {{
      "npm": "@ai-sdk/openai-compatible",
      "options": {{"baseURL": "{url}/v1", "apiKey": "none"}},
      "models": {{"pageserve": {{"limit": {{"context": 131072, "output": 8192}}}}}}
    }}
  }},
  "share": "disabled",
  "autoupdate": false
}}
"""

AGENTS: dict[str, Agent] = {
    "claude-code": Agent(
        executable="node_modules/.bin/claude",
        command=("-p", TASK, "--output-format", "json", "--allowedTools", "Write", "Bash"),
        environment={
            "ANTHROPIC_BASE_URL": "{url}",
            "ANTHROPIC_AUTH_TOKEN": "none",
            "ANTHROPIC_MODEL": MODEL,
            "ANTHROPIC_DEFAULT_HAIKU_MODEL": MODEL,
            "ANTHROPIC_SMALL_FAST_MODEL": MODEL,
            "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
            "DISABLE_AUTOUPDATER": "1",
            "DISABLE_TELEMETRY": "1",
            "DISABLE_ERROR_REPORTING": "1",
        },
        script=_claude_script,
        says=_claude_says,
        route="/v1/messages",
    ),
    "codex": Agent(
        executable="node_modules/.bin/codex",
        command=("exec", "--skip-git-repo-check", TASK),
        environment={},
        script=_codex_script,
        files={".codex/config.toml": CODEX_SETTINGS},
        route="/v1/responses",
    ),
    "opencode": Agent(
        executable="node_modules/.bin/opencode",
        command=("run", "--model", f"local/{MODEL}", TASK),
        environment={
            "OPENCODE_DISABLE_AUTOUPDATE": "true",
            "OPENCODE_DISABLE_DEFAULT_PLUGINS": "true",
            "OPENCODE_DISABLE_LSP_DOWNLOAD": "true",
            "OPENCODE_DISABLE_MODELS_FETCH": "true",
        },
        script=_opencode_script,
        files={".config/opencode/opencode.json": OPENCODE_SETTINGS},
    ),
    "aider": Agent(
        executable="aider/bin/aider",
        command=(
            *("--model", f"openai/{MODEL}", "--edit-format", "whole", "--yes-always", "--no-git", "--no-pretty"),
            *("--no-show-model-warnings", "--no-check-update", "--no-detect-urls", "--analytics-disable"),
            *("--message", TASK, FILE),
        ),
        environment={
            "OPENAI_API_BASE": "{url}/v1",
            "OPENAI_API_KEY": "none",
            "LITELLM_LOCAL_MODEL_COST_MAP": "True",
        },
        script=_aider_script,
    ),
}
