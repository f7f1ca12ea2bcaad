"""The rules of the house: who imports whom, how long functions are, and documents that must equal the code."""

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

from engine.settings import load_settings
from server.commands.config_docs import CONFIG_CLASSES, DOCUMENTS, with_table, yaml_template

ROOT = Path(__file__).parents[1]
PACKAGES = ("engine", "server", "kernels", "training", "benchmarks")
SOURCES = sorted(path.relative_to(ROOT) for package in PACKAGES for path in (ROOT / package).rglob("*.py"))
DOCUMENTATION = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
MAX_FUNCTION_LINES = 80

ENGINE_PUBLIC = (
    "driver beam_search command_line config settings request request_log sampling_params pooling outputs "
    "errors stats text tokenizer text_threads chat_template llm executor checkpoint structured_output bad_words "
    "fill_in_middle thinking sampling_defaults"
)
FOR_SERVER = tuple(f"engine.{name}" for name in ENGINE_PUBLIC.split())
WORKER_PUBLIC = "step config settings sampling_params pooling structured_output grammar errors json_files thinking"
FOR_WORKER = tuple(f"engine.{name}" for name in WORKER_PUBLIC.split())
# `pageserve plan` is a command of its own, not part of the Worker.
FOR_PLAN = ("engine.checkpoint.locate", "engine.command_line")


def imported_modules(path: Path) -> set[str]:
    """Dotted names that a file imports at any depth; `from a.b import c` counts as a.b.c where that is a module."""
    names = set()
    for node in ast.walk(ast.parse((ROOT / path).read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: imports are absolute"
            names |= {_module(node.module or "", alias.name) for alias in node.names}
    return names


def _module(package: str, name: str) -> str:
    folder = ROOT / package.replace(".", "/")
    return f"{package}.{name}" if (folder / name).is_dir() or (folder / f"{name}.py").is_file() else package


def within(module: str, *packages: str) -> bool:
    return any(module == package or module.startswith(package + ".") for package in packages)


def ours(path: Path) -> set[str]:
    return {name for name in imported_modules(path) if within(name, *PACKAGES, "tests")}


def of(*parents: str, but: tuple[str, ...] = ()) -> list[Path]:
    return [
        path
        for path in SOURCES
        if within(str(path).removesuffix(".py").replace("/", "."), *parents)
        and not within(str(path).removesuffix(".py").replace("/", "."), *but)
    ]


@pytest.mark.parametrize("path", of("server"), ids=str)
def test_the_server_imports_the_engines_public_modules_only(path):
    wrong = {name for name in ours(path) if not within(name, "server", *FOR_SERVER)}
    assert not wrong - {"engine"}, f"{path} may import server and {FOR_SERVER} only"
    assert not {name for name in imported_modules(path) if within(name, "torch", "triton", "transformers")}


@pytest.mark.parametrize("path", of("engine", but=("engine.worker", "engine.models")), ids=str)
def test_the_driver_side_imports_no_worker_no_models_no_torch(path):
    forbidden = ("engine.worker", "engine.models", "kernels", "server", "benchmarks", "torch", "triton", "numba")
    allowed = {"engine.models.bundled"}  # data: where the bundled checkpoint lies
    assert not {name for name in imported_modules(path) if within(name, *forbidden)} - allowed


@pytest.mark.parametrize("path", of("engine.worker"), ids=str)
def test_the_worker_imports_models_kernels_and_the_step_language(path):
    allowed = ("engine.worker", "engine.models", "kernels", *FOR_WORKER, *(FOR_PLAN if path.stem == "plan" else ()))
    assert not {name for name in ours(path) if not within(name, *allowed)}


@pytest.mark.parametrize("path", of("engine.models"), ids=str)
def test_models_import_kernels_and_what_reads_a_checkpoint(path):
    allowed = ("engine.models", "kernels", "engine.errors", "engine.checkpoint.json_files", "engine.checkpoint.links")
    assert not {name for name in ours(path) if not within(name, *allowed)}


@pytest.mark.parametrize("path", of("kernels"), ids=str)
def test_kernels_import_array_libraries_only(path):
    outside = {name.partition(".")[0] for name in imported_modules(path)} - set(sys.stdlib_module_names)
    assert outside <= {"kernels", "torch", "triton", "numba", "numpy", "llvmlite"}


@pytest.mark.parametrize("module", ["engine.driver", "engine.llm", "server.app", "server.cli"])
def test_no_torch_comes_in_by_a_side_door(module):
    script = f"import {module}, sys; assert not {{'torch', 'triton', 'transformers', 'numba'}} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", script], cwd=ROOT, check=True)


