"""Renders documents from declarations: configs/default.yaml, docs/settings.md, and the field list in docs/api.md.

`make docs` (python -m server.commands.config_docs) rewrites them in a checkout; tests/test_house.py checks that they
are up to date.
"""

import json
import textwrap
from pathlib import Path
from typing import Any

from engine.config import EngineConfig
from engine.settings import ENV_PREFIX, Setting, settings_of
from server.config import ServerConfig
from server.protocol.harmless import KINDS, WRITTEN_LIST

CONFIG_CLASSES = (EngineConfig, ServerConfig)
TITLES = {EngineConfig: "Engine", ServerConfig: "Server"}
BEGIN, END = "<!-- made by `make docs` -->", "<!-- end of what `make docs` made -->"
YAML_HEAD = f"""# Every setting with its default. Copy the ones that you change to a file: pageserve serve --config FILE
# The same names work as flags (--max-num-seqs) and as variables ({ENV_PREFIX}MAX_NUM_SEQS).
# A flag wins over a variable, a variable over this file. null means: chosen when the model is known.
# Made from the declarations by `make docs`.
"""


def yaml_template() -> str:
    """configs/default.yaml: every key, its help as a comment, its default as the value."""
    parts = [YAML_HEAD]
    for config_class in CONFIG_CLASSES:
        parts.append(f"\n# {TITLES[config_class]}\n")
        for setting in settings_of(config_class).values():
            comment = textwrap.wrap(_help(setting), 116, initial_indent="# ", subsequent_indent="# ")
            parts.append("\n".join([*comment, f"{setting.name}: {_yaml_value(setting.default)}"]) + "\n")
    return "".join(parts)


def markdown_tables() -> str:
    """docs/settings.md: one table per config class, with flag, default and meaning."""
    parts = []
    for config_class in CONFIG_CLASSES:
        parts.append(f"\n**{TITLES[config_class]}**\n\n| flag | default | meaning |\n|---|---|---|\n")
        for setting in settings_of(config_class).values():
            parts.append(f"| `{setting.flag}` | {_default(setting)} | {_help(setting)} |\n")
    return "".join(parts)


def harmless_tables() -> str:
    """The list of request fields without effect: ignored fields, and fields that accept one value only."""
    rows = []
    for place, ignored, inert in WRITTEN_LIST:
        for name, reason in ignored.items():
            accepted = KINDS[name][0] if name in KINDS else "anything"
            rows.append(f"| `{place.format(name)}` | {accepted} | {reason} |\n")
        for name, values in inert.items():
            if values:
                shown = ", ".join(f"`{json.dumps(value)}`" for value in values)
                reason = "this server always does so; a 400 for any other value"
                rows.append(f"| `{place.format(name)}` | {shown} | {reason} |\n")
    return "".join(["| field | accepted | why it has no effect |\n|---|---|---|\n", *rows])


DOCUMENTS = {"docs/settings.md": markdown_tables, "docs/api.md": harmless_tables}


def with_table(path: Path, text: str) -> str:
    """The document at `path` with `text` between the marks; ValueError if a mark is missing."""
    head, _, rest = path.read_text(encoding="utf-8").partition(BEGIN)
    _, mark, tail = rest.partition(END)
    if not mark:
        raise ValueError(f"{path} needs the lines {BEGIN!r} and {END!r}")
    return f"{head}{BEGIN}\n{text}\n{END}{tail}"


def _help(setting: Setting) -> str:
    choices = setting.choices or ()
    missing = [str(choice) for choice in choices if str(choice) not in setting.help]
    return setting.help + (" (" + ", ".join(map(str, choices)) + ")" if missing else "")


def _default(setting: Setting) -> str:
    if setting.default is not None and setting.type is bool:
        return f"on (`{setting.flag.replace('--', '--no-', 1)}`)" if setting.default else "off"
    return "" if setting.default in (None, "", ()) else f"`{setting.default}`"


def _yaml_value(value: Any) -> str:
    return json.dumps(list(value) if isinstance(value, tuple) else value)


def main() -> None:
    root = Path(__file__).resolve().parents[2]
    (root / "configs" / "default.yaml").write_text(yaml_template(), encoding="utf-8")
    for name, make in DOCUMENTS.items():
        path = root / name
        path.write_text(with_table(path, make()), encoding="utf-8")


if __name__ == "__main__":
    main()
