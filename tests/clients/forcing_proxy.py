"""A proxy between an agent and the server that makes a small model follow a script.

It changes three things of a request that offers the script's tools: the schemas of those tools allow one value, the
next call of the script is forced, and after the last one a text is. All else passes as it came, both ways, so that the
server reads what the agent really sends. The step is found in the request: calls that have results there are done.
"""

import asyncio
import json
import threading
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

import httpx
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import StreamingResponse
from starlette.routing import Route

HOP = {"host", "content-length", "transfer-encoding", "connection", "accept-encoding"}
METHODS = ["GET", "HEAD", "POST", "PUT", "PATCH", "DELETE"]
SECONDS = 300.0  # for an answer; a prompt of 30,000 tokens takes 15 s on two cores
Body = dict[str, Any]


@dataclass(frozen=True)
class Call:
    """A call of `tool` with these arguments and no others."""

    tool: str
    arguments: dict[str, Any]

    @property
    def schema(self) -> Body:
        values = {name: {"enum": [value]} for name, value in self.arguments.items()}
        return {"type": "object", "properties": values, "required": [*values], "additionalProperties": False}


@dataclass(frozen=True)
class Script:
    """`calls`, each of another tool, then `text`; without calls every request is answered with `text`."""

    calls: tuple[Call, ...]
    text: str


@dataclass
class Exchange:
    """One exchange: the request as the agent sent it, and the answer of the server."""

    method: str
    url: str
    headers: dict[str, str]
    body: Any
    status: int = 0
    answer: bytes = b""
    forced: bool = False


def force_messages(body: Body, script: Script) -> bool:
    """Anthropic's /v1/messages."""
    schemas = {call.tool: call.schema for call in script.calls}
    tools = [tool for tool in body.get("tools", ()) if tool.get("name") in schemas]
    if len(tools) < len(schemas):
        return False
    for tool in tools:
        tool["input_schema"] = schemas[tool["name"]]
    blocks = [block for turn in body["messages"] if isinstance(turn["content"], list) for block in turn["content"]]
    done = sum(block.get("type") == "tool_result" for block in blocks)
    if done < len(script.calls):
        body["tool_choice"] = {"type": "tool", "name": script.calls[done].tool, "disable_parallel_tool_use": True}
    else:
        body["tool_choice"] = {"type": "none"}
        body["output_config"] = {**body.get("output_config", {}), "format": {"type": "json_schema", **_said(script)}}
    return True


def force_chat(body: Body, script: Script) -> bool:
    """OpenAI's /v1/chat/completions."""
    schemas = {call.tool: call.schema for call in script.calls}
    functions = [tool["function"] for tool in body.get("tools", ()) if tool["type"] == "function"]
    functions = [function for function in functions if function["name"] in schemas]
    if len(functions) < len(schemas):
        return False
    for function in functions:
        function["parameters"] = schemas[function["name"]]
    done = sum(message["role"] == "tool" for message in body["messages"])
    if done < len(script.calls):
        body["tool_choice"] = {"type": "function", "function": {"name": script.calls[done].tool}}
        body["parallel_tool_calls"] = False
    else:
        body.pop("tools", None)
        body.pop("tool_choice", None)
        body["structured_outputs"] = {"choice": [script.text]}
    return True


def force_responses(body: Body, script: Script) -> bool:
    """OpenAI's /v1/responses."""
    schemas = {call.tool: call.schema for call in script.calls}
    all_tools = [inner for tool in body.get("tools", ()) for inner in tool.get("tools", [tool])]  # with namespaces'
    tools = [tool for tool in all_tools if tool.get("name") in schemas and tool["type"] == "function"]
    if len(tools) < len(schemas):
        return False
    for tool in tools:
        tool["parameters"] = schemas[tool["name"]]
    items = body["input"] if isinstance(body["input"], list) else []
    done = sum(item.get("type") == "function_call_output" for item in items)
    if done < len(script.calls):
        body["tool_choice"] = {"type": "function", "name": script.calls[done].tool}
        body["parallel_tool_calls"] = False
    else:
        body["tool_choice"] = "none"
        form = {"type": "json_schema", "name": "said", "strict": True, **_said(script)}
        body["text"] = {**body.get("text", {}), "format": form}
    return True


def _said(script: Script) -> Body:
    """The text as the one value of a JSON object: these two APIs know no other way to force one."""
    return {"schema": Call("", {"said": script.text}).schema}


FORCES = {"/v1/messages": force_messages, "/v1/chat/completions": force_chat, "/v1/responses": force_responses}


@dataclass
class ForcingProxy:
    """Serves at `url` in a thread of its own while it is entered; `exchanges` are all that passed."""

    upstream: str
    script: Script
    exchanges: list[Exchange] = field(default_factory=list)
    url: str = ""

    def __enter__(self) -> "ForcingProxy":
        app = Starlette(routes=[Route("/{path:path}", self._pass_on, methods=METHODS)])
        config = uvicorn.Config(app, host="127.0.0.1", port=0, log_level="warning", lifespan="off")
        self._server = uvicorn.Server(config)
        self._thread = threading.Thread(target=lambda: asyncio.run(self._server.serve()), daemon=True)
        self._thread.start()
        while not self._server.started:
            self._thread.join(0.02)
            assert self._thread.is_alive(), "the proxy did not start"
        port = self._server.servers[0].sockets[0].getsockname()[1]
        self.url = f"http://127.0.0.1:{port}"
        return self

    def __exit__(self, *_: object) -> None:
        self._server.should_exit = True
        self._thread.join(10)

    async def _pass_on(self, request: Request) -> StreamingResponse:
        raw = await request.body()
        url = request.url.path + (f"?{request.url.query}" if request.url.query else "")
        exchange = Exchange(request.method, url, dict(request.headers), _parsed(raw))
        self.exchanges.append(exchange)
        force = FORCES.get(request.url.path)
        if force is not None and isinstance(exchange.body, dict):
            body = json.loads(raw)
            exchange.forced = force(body, self.script)
            raw = json.dumps(body).encode() if exchange.forced else raw
        headers = {name: value for name, value in request.headers.items() if name not in HOP}
        client = httpx.AsyncClient(base_url=self.upstream, timeout=SECONDS)
        answer = await client.send(client.build_request(request.method, url, content=raw, headers=headers), stream=True)
        exchange.status = answer.status_code

        async def chunks() -> AsyncIterator[bytes]:
            try:
                async for chunk in answer.aiter_raw():
                    exchange.answer += chunk
                    yield chunk
            finally:
                await answer.aclose()
                await client.aclose()

        kept = {name: value for name, value in answer.headers.items() if name not in HOP}
        return StreamingResponse(chunks(), answer.status_code, kept)


def _parsed(raw: bytes) -> Any:
    try:
        return json.loads(raw)
    except ValueError:
        return raw.decode(errors="replace")
