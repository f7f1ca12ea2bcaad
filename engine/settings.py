"""One mechanism for every setting: declared once as a dataclass field, read from YAML, the environment and flags.

`option()` puts the help text and the limits on the field. The command-line flags, the check of YAML files and of
PAGESERVE_ variables, the validation in the constructor, configs/default.yaml and docs/settings.md
(server/commands/config_docs.py) are all made from that declaration. Later sources win:
default < YAML < environment < flag.

Python values (keywords, YAML) are checked without conversion, so "3" is not an integer. Texts (flags, environment) are
parsed first.
"""

import argparse
import dataclasses
import difflib
import math
import re
import types
import typing
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import Any, TypeVar

from engine.errors import ConfigError

ENV_PREFIX = "PAGESERVE_"
CONFIG_VARIABLE = ENV_PREFIX + "CONFIG"  # path of a YAML file; --config overrides it
SIZE = re.compile(r"\s*(\d+(?:\.\d+)?)\s*(?:([kmgt])(?:i?b)?|b)?\s*", re.IGNORECASE)
TRUE, FALSE = ("true", "1", "yes", "on"), ("false", "0", "no", "off")

# Kubernetes and Docker links set variables such as PAGESERVE_SERVICE_HOST and PAGESERVE_PORT=tcp://10.0.0.7:8000 in
# every container beside a service called "pageserve". They are no settings and are ignored.
SERVICE_LINK = re.compile(r"_SERVICE_(HOST|PORT)(_|$)|_PORT_\d+_(TCP|UDP|SCTP)(_|$)")
SERVICE_URL = re.compile(r"(tcp|udp|sctp)://")

# Settings of other engines that pageserve does not have -> the alternative.
NOT_SERVED = {
    "disable_log_requests": "requests are not logged; --log-level sets the rest",
    "distributed_executor_backend": "this version runs one Worker process",
    "enable_chunked_prefill": "chunked prefill is always on; --max-num-batched-tokens sets the chunk",
    "enable_lora": "--lora NAME=DIR or --allow-runtime-lora enables adapters",
    "lora_modules": "--lora NAME=DIR, repeated, names the adapters",
    "enforce_eager": "--no-cuda-graphs runs kernel by kernel",
    "fair_step_slowdown": "--fair-step-seconds bounds a step by its time",
    "gpu_memory_fraction": "the setting is called gpu_memory_utilization",
    "guided_decoding_backend": "there is one backend, llguidance; structured output needs no setting",
    "models": "here is one model, which `model` names",
    "pipeline_parallel_size": (
        "pipeline parallelism is not served: all layers stay on one machine, and tensor_parallel_size divides each of "
        "them among its GPUs"
    ),
    "speculative_config": "use speculative: ngram:K or MODEL:K",
    "speculative_model": "use speculative: ngram:K or MODEL:K",
    "tokenizer_mode": "there is one tokenizer mode",
    "trust_remote_code": "code from a checkpoint is never run",
}

# Names of dtypes at other engines -> ours.
OTHER_NAMES = {
    "bf16": "bfloat16",
    "float": "float32",
    "fp16": "float16",
    "fp32": "float32",
    "half": "float16",
    "fp8_e4m3": "fp8",
}

T = TypeVar("T")


def option(
    default: Any,
    help: str,
    *,
    choices: tuple[Any, ...] | None = None,
    minimum: float | None = None,
    maximum: float | None = None,
    above: float | None = None,
    size: bool = False,
    secret: bool = False,
    mappings: bool = False,
) -> Any:
    """A dataclass field that carries its documentation and its limits.

    `minimum` and `maximum` are inclusive, `above` is exclusive. `size`: the value is a number of bytes, such as "2GiB"
    (an int field stores the number, a str field the text). A `secret` is never printed. `mappings`: in YAML, an entry
    of the list may be a mapping.
    """
    limits = {"choices": choices, "minimum": minimum, "maximum": maximum, "above": above}
    metadata = {"help": help, **limits, "size": size, "secret": secret, "mappings": mappings}
    return dataclasses.field(default=default, metadata=metadata, repr=not secret)


