"""Files that travel between this checkout and a machine that starts bare: results, and Triton's cache. No torch here.

The variable OUT names a folder whose files come back from such a machine. Results, log and the cache's archive go there
where it is set. The archive is unpacked from .gpu-cache/, which git ignores and the call carries.
"""

import json
import os
import tarfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
CARRIED = ROOT / ".gpu-cache"
ARCHIVE = "triton-cache.tar.gz"
# Triton stores absolute paths, so the cache is of use only where it lay: the same place on every machine.
CACHE = Path("/tmp/pageserve-triton-cache")
MAX_BYTES = 15 << 20  # size of the archive; a file of more than 16 MiB may not come back
SOURCES = (".ttir", ".ttgir", ".llir", ".ptx", ".source")  # stages of compilation; the cubin suffices to run a kernel


def out_folder() -> Path | None:
    """The folder whose files come back; None where there is none."""
    out = os.environ.get("OUT")
    return Path(out) if out else None


def cache_folder() -> Path:
    """Triton's cache: TRITON_CACHE_DIR where it is set."""
    return Path(os.environ.get("TRITON_CACHE_DIR") or CACHE)


def restore_cache(archive: Path, folder: Path) -> int:
    """Unpack an archive of save_cache; files that are there stay. The number of files; 0 for none or a damaged one."""
    if not archive.is_file():
        return 0
    count = 0
    try:
        with tarfile.open(archive) as packed:
            for member in packed:
                if member.isfile() and not (folder / member.name).exists():
                    packed.extract(member, folder, filter="data")
                    count += 1
    except (OSError, tarfile.TarError, EOFError) as error:
        print(f"gpu-check: {archive} could not be unpacked: {error}", flush=True)
    return count


def save_cache(folder: Path, archive: Path, max_bytes: int = MAX_BYTES) -> int:
    """Pack the cache without sources; the number of files. The largest files stay behind where it exceeds max_bytes."""
    files = sorted((path for path in folder.rglob("*") if path.is_file() and path.suffix not in SOURCES),
                   key=lambda path: path.stat().st_size)  # fmt: skip
    part = archive.with_suffix(".part")
    while files:
        archive.parent.mkdir(parents=True, exist_ok=True)
        with tarfile.open(part, "w:gz", compresslevel=6) as packed:
            for path in files:
                packed.add(path, path.relative_to(folder))
        if part.stat().st_size <= max_bytes:
            part.replace(archive)
            break
        files = files[: len(files) * 3 // 4]
    part.unlink(missing_ok=True)
    return len(files)


def earlier_result(where: Path, card: str, tiny: bool) -> tuple[Path, dict[str, Any]]:
    """The result that a call goes on from: the file, or in a folder the newest one of this card. ValueError where there
    is none, or the file is of another card."""
    paths = sorted(where.glob("*-gpu-check-*.json"), key=lambda path: path.stat().st_mtime, reverse=True)
    for path in paths if where.is_dir() else [where]:
        try:
            document: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
            theirs, kind = document["card"].get("name", ""), document["tiny"]
        except (OSError, ValueError, KeyError) as error:
            if not where.is_dir():
                raise ValueError(f"{path} is no result of gpu-check: {error}") from None
            continue
        if (theirs, kind) == (card, tiny):
            return path, document
        if not where.is_dir():
            raise ValueError(f"{path} is of {theirs or 'no card'}, this is {card or 'no card'}: begin anew")
    raise ValueError(f"{where} holds no result of {card or 'no card'}")
