"""The models of a server, from --model NAME=DIR_OR_ID (repeated) or the list `models` of a YAML file."""

import dataclasses
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from engine.config import EngineConfig
from engine.errors import ConfigError
from engine.settings import settings_of, unknown_name
from server.config import ServerConfig, resolve_files

DEFAULT_MODEL_NAME = "pageserve"
NAMED = re.compile(r"([\w.:@/-]{1,128})=(.+)")
# Settings of the server that a model may have for itself. Each model has a queue, a template and a format of its own.
OF_A_MODEL = (
    "served_model_name",
    "chat_template",
    "tool_call_format",
    "reasoning_split",
    "special_tokens_in_content",
    "max_queued_requests",
    "max_queued_tokens",
)


@dataclasses.dataclass(frozen=True)
class ModelSettings:
    """A model: `names` are its names in the API, `server` has its own settings in the place of the server's."""

    names: tuple[str, ...]
    engine: EngineConfig
    server: ServerConfig


def merge_model_flags(flags: dict[str, Any]) -> None:
    """Turn a repeated --model NAME=DIR_OR_ID into the setting `models`, and `pageserve serve MODEL` into --model.

    A single value without a name, or one that is an existing path, stays the setting `model`. Raises ConfigError.
    """
    given, positional = flags.pop("model", []), flags.pop("positional_model")
    if positional is not None:
        if given and given != [positional]:
            raise ConfigError(f"two models are named: {positional} and --model {given[0]}.")
        given = [positional]
    if len(given) == 1 and (NAMED.fullmatch(given[0]) is None or Path(given[0]).exists()):
        flags["model"] = given[0]
    elif given:
        for text in given:
            if NAMED.fullmatch(text) is None:
                raise ConfigError(f"--model {text}: several models need names: --model NAME=DIR_OR_ID.")
        flags["models"] = given


def served_names(config: ServerConfig, model: str) -> tuple[str, ...]:
    """The names of the model in the API: the configured names, else the folder or hub id as given (vLLM's rule)."""
    return config.served_model_name or (model or DEFAULT_MODEL_NAME,)


def model_settings(engine: EngineConfig, server: ServerConfig) -> list[ModelSettings]:
    """The models of two configs, the default model first. Raises ConfigError, which names the entry and the field."""
    if not server.models:
        if server.max_loaded is not None:
            raise ConfigError("max_loaded: there is one model; give several: --model NAME=DIR, repeated, or `models`.")
        found = [ModelSettings(served_names(server, engine.model), engine, server)]
        _check_adapter_names(found)
        return found
    if engine.model:
        raise ConfigError(f"model: `models` lists the models; add {engine.model!r} to the list.")
    if server.served_model_name:
        raise ConfigError("served_model_name: `models` gives each model its name; further names go into its entry.")
    awake = min(server.max_loaded or len(server.models), len(server.models))
    found = [_settings_of_entry(entry, engine, server, awake) for entry in server.models]
    names = [name for one in found for name in one.names]
    if twice := next((name for name in names if names.count(name) > 1), None):
        raise ConfigError(f"models: two models are named {twice!r}.")
    _check_adapter_names(found)
    _check_shares(found, engine, awake)
    return found


def _settings_of_entry(entry: Any, engine: EngineConfig, server: ServerConfig, awake: int) -> ModelSettings:
    values = dict(_named(entry) if isinstance(entry, str) else entry)
    name = values.pop("name", None)
    if type(name) is not str or not name:
        raise ConfigError(f"models: an entry is NAME=DIR_OR_ID, or a mapping with a name; this one is {entry!r}.")
    try:
        own = _checked({key.replace("-", "_"): value for key, value in values.items()})
        of_server = {key: own.pop(key) for key in OF_A_MODEL if key in own}
        own.setdefault("memory_share", engine.memory_share or engine.gpu_memory_utilization / awake)
        if engine.disk_cache is not None:  # two Workers cannot share a file
            own.setdefault("disk_cache", str(Path(engine.disk_cache) / re.sub(r"[^\w.-]", "-", name)))
        names = (name, *of_server.pop("served_model_name", ()))
        config = resolve_files(dataclasses.replace(server, models=(), served_model_name=names, **of_server))
        return ModelSettings(names, dataclasses.replace(engine, **own), config)
    except ConfigError as error:
        raise ConfigError(f"models, {name}: {error}") from None


def _named(entry: str) -> dict[str, Any]:
    match = NAMED.fullmatch(entry)
    return {} if match is None else {"name": match[1], "model": match[2]}


def _checked(values: Mapping[str, Any]) -> dict[str, Any]:
    of_server = settings_of(ServerConfig)
    known = settings_of(EngineConfig) | {name: of_server[name] for name in OF_A_MODEL}
    for name in values:
        if name in of_server and name not in known:
            raise ConfigError(f"{name} is a setting of the whole server.")
        if name not in known:
            raise ConfigError(unknown_name(name, known))
    return {name: known[name].check(value) for name, value in values.items()}


def _check_adapter_names(models: list[ModelSettings]) -> None:
    """ConfigError if `model` of a request could mean an adapter and something else."""
    names = {name for one in models for name in one.names}
    for one in models:
        for adapter in one.engine.adapters:
            if adapter in names:
                raise ConfigError(
                    f"lora: a model or another adapter is called {adapter!r} already; rename the adapter."
                )
            names.add(adapter)


def _check_shares(models: list[ModelSettings], engine: EngineConfig, awake: int) -> None:
    """ConfigError if the models that may be awake together have more than the server's share of a GPU."""
    shares = sorted(((one.engine.memory_share or 0.0, one.names[0]) for one in models), reverse=True)[:awake]
    total = sum(share for share, _ in shares)
    if total > engine.gpu_memory_utilization + 1e-6:
        listed = " + ".join(f"{name} {share:g}" for share, name in shares)
        raise ConfigError(
            f"memory_share: {listed} is {total:g} of the GPU's memory, more than gpu_memory_utilization "
            f"({engine.gpu_memory_utilization:g}); lower the shares, or let fewer models be awake with max_loaded."
        )