@dataclasses.dataclass(frozen=True, slots=True)
class Setting:
    """The declaration of a field. `type` is bool, int, float or str: that of the value, or (`many`) of each entry."""

    name: str
    type: type
    optional: bool
    many: bool
    default: Any
    help: str
    choices: tuple[Any, ...] | None
    minimum: float | None
    maximum: float | None
    above: float | None
    size: bool
    secret: bool
    mappings: bool

    @property
    def flag(self) -> str:
        return "--" + self.name.replace("_", "-")

    @property
    def env(self) -> str:
        return ENV_PREFIX + self.name.upper()

    def parse(self, text: str) -> Any:
        """The value of a flag's or a variable's text. ConfigError if the text is not a valid value."""
        if self.many:
            return self.check([part.strip() for part in text.split(",") if part.strip()])
        if self.optional and text.lower() in ("none", "null"):
            return None
        return self.check(self._from_text(text.strip() if self.type is not str else text))

    def _from_text(self, text: str) -> Any:
        if self.type is bool:
            return text.lower() in TRUE if text.lower() in TRUE + FALSE else text
        if self.type is int and self.size:
            return text
        try:
            return self.type(text)
        except ValueError:
            return text  # check() raises the error, which names the expected type

    def check(self, value: Any) -> Any:
        """The value in the field's final type. ConfigError names the setting, the expected and the given value."""
        if self.many:
            return self._check_many(value)
        if value is None and self.optional:
            return None
        checked = self._checked(value)
        if checked is None:
            given = "the given value" if self.secret else repr(value)
            raise ConfigError(f"{self.name} must be {self.expected()}, not {given}{self._nearest(value)}")
        return checked

    def _check_many(self, value: Any) -> tuple[Any, ...]:
        parts = (value,) if isinstance(value, self.type) else value
        kinds = (self.type, dict) if self.mappings else (self.type,)
        if not isinstance(parts, (list, tuple)) or any(type(part) not in kinds or not part for part in parts):
            raise ConfigError(f"{self.name} must be a list of non-empty texts{' or mappings' * self.mappings}.")
        return tuple(parts)

    def _checked(self, value: Any) -> Any | None:
        if self.size:
            size = parse_size(value)
            return None if size is None or not self._in_range(size) else (str(value) if self.type is str else size)
        if self.type is float and type(value) is int:
            value = float(value)
        if type(value) is not self.type or (self.choices is not None and value not in self.choices):
            return None
        number: Any = value
        return number if self.type in (bool, str) or self._in_range(number) else None

    def _in_range(self, value: float) -> bool:
        low, high, above = self.minimum, self.maximum, self.above
        return (
            math.isfinite(value)
            and (low is None or value >= low)
            and (high is None or value <= high)
            and (above is None or value > above)
        )

    def _nearest(self, value: Any) -> str:
        """The end of the error of a wrong choice: the choice that was probably meant."""
        if not isinstance(value, str) or self.choices is None:
            return "."
        name = OTHER_NAMES.get(value.lower(), value.lower())
        near = difflib.get_close_matches(
            name, [choice for choice in self.choices if isinstance(choice, str)], n=1, cutoff=0.8
        )
        return f"; did you mean {near[0]}?" if near else "."

    def expected(self) -> str:
        """The valid values in words, such as "an integer from 1 to 65535"."""
        if self.choices is not None:
            kind = "one of " + ", ".join(str(choice) for choice in self.choices)
        elif self.size:
            kind = 'a size in bytes such as 1048576 or "2GiB"' + self._range()
        else:
            kind = {bool: "true or false", int: "an integer", float: "a number", str: "text"}[self.type] + self._range()
        return kind + (" (or none)" if self.optional else "")

    def _range(self) -> str:
        low, high, above = self.minimum, self.maximum, self.above
        if above is not None:
            return f" above {above}" + (f" and at most {high}" if high is not None else "")
        if low is not None and high is not None:
            return f" from {low} to {high}"
        return f" of at least {low}" if low is not None else ""


def parse_size(value: Any) -> int | None:
    """Bytes of 4096, "4096", "512MiB" or "1.5 GB" (units of 1024, with or without i); None for 0 and other values."""
    if type(value) is int:
        return value if value > 0 else None
    match = SIZE.fullmatch(value) if isinstance(value, str) else None
    if match is None:
        return None
    number, unit = match.groups()
    return int(float(number) * 1024 ** " kmgt".index((unit or " ").lower())) or None


