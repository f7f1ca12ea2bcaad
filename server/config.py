"""ServerConfig: every setting of the HTTP side, declared once as in engine/config.py."""

import dataclasses
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from engine.errors import ConfigError
from engine.sampling_params import MAX_LOGPROBS, MAX_N, MAX_STOP_STRINGS
from engine.settings import check_config, option
from engine.text.chat_template import syntax_error

ORIGIN = re.compile(r"[a-z][a-z0-9+.-]*://[a-z0-9.:\[\]-]+")  # the form of the Origin header
HTTP_URL = re.compile(r"https?://[^/]")
TEMPLATE_MARKS = ("{{", "{%")


@dataclass(frozen=True)
class ServerConfig:
    """Server settings: limits and addresses of the HTTP side."""

    host: str = option("127.0.0.1", "address to listen on; 0.0.0.0: every interface")
    port: int = option(8000, "TCP port; 0: a free port, which is printed", minimum=0, maximum=65535)
    served_model_name: tuple[str, ...] = option((), "names of the model in the API; default: the value of model")
    models: tuple[Any, ...] = option(
        (),
        "several models on this port, each NAME=DIR_OR_ID (as --model NAME=DIR_OR_ID, repeated) or, in YAML, a mapping "
        "with name, model and the settings of this model alone (docs/operating.md)",
        mappings=True,
    )
    max_loaded: int | None = option(
        None,
        "most of several models that are awake at the same time; for a further one the least recently used idle model "
        "sleeps; default: all",
        minimum=1,
    )
    api_key: tuple[str, ...] = option(
        (),
        "keys that clients may send as `Authorization: Bearer KEY`; every route but /health and /ready needs a key",
        secret=True,
    )
    api_key_file: str | None = option(
        None, "file with a key per line, with name and limits (see docs/operating.md); SIGHUP reads the file again"
    )
    allow_unauthenticated: bool = option(False, "allow an address that other machines can reach even without API keys")
    allowed_origins: tuple[str, ...] = option(
        (), "origins whose web pages may call the API from a browser (CORS), such as https://app.example.com; *: all"
    )
    public_metrics: bool = option(False, "GET /metrics needs no API key")
    requests_per_minute: int | None = option(None, "most requests per minute of one API key", minimum=1)
    max_concurrent_requests: int | None = option(None, "most concurrent requests of one API key", minimum=1)
    tokens_per_minute: int | None = option(
        None, "most tokens per minute, prompts and output, of one API key", minimum=1
    )
    chat_template: str | None = option(None, "Jinja chat template, a file or the text itself; default: the model's")
    drain_timeout: float = option(
        30.0, "seconds that running requests get to finish after SIGTERM", minimum=0, maximum=86400
    )
    keep_alive_interval: float = option(
        15.0, "seconds between the SSE comments that keep a stream open through proxies", above=0, maximum=3600
    )
    stream_interval: int = option(
        1,
        "tokens of a chunk of a stream, after the first chunk; more of them save the host's time, which hundreds of "
        "streams use up",
        minimum=1,
    )
    max_body_bytes: int = option(32 << 20, "largest request body in bytes", size=True, minimum=1024)
    max_bytes_in_flight: int = option(
        512 << 20,
        "most bytes of request bodies that are read and tokenized at the same time; beyond, large bodies get 503",
        size=True,
        minimum=1024,
    )
    max_bytes_in_flight_per_key: int = option(
        128 << 20, "the same limit per API key, if there are keys; beyond, 429", size=True, minimum=1024
    )
    max_connections: int | None = option(
        None, "most open connections; default: as many as the hard limit of open files allows, at most 20000", minimum=1
    )
    max_connections_per_address: int | None = option(
        None, "most open connections from one address; behind a proxy all have the proxy's address", minimum=1
    )
    max_queued_requests: int = option(1024, "most waiting requests; beyond, clients get 429", minimum=1)
    max_queued_tokens: int | None = option(
        4_000_000, "most prompt tokens of waiting requests; beyond, clients get 429", minimum=1
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
        "ignore request fields that no API knows, and name them in the header x-pageserve-ignored-fields and once in "
        "the log; default: a 400",
    )
    special_tokens_in_content: bool = option(
        False, "let the text of a special token in a message act as that token; default: the text is plain text"
    )
    tool_call_format: str | None = option(
        None,
        "format in which the model writes tool calls; default: found in its chat template",
        choices=("harmony", "hermes", "llama3", "mistral", "mistral_v11", "qwen3_coder"),
    )
    reasoning_split: bool = option(
        True, "return the text between <think> and </think> as reasoning_content, not as content"
    )
    debug_kv: bool | None = option(
        None, "GET /debug/kv, the state of every KV block; default: on, off with several API keys or a key file"
    )
    otlp_traces_endpoint: str | None = option(
        None,
        "address for OpenTelemetry traces, such as http://localhost:4318/v1/traces; default: "
        "OTEL_EXPORTER_OTLP_ENDPOINT, else no traces",
    )
    log_level: str = option("info", "lowest level that is logged", choices=("debug", "info", "warning", "error"))

    def __post_init__(self) -> None:
        check_config(self)
        for origin in self.allowed_origins:
            if origin != "*" and not ORIGIN.fullmatch(origin):
                raise ConfigError(f"allowed_origins: {origin!r} is not * and no scheme://host[:port] without a path.")
        if (endpoint := self.otlp_traces_endpoint) is not None and not HTTP_URL.match(endpoint):
            raise ConfigError(f"otlp_traces_endpoint must look like http://localhost:4318/v1/traces, not {endpoint!r}.")


def resolve_files(config: ServerConfig) -> ServerConfig:
    """The config with the text of `chat_template`. ConfigError if the setting is neither a file nor valid Jinja."""
    template = config.chat_template
    if template is not None and not any(mark in template for mark in TEMPLATE_MARKS):
        template = _read("chat_template", template)
    if template is not None and (fault := syntax_error(template)) is not None:
        raise ConfigError(f"chat_template: {fault}")
    return dataclasses.replace(config, chat_template=template)


def _read(name: str, path: str) -> str:
    try:
        return Path(path).read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{name}: cannot read {path}: {error.strerror}.") from None
    except UnicodeDecodeError:
        raise ConfigError(f"{name}: {path} is not UTF-8 text.") from None
