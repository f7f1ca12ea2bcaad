"""The raw texts of the corpus, one file per subject. `## ` is a remark, `# ` opens a section, a line is an entry."""

from pathlib import Path


def read_sections(name: str) -> dict[str, tuple[str, ...]]:
    r"""Sections of `name`.txt in file order. `\n` in an entry is a line break; quotes keep the spaces at its ends."""
    found: dict[str, list[str]] = {}
    entries: list[str] = []
    for line in (Path(__file__).parent / f"{name}.txt").read_text(encoding="utf-8").splitlines():
        if line.startswith("# "):
            entries = found.setdefault(line[2:], [])
        elif line and not line.startswith("## "):
            entries.append(_entry(line))
    return {title: tuple(section) for title, section in found.items()}


def _entry(line: str) -> str:
    quoted = len(line) > 1 and line[0] == line[-1] == '"' and '"' not in line[1:-1]
    return (line[1:-1] if quoted else line).replace("\\n", "\n")
