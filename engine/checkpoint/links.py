"""Which files a checkpoint may have opened: those in its folder. Somebody else may have made it.

A link in it could lead to any file of this machine, whose text would then be a chat template, say, and come back to
whoever asks for its tokens.
"""

from pathlib import Path

from engine.errors import ModelError

READ_SUFFIXES = (".json", ".jinja", ".model", ".txt", ".safetensors")


def path_inside(folder: Path, relative: str | Path) -> Path:
    """The real path of a file in a checkpoint, whether it exists or not; ModelError where it leaves the folder.

    A snapshot in a Hugging Face cache holds links to blobs/ beside snapshots/; that folder is allowed, too.
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
    """ModelError where a file that may be read from this folder is a link out of it."""
    for path in sorted(folder.glob("*")):  # a repository of the hub may have none of the files
        if path.suffix in READ_SUFFIXES and path.is_symlink():
            path_inside(folder, path.name)