def settings_of(config_class: type) -> dict[str, Setting]:
    """Field name -> Setting of a dataclass whose fields are made by option()."""
    hints = typing.get_type_hints(config_class)
    settings = {}
    for field in dataclasses.fields(config_class):
        value_type, optional, many = _unwrap(hints[field.name])
        settings[field.name] = Setting(field.name, value_type, optional, many, field.default, **field.metadata)
    return settings


def _unwrap(hint: Any) -> tuple[type, bool, bool]:
    """(int | None) -> (int, optional, not many); tuple[str, ...] -> (str, not optional, many)."""
    arguments = typing.get_args(hint)
    if typing.get_origin(hint) is tuple:
        return (str if arguments[0] is Any else arguments[0]), False, True
    if isinstance(hint, types.UnionType):
        return next(part for part in arguments if part is not types.NoneType), True, False
    return hint, False, False


def check_config(config: Any) -> None:
    """Check every field of a frozen dataclass and store it in its final type. Call this in `__post_init__`."""
    for name, setting in settings_of(type(config)).items():
        object.__setattr__(config, name, setting.check(getattr(config, name)))


def from_keywords(config_class: type[T], keywords: Mapping[str, Any]) -> T:
    """Make the dataclass from keyword arguments. An unknown keyword is a ConfigError with the nearest known name."""
    known = settings_of(config_class)
    for name in keywords:
        if name not in known:
            raise ConfigError(unknown_name(name, known))
    return config_class(**keywords)


def unknown_name(name: str, known: Iterable[str], spell: str = "{}") -> str:
    """The error message for an unknown setting. `spell` formats a suggested name as its source writes names."""
    plain = name.removeprefix(ENV_PREFIX).lstrip("-").lower().replace("-", "_").removeprefix("no_")
    if plain in NOT_SERVED:
        return f"there is no setting {name}: {NOT_SERVED[plain]}."
    near = difflib.get_close_matches(plain, list(known), n=1, cutoff=0.6)
    return f"there is no setting {name}" + (f"; did you mean {_spell(near[0], spell)}?" if near else ".")


def _spell(name: str, spell: str) -> str:
    if spell.startswith("--"):
        name = name.replace("_", "-")
    return spell.format(name.upper() if spell.startswith(ENV_PREFIX) else name)


class _Values(argparse.Action):
    """Adds to a list. `ambiguous` keeps a flag with several values: the last may be meant as the command's MODEL."""

    def __call__(self, parser: Any, namespace: argparse.Namespace, values: Any, flag: str | None = None) -> None:
        setattr(namespace, self.dest, [*getattr(namespace, self.dest, []), *values])
        if len(values) > 1:
            namespace.ambiguous = flag


def add_flags(parser: argparse.ArgumentParser, *config_classes: type, repeated: tuple[str, ...] = ()) -> None:
    """A flag per setting: `--max-num-seqs N`, `--enable-x / --no-enable-x`, lists as `--api-key A B`.

    The flags of `repeated` settings give the list of their texts.

    The parser keeps the texts of the given flags only. load_settings() parses them, so a wrong value gives the same
    error from every source.
    """
    parser.add_argument(
        "--config", metavar="FILE", default=argparse.SUPPRESS, help="YAML file with any of the settings"
    )
    for config_class in config_classes:
        group = parser.add_argument_group((config_class.__doc__ or config_class.__name__).split(":")[0].split(".")[0])
        for setting in settings_of(config_class).values():
            _add_flag(group, setting, "append" if setting.name in repeated else "store")


def _add_flag(group: Any, setting: Setting, action: str) -> None:
    text = setting.help + ("" if setting.default in (None, "", ()) else f" (default: {setting.default})")
    more: dict[str, Any] = {"dest": setting.name, "default": argparse.SUPPRESS, "help": text.replace("%", "%%")}
    if setting.type is bool:
        group.add_argument(setting.flag, action=argparse.BooleanOptionalAction, **more)
    elif setting.many:
        group.add_argument(setting.flag, nargs="+", action=_Values, metavar="TEXT", **more)
    else:
        metavar = "|".join(map(str, setting.choices)) if setting.choices else setting.type.__name__.upper()
        group.add_argument(setting.flag, action=action, metavar="SIZE" if setting.size else metavar, **more)


