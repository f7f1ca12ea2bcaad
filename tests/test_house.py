"""The rules of the house: who imports whom, how large folders are, and documents that must equal the code."""

import ast
import re
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

from engine.settings import load_settings
from server.commands.config_docs import CONFIG_CLASSES, DOCUMENTS, with_table, yaml_template
from tests.private_names import private_uses
from tests.riddles import READ, files_of, riddles_of

ROOT = Path(__file__).parents[1]
PACKAGES = ("engine", "server", "kernels", "training", "benchmarks")
SOURCES = sorted(path.relative_to(ROOT) for package in PACKAGES for path in (ROOT / package).rglob("*.py"))
HOUSE = [path for path in SOURCES if path.parts[0] in ("engine", "server", "kernels")]
TESTS = sorted(path.relative_to(ROOT) for path in (ROOT / "tests").rglob("*.py"))
DOCUMENTATION = [ROOT / "README.md", ROOT / "CHANGELOG.md", *sorted((ROOT / "docs").glob("*.md"))]
MAX_FUNCTION_LINES = 80
MAX_FILES = 12  # in a folder: a newcomer tells no more of them apart
DATA = ("engine/models/families", "engine/models/bundled")  # a file per family: any number of them
MAX_IMPORTS = 15  # modules of our own that one file imports
MAX_IMPORTS_OF = {"engine/driver.py": 18, "kernels/cpu/quantized/code_linear.py": 16}  # it launches three kernels
MAX_PRIVATE_USES = 60  # by all tests, of names that begin with an underscore
MAX_RIDDLES = 10  # in engine, server, kernels, README.md and docs together
# They list the families, the routes and the kernels.
LISTS = ("engine/models/families/__init__.py", "server/app.py", "kernels/cpu/__init__.py")

# Layers, the topmost first. A module imports modules of its own layer and of those below it.
DRIVER_SIDE = (
    ("engine.llm",),
    ("engine.replicas",),
    ("engine.driver",),
    ("engine.requests",),
    ("engine.telemetry",),
    ("engine.scheduling",),
    ("engine.memory",),
    ("engine.grammars", "engine.text"),
    ("engine.executor",),
    ("engine.checkpoint",),
    ("engine",),  # values: the files directly in engine/
)
WORKER_SIDE = (
    ("engine.worker",),
    ("engine.worker.sampling", "engine.worker.cache"),
    ("engine.worker.batch",),
    ("engine.worker.device",),
    ("engine.models.adapters",),
    ("engine.models.loading",),
    ("engine.models",),
    ("engine.models.layers", "engine.models.families", "engine.models.formats"),
    ("engine.models.parallel",),
    ("engine.models.config", "engine.models.reader", "engine.models.family", "engine.models.weight_format"),
    ("kernels",),
)
SERVER_SIDE = (
    ("server.commands", "server.cli"),
    ("server.serve", "server.app", "server.openapi"),
    ("server.routes",),
    ("server.output",),
    ("server.intake",),
    ("server.tools",),
    ("server.context", "server.http", "server.protocol", "server.playground"),
    ("server.model_settings", "server.room"),
    ("server.config", "server.errors", "server.process"),
)
# Beside models and kernels the Worker imports the step language, the grammar compiler, checkpoint and values.
FOR_WORKER = (
    "engine.executor.step",
    "engine.executor.frames",
    "engine.grammars.compiler",
    "engine.grammars.json_openings",
    "engine.checkpoint",
)
NO_VALUES = ("engine.llm", "engine.driver")


def module_of(path: Path) -> str:
    return str(path.with_suffix("")).replace("/", ".").removesuffix(".__init__")


