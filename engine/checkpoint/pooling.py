"""Reads the pooling of a checkpoint in the form of sentence-transformers: modules.json and a folder per module."""

import json
import re
from pathlib import Path

from engine.checkpoint.json_files import read_json
from engine.checkpoint.links import path_inside
from engine.errors import ConfigError, ModelError
from engine.sampling_params import Pooling

MODULES = {"Transformer", "Pooling", "Dense", "Normalize"}
ORDER = re.compile(r"(Transformer )?Pooling( Dense)*( Normalize)?")
KINDS = {"cls": "cls", "mean": "mean", "lasttoken": "last"}  # the names of newer files
FLAGS = {
    f"pooling_mode_{name}": kind
    for name, kind in (("cls_token", "cls"), ("mean_tokens", "mean"), ("lasttoken", "last"))
}


def read_pooling(model_dir: Path, choice: str) -> Pooling | None:
    """The pooling that the checkpoint declares; a `choice` other than "auto" overrides the kind.

    None if the checkpoint declares none and `choice` is "auto". ModelError for a pooling that is not served.
    """
    modules = _sentence_modules(model_dir)
    names = [name for name, _ in modules]
    if choice != "auto":
        return Pooling(choice, normalize=not modules or "Normalize" in names)
    if "Pooling" not in names:
        return None
    if unknown := set(names) - MODULES:
        raise ModelError(
            f"modules.json: the module {sorted(unknown)[0]!r} is not served; --pooling last, mean or cls computes "
            "the vectors without it."
        )
    if not ORDER.fullmatch(" ".join(names)):
        raise ModelError(
            f"modules.json: the order {', '.join(names)[:200]} is not served; --pooling last, mean or cls computes "
            "the vectors by Transformer, Pooling and Normalize."
        )
    return Pooling(_pooling_kind(model_dir, dict(modules)["Pooling"]), "Normalize" in names)


def dense_folders(model_dir: Path, choice: str) -> list[str]:
    """The folders of the linear layers behind the pooling, in order; none with a `choice` other than "auto"."""
    if choice != "auto":
        return []
    return [folder for name, folder in _sentence_modules(model_dir) if name == "Dense"]


def _sentence_modules(model_dir: Path) -> list[tuple[str, str]]:
    """(class name, folder) of each module of sentence-transformers, in order; empty if the checkpoint has none."""
    path = model_dir / "modules.json"
    try:
        modules = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else []
        found = [(str(module["type"]).rpartition(".")[2], str(module["path"])) for module in modules]
    except (OSError, ValueError, TypeError, KeyError, RecursionError) as error:
        raise ModelError(f"{path} is not a list of modules with type and path: {error!r:.200}") from None
    if any(Path(folder).is_absolute() or ".." in Path(folder).parts for _, folder in found):
        raise ModelError(f"{path}: a module's path leaves the model's folder")
    return found


def _pooling_kind(model_dir: Path, module: str) -> str:
    """The kind of pooling, from `pooling_mode` in newer files or from the boolean flags in older files."""
    settings = read_json(path_inside(model_dir, Path(module) / "config.json"), required=True)
    named = settings.get("pooling_mode")
    flags = [name for name, on in settings.items() if name.startswith("pooling_mode_") and on is True]
    asked = [named] if named else flags
    found = [(KINDS if named else FLAGS).get(str(name)) for name in asked]
    if len(found) != 1 or found[0] is None:
        raise ModelError(
            f"{module}/config.json: pooling by {', '.join(map(str, asked))[:200] or 'nothing'} is not served; "
            "choose one with --pooling last, mean or cls."
        )
    return found[0]


def pooling_of_model(from_checkpoint: Pooling | None, encoder: bool) -> Pooling:
    """The result of `read_pooling`, else mean for an encoder, last for a decoder. ConfigError for cls of a decoder."""
    pooling = from_checkpoint or Pooling("mean" if encoder else "last")
    if pooling.kind == "cls" and not encoder:
        raise ConfigError(
            "pooling: the first token of a decoder does not attend to later tokens; use --pooling last or mean."
        )
    return pooling
