"""Refuses symbolic links that leave the folder of a checkpoint: a checkpoint is untrusted input.

Such a link could lead to any file of this machine. As a chat template, for example, the file's text would reach every
client that asks for the tokens of a prompt.
"""

from pathlib import Path

from engine.errors import ModelError

READ_SUFFIXES = (".json", ".jinja", ".model", ".txt", ".tiktoken", ".safetensors")


def path_inside(folder: Path, relative: str | Path) -> Path:
    """The real path of a file in a checkpoint, which need not exist. ModelError if the path leaves the folder.

    A snapshot in a Hugging Face cache holds links to blobs/ beside snapshots/, so that folder is allowed, too.
    """
    root = folder.resolve()
    allowed = [root]
    if root.parent.name == "snapshots":
        allowed.append((root.parent.parent / "blobs").resolve())
    try:
        path = (root / relative).resolve()
    except (OSError, RuntimeError):  # a circle of links, before Python 3.13
        raise ModelError(f"{str(relative)!r} in {folder} is a link that leads nowhere.") from None
    if not any(path.is_relative_to(place) for place in allowed):
        raise ModelError(
            f"{str(relative)!r} in {folder} is a link that leaves the model's folder: put the file itself there."
        )
    return path


def check_links(folder: Path) -> None:
    """Raise ModelError if a file with one of READ_SUFFIXES in this folder is a link out of the folder."""
    for path in sorted(folder.glob("*")):  # a repository of the hub may have none of the files
        if path.suffix in READ_SUFFIXES and path.is_symlink():
            path_inside(folder, path.name)
