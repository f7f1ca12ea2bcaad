"""ServerConfig: every setting of the HTTP side, declared once like engine/config.py."""

import dataclasses
import re
from dataclasses import dataclass
from pathlib import Path

from engine.errors import ConfigError
from engine.sampling_params import MAX_LOGPROBS, MAX_N, MAX_STOP_STRINGS
from engine.settings import check_config, option
from engine.text.chat_template import syntax_error

ORIGIN = re.compile(r"[a-z][a-z0-9+.-]*://[a-z0-9.:\[\]-]+")  # as browsers write it
HTTP_URL = re.compile(r"https?://[^/]")
TEMPLATE_MARKS = ("{{", "{%")


@dataclass(frozen=True)
class ServerConfig:
    """Server settings: limits and addresses of the HTTP side."""

    host: str = option("127.0.0.1", "address to listen on; 0.0.0.0 is every interface")
    port: int = option(8000, "TCP port; 0 takes a free one and prints it", minimum=0, maximum=65535)
    served_model_name: tuple[str, ...] = option((), "names of the model in the API; default: the value of model")
    api_key: tuple[str, ...] = option(
        (),
        "keys that clients may send as `Authorization: Bearer KEY`; every route but /health and /ready needs one",
        secret=True,
    )
    api_key_file: str | None = option(
        None, "file with a key per line, with name and limits (see docs/operating.md); SIGHUP reads it anew"
    )
    allow_unauthenticated: bool = option(False, "listen on addresses that others can reach without any API key")
    allowed_origins: tuple[str, ...] = option(
        (), "origins whose web pages may call the API from a browser (CORS), such as https://app.example.com; *: all"
    )
    public_metrics: bool = option(False, "GET /metrics needs no API key")
    requests_per_minute: int | None = option(None, "most requests of one API key in a minute", minimum=1)
    max_concurrent_requests: int | None = option(None, "most requests of one API key at a time", minimum=1)
    tokens_per_minute: int | None = option(
        None, "most tokens, of prompts and generated, of one API key in a minute", minimum=1
    )
    chat_template: str | None = option(None, "Jinja chat template, a file or the text itself; default: the model's")
    drain_timeout: float = option(
        30.0, "seconds that running requests get to finish after SIGTERM", minimum=0, maximum=86400
    )
    keep_alive_interval: float = option(
        15.0, "seconds between the SSE comments that keep a stream open through proxies", above=0, maximum=3600
    )
    max_body_bytes: int = option(32 << 20, "largest request body in bytes", size=True, minimum=1024)
    max_bytes_in_flight: int = option(
        512 << 20,
        "most bytes of request bodies that are read and made into tokens at a time; beyond, large ones get 503",
        size=True,
        minimum=1024,
    )
    max_bytes_in_flight_per_key: int = option(
        128 << 20, "the same of one API key, where there are keys; beyond, 429", size=True, minimum=1024
    )
    max_connections: int | None = option(
        None, "most connections at a time; default: what the hard limit of open files leaves, 20000 at most", minimum=1
    )
    max_connections_per_address: int | None = option(
        None, "most of them from one address; behind a proxy all come from the proxy's", minimum=1
    )
    max_queued_requests: int = option(1024, "requests that may wait; beyond, clients get 429", minimum=1)
    max_queued_tokens: int | None = option(
        4_000_000, "tokens of prompts that may wait; beyond, clients get 429", minimum=1
    )
    max_prompts: int = option(64, "most prompts in one completion request", minimum=1)
    max_n: int = option(128, "most samples (n) of one prompt", minimum=1, maximum=MAX_N)
    max_best_of: int = option(20, "most samples that best_of chooses from", minimum=1, maximum=MAX_N)
    max_stop: int = option(4, "most stop strings of a request", minimum=1, maximum=MAX_STOP_STRINGS)
    max_logprobs: int = option(
        5, "most alternatives to a token that `logprobs` of a completion reports", minimum=0, maximum=MAX_LOGPROBS
    )
    max_top_logprobs: int = option(
        20,
        "most alternatives to a token that `top_logprobs` of a chat and `prompt_logprobs` report",
        minimum=0,
        maximum=MAX_LOGPROBS,
    )
    ignore_unknown_fields: bool = option(
        False,
        "leave out fields of requests that no API knows, and name them in the header x-pageserve-ignored-fields and "
        "once in the log; default: a 400",
    )
    special_tokens_in_content: bool = option(
        False, "let the text of a special token in a message act as that token; default: it is text like any other"
    )
    tool_call_format: str | None = option(
        None,
        "how the model writes tool calls; default: as its chat template shows",
        choices=("hermes", "llama3", "mistral", "mistral_v11", "qwen3_coder"),
    )
    reasoning_split: bool = option(
        True, "what a model thinks between <think> and </think> comes as reasoning_content, not as content"
    )
    debug_kv: bool | None = option(
        None, "GET /debug/kv, the state of every KV block; default: on, but off with several API keys or a key file"
    )
    otlp_traces_endpoint: str | None = option(
        None,
        "where OpenTelemetry traces go, such as http://localhost:4318/v1/traces; default: as "
        "OTEL_EXPORTER_OTLP_ENDPOINT says, else nowhere",
    )
    log_level: str = option("info", "what is logged", choices=("debug", "info", "warning", "error"))

    def __post_init__(self) -> None:
        check_config(self)
        for origin in self.allowed_origins:
            if origin != "*" and not ORIGIN.fullmatch(origin):
                raise ConfigError(f"allowed_origins: {origin!r} is not * and no scheme://host[:port] without a path.")
        if (endpoint := self.otlp_traces_endpoint) is not None and not HTTP_URL.match(endpoint):
            raise ConfigError(f"otlp_traces_endpoint must look like http://localhost:4318/v1/traces, not {endpoint!r}.")


def resolve_files(config: ServerConfig) -> ServerConfig:
    """The config with `chat_template` as text. ConfigError when it is neither a file nor Jinja, or wrong Jinja."""
    template = config.chat_template
    if template is not None and not any(mark in template for mark in TEMPLATE_MARKS):
        template = _read("chat_template", template)
    if template is not None and (wrong := syntax_error(template)) is not None:
        raise ConfigError(f"chat_template: {wrong}")
    return dataclasses.replace(config, chat_template=template)


def _read(name: str, path: str) -> str:
    try:
        return Path(path).read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{name}: cannot read {path}: {error.strerror}.") from None
    except UnicodeDecodeError:
        raise ConfigError(f"{name}: {path} is not UTF-8 text.") from None