@pytest.mark.parametrize("path", SOURCES, ids=str)
def test_functions_are_short(path):
    for node in ast.walk(ast.parse((ROOT / path).read_text(encoding="utf-8"))):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            assert (node.end_lineno or 0) - node.lineno < MAX_FUNCTION_LINES, f"{path}: {node.name} is too long"


def test_default_yaml_equals_the_declarations():
    assert (ROOT / "configs/default.yaml").read_text(encoding="utf-8") == yaml_template(), "run `make docs`"


@pytest.mark.parametrize("name", DOCUMENTS)
def test_tables_equal_the_declarations(name):
    path = ROOT / name
    assert path.read_text(encoding="utf-8") == with_table(path, DOCUMENTS[name]()), "run `make docs`"


@pytest.mark.parametrize("path", sorted((ROOT / "configs").glob("*.yaml")), ids=lambda path: path.name)
def test_every_config_file_loads(path):
    load_settings(CONFIG_CLASSES, {"config": str(path)}, {})


def files_named(tree: str, package: str) -> set[str]:
    """What a drawing of the tree, two spaces a level, names below a package and not below one of its packages."""
    lines = iter(tree.splitlines())
    found, depth = set[str](), 2 * package.count("/")
    inside = skipped = False
    for line in lines:
        indent = len(line) - len(line.lstrip())
        if indent <= depth:
            inside = line.strip().startswith(f"{Path(package).name}/")
        elif indent == depth + 2:
            skipped = bool(re.match(r" *\w+/ ", line))
        if inside and not skipped:
            found |= set(re.findall(r"\w+\.py", line))
    return found


@pytest.mark.parametrize("package", ["server", "engine", "engine/worker", "engine/models", "kernels", "kernels/cpu"])
def test_the_architecture_names_every_file(package):
    tree = (ROOT / "docs/architecture.md").read_text(encoding="utf-8").split("```")[1]
    there = {path.name for path in (ROOT / package).glob("*.py")} - {"__init__.py"}
    nested = {path.name for path in (ROOT / package).rglob("*.py")}
    named = files_named(tree, package)
    assert not there - named, f"not in docs/architecture.md under {package}/"
    assert not named - nested, f"in docs/architecture.md, but not under {package}/"


def anchors(path: Path) -> set[str]:
    """What GitHub makes of a document's headings."""
    headings = re.findall(r"^#+ (.+)$", path.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w-]", "", heading.lower().replace(" ", "-")) for heading in headings}


@pytest.mark.parametrize("path", DOCUMENTATION, ids=lambda path: path.name)
def test_documents_name_only_what_exists(path):
    """Every path and make target in a document's code is there, and what its links lead to."""
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    text = path.read_text(encoding="utf-8")
    for target in {word.split("make ", 1)[1].split()[0] for word in text.split("`") if word.startswith("make ")}:
        assert f"\n{target}:" in makefile, f"make {target}"
    for link in re.findall(r"\]\(([^)\s]+)\)", text.replace("\n", "")):
        if not link.startswith("https://"):
            name, _, anchor = link.partition("#")
            linked = path.parent / name if name else path
            assert linked.exists(), link
            assert not anchor or anchor in anchors(linked), link
    for word in text.split("`"):
        if (
            "/" in word
            and word.split("/")[0] in (*PACKAGES, "configs", "deploy", "tests")
            and not set(word) & set(" *<{\n")
        ):
            assert (ROOT / word.rstrip("/")).exists(), word


def test_make_test_runs_the_linter_and_the_type_checker():
    commands = subprocess.run(
        ["make", "--dry-run", "test"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout
    assert (
        "ruff check" in commands and "ruff format --check" in commands and "mypy" in commands and "pytest" in commands
    )