@cache
def imported_modules(path: Path) -> frozenset[str]:
    """Dotted names that a file imports at any depth, for type checking too.

    `from a.b import c` counts as a.b.c where that is a module.
    """
    names = set()
    for node in ast.walk(ast.parse((ROOT / path).read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: imports are absolute"
            names |= {_module(node.module or "", alias.name) for alias in node.names}
    return frozenset(names)


def _module(package: str, name: str) -> str:
    folder = ROOT / package.replace(".", "/")
    return f"{package}.{name}" if (folder / name).is_dir() or (folder / f"{name}.py").is_file() else package


def within(module: str, *packages: str) -> bool:
    return any(module == package or module.startswith(package + ".") for package in packages)


def ours(path: Path) -> set[str]:
    return {name for name in imported_modules(path) if within(name, *PACKAGES, "tests")} - {module_of(path)}


def of(*parents: str, but: tuple[str, ...] = ()) -> list[Path]:
    return [path for path in SOURCES if within(module_of(path), *parents) and not within(module_of(path), *but)]


def is_file_of(module: str, package: str) -> bool:
    """Whether `module` is a file directly in `package`, or the package itself."""
    return module == package or (
        module.rpartition(".")[0] == package and not (ROOT / module.replace(".", "/")).is_dir()
    )


def layer_of(module: str, layers: tuple[tuple[str, ...], ...]) -> int | None:
    """The layer whose longest name holds `module`; None where none does."""
    names = {name: number for number, layer in enumerate(layers) for name in layer}
    fitting = [name for name in names if within(module, name)]
    return names[max(fitting, key=len)] if fitting else None


def imports_up(path: Path, layers: tuple[tuple[str, ...], ...]) -> set[str]:
    own = layer_of(module_of(path), layers)
    found = {name: layer_of(name, layers) for name in ours(path)}
    return {name for name, layer in found.items() if own is not None and layer is not None and layer < own}


@pytest.mark.parametrize("path", of("server"), ids=str)
def test_the_server_imports_the_engines_public_modules_only(path):
    """Public are the files directly in engine/, and the folders text/ and telemetry/."""
    for name in ours(path):
        assert (
            within(name, "server", "engine.text", "engine.telemetry", "engine.replicas", "engine.models.bundled")
            or is_file_of(name, "engine")
        ), name  # fmt: skip
    assert not {name for name in imported_modules(path) if within(name, "torch", "triton", "transformers")}


@pytest.mark.parametrize("path", of("server"), ids=str)
def test_no_import_of_the_server_points_up(path):
    assert not imports_up(path, SERVER_SIDE)


@pytest.mark.parametrize("path", of("server.routes"), ids=str)
def test_no_route_imports_a_route(path):
    assert not {name for name in ours(path) if within(name, "server.routes")}


@pytest.mark.parametrize("path", of("engine", but=("engine.worker", "engine.models")), ids=str)
def test_the_driver_side_imports_no_worker_no_models_no_torch(path):
    forbidden = ("engine.worker", "engine.models", "kernels", "server", "benchmarks", "torch", "triton", "numba")
    allowed = {"engine.models.bundled"}  # data: where the bundled checkpoint lies
    assert not {name for name in imported_modules(path) if within(name, *forbidden)} - allowed


@pytest.mark.parametrize("path", of("engine", but=("engine.worker", "engine.models")), ids=str)
def test_no_import_of_the_driver_side_points_up(path):
    assert not imports_up(path, DRIVER_SIDE)


@pytest.mark.parametrize("path", of("engine.worker", "engine.models", but=("engine.worker.memory_plan",)), ids=str)
def test_the_worker_imports_models_kernels_and_the_step_language(path):
    """`pageserve plan` is a command of its own, not part of the Worker, and so is excepted."""
    for name in ours(path):
        value = is_file_of(name, "engine") and name not in NO_VALUES
        assert value or within(name, "engine.worker", "engine.models", "kernels", *FOR_WORKER), name


@pytest.mark.parametrize("path", of("engine.worker", "engine.models", "kernels"), ids=str)
def test_no_import_of_the_worker_points_up(path):
    assert not imports_up(path, WORKER_SIDE)


def test_no_circle_of_imports():
    """An import under TYPE_CHECKING counts like any other; one of a package stands for its __init__.py."""
    graph = {module_of(path): ours(path) for path in HOUSE}
    free = dict.fromkeys(graph, False)  # known to lead into no circle
    for start in graph:
        trail: list[str] = []
        _walk(start, graph, trail, free)


def _walk(module: str, graph: dict[str, set[str]], trail: list[str], free: dict[str, bool]) -> None:
    assert module not in trail, " -> ".join([*trail[trail.index(module) :], module])
    if not free[module]:
        trail.append(module)
        for name in graph[module] & graph.keys():
            _walk(name, graph, trail, free)
        trail.pop()
        free[module] = True


@pytest.mark.parametrize("path", HOUSE, ids=str)
def test_no_file_imports_too_many_of_ours(path):
    if str(path) not in LISTS:
        assert len(ours(path)) <= MAX_IMPORTS_OF.get(str(path), MAX_IMPORTS), sorted(ours(path))


@pytest.mark.parametrize("folder", sorted({path.parent for path in HOUSE}), ids=str)
def test_a_folder_is_small_and_says_what_is_decided_there(folder):
    files = [path for path in HOUSE if path.parent == folder and path.name != "__init__.py"]
    assert len(files) <= MAX_FILES or str(folder) in DATA
    assert ast.get_docstring(ast.parse((ROOT / folder / "__init__.py").read_text(encoding="utf-8")))


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


@pytest.mark.parametrize("path", TESTS, ids=str)
def test_no_test_imports_a_test(path):
    """Tests share their helpers through modules that hold no tests."""
    assert not {name for name in imported_modules(path) if name.rpartition(".")[2].startswith("test_")}


def test_few_private_names_are_used_by_tests():
    """Tests look at public behaviour; `python -m tests.private_names` lists the exceptions."""
    uses = [use for path in TESTS for use in private_uses(ROOT / path)]
    assert len(uses) < MAX_PRIVATE_USES, f"{len(uses)} uses, of {len({use.name for use in uses})} names"


def test_default_yaml_equals_the_declarations():
    assert (ROOT / "configs/default.yaml").read_text(encoding="utf-8") == yaml_template(), "run `make docs`"


@pytest.mark.parametrize("name", DOCUMENTS)
def test_tables_equal_the_declarations(name):
    path = ROOT / name
    assert path.read_text(encoding="utf-8") == with_table(path, DOCUMENTS[name]()), "run `make docs`"


@pytest.mark.parametrize("path", sorted((ROOT / "configs").glob("*.yaml")), ids=lambda path: path.name)
def test_every_config_file_loads(path):
    load_settings(CONFIG_CLASSES, {"config": str(path)}, {})


def test_the_architecture_names_every_folder():
    """docs/architecture.md writes a folder as `engine/memory/`: each one that exists, and no other."""
    text = (ROOT / "docs/architecture.md").read_text(encoding="utf-8")
    packages = ("engine", "server", "kernels")
    folders = [folder for package in packages for folder in (ROOT / package, *(ROOT / package).rglob("*/"))]
    existing = {f"{folder.relative_to(ROOT)}/" for folder in folders if _has_files(folder)}
    assert set(re.findall(r"`((?:engine|server|kernels)/(?:\w+/)*)`", text)) == existing


def _has_files(folder: Path) -> bool:
    return "__pycache__" not in folder.parts and folder.is_dir() and any(path.is_file() for path in folder.iterdir())


def anchors(path: Path) -> set[str]:
    """The anchors that GitHub makes of a document's headings."""
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


def test_the_prose_is_plain():
    """tests/riddles.py finds sentences that open with a clause in place of a subject, also in help texts and errors."""
    found = [riddle for path in files_of(list(READ)) for riddle in riddles_of(path)]
    assert len(found) < MAX_RIDDLES, "\n".join(f"{riddle.path}:{riddle.line}: {riddle.sentence}" for riddle in found)


def test_make_test_runs_the_linter_and_the_type_checker():
    commands = subprocess.run(
        ["make", "--dry-run", "test"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout
    assert (
        "ruff check" in commands and "ruff format --check" in commands and "mypy" in commands and "pytest" in commands
    )