def load_settings(
    config_classes: tuple[type, ...],
    flags: Mapping[str, Any],
    environ: Mapping[str, str],
    unused: Collection[str] = (),
) -> list[Any]:
    """One instance of each class from YAML (flag or variable `config`), the environment and flags; later sources win.

    `flags` maps setting names to texts, booleans and lists of texts, as the parser of add_flags() returns them; other
    names are ignored. `unused` are names of settings of others, which a shared YAML file may hold, too; those of
    NOT_SERVED only without a value, as configs/default.yaml has them. ConfigError starts with the place of the fault:
    file and line, variable or flag.
    """
    known = {name: setting for config_class in config_classes for name, setting in settings_of(config_class).items()}
    path = flags.get("config") or environ.get(CONFIG_VARIABLE)
    values = _from_yaml(Path(path), known, unused) if path else {}
    values |= _from_environment(environ, known)
    for name in known.keys() & flags.keys():
        value = flags[name]
        setting = known[name]
        values[name] = _located(setting.flag, setting.parse if isinstance(value, str) else setting.check, value)
    return [
        config_class(**{name: values[name] for name in settings_of(config_class) if name in values})
        for config_class in config_classes
    ]


def _located(where: str, read: Any, value: Any) -> Any:
    try:
        return read(value)
    except ConfigError as error:
        raise ConfigError(f"{where}: {error}") from None


def _from_environment(environ: Mapping[str, str], known: Mapping[str, Setting]) -> dict[str, Any]:
    """The settings in PAGESERVE_ variables. An empty variable counts as not set (compose files write `${X:-}`)."""
    by_variable = {setting.env: setting for setting in known.values()}
    values = {}
    for variable, text in sorted(environ.items()):
        foreign = SERVICE_LINK.search(variable) or (variable.endswith("_PORT") and SERVICE_URL.match(text))
        if not variable.startswith(ENV_PREFIX) or variable == CONFIG_VARIABLE or foreign or not text:
            continue
        setting = by_variable.get(variable)
        if setting is None:
            raise ConfigError(f"environment: {unknown_name(variable, known, ENV_PREFIX + '{}')}")
        values[setting.name] = _located(variable, setting.parse, text)
    return values


def _from_yaml(path: Path, known: Mapping[str, Setting], unused: Collection[str]) -> dict[str, Any]:
    """The settings in a YAML file: a flat mapping of names (dashes or underscores) to values. Errors name lines."""
    values: dict[str, Any] = {}
    for line, key, value in _yaml_entries(path):
        where, name = f"{path}, line {line}", key.replace("-", "_")
        if name in unused and not (name in NOT_SERVED and value):
            continue
        if name not in known:
            raise ConfigError(f"{where}: {unknown_name(key, known)}")
        if name in values:
            raise ConfigError(f"{where}: {name} is set twice.")
        values[name] = _located(where, known[name].check, value)
    return values


def _yaml_entries(path: Path) -> list[tuple[int, str, Any]]:
    """(line, key, value) of each entry of the file's top-level mapping, in order and with repeated keys kept."""
    import yaml  # a server without a config file does not load it

    try:
        loader = yaml.SafeLoader(path.read_text(encoding="utf-8"))
        root = loader.get_single_node()
        if root is None:
            return []
        if not isinstance(root, yaml.MappingNode):
            raise ConfigError(f"{path}, line {root.start_mark.line + 1}: must hold lines of `name: value`.")
        return [
            (key.start_mark.line + 1, str(key.value), loader.construct_object(value, deep=True))
            for key, value in root.value
        ]
    except OSError as error:
        raise ConfigError(f"config file {path}: {error.strerror}.") from None
    except yaml.MarkedYAMLError as error:
        line = error.problem_mark.line + 1 if error.problem_mark else 1
        raise ConfigError(f"{path}, line {line}: not valid YAML: {error.problem}.") from None
    except (yaml.YAMLError, ValueError) as error:  # ValueError: not UTF-8, or a date that does not exist
        raise ConfigError(f"{path}: not valid YAML: {error}.") from None


def shown(config: Any) -> dict[str, Any]:
    """Setting -> value of all settings that differ from their default, for a log. A secret shows as "***"."""
    return {
        name: "***" if setting.secret else getattr(config, name)
        for name, setting in settings_of(type(config)).items()
        if getattr(config, name) != setting.default
    }
