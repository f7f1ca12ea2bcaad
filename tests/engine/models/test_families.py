"""Every family against its oracle: logits in fp32 through the paged cache, and greedy text. `make families` shows the
same checks as a table."""

import ast
import re
from math import prod
from pathlib import Path
from statistics import median

import pytest
import torch
from transformers import PreTrainedModel

from engine.models.decoder import Decoder
from engine.models.families import FAMILIES, model_config, read_model_config
from engine.models.loading.load import load_model
from engine.models.loading.pieces import checkpoint_pieces
from tests.engine.models import tiny_encoders
from tests.engine.models.family_checks import (
    CHECKS,
    TOLERANCE,
    check_logits,
    load,
    main_cases,
    make_prompts,
)
from tests.engine.models.paged import PagedRunner, Sequence
from tests.engine.models.tiny_classic import PUBLISHED
from tests.engine.models.tiny_models import ALL_CASES, OTHER_LAYOUTS, num_text_parameters, oracle_logits, save_model

ROOT = Path(__file__).parents[3]
MAIN = sorted(main_cases().values())
VARIANTS = [name for name in ALL_CASES if name not in MAIN]
MAX_MEDIAN_LINES = 45
# family.py finds a family, families/ holds their names, and families/__init__.py looks up the one of a ModelConfig.
NAMES = {family.model_type for family in FAMILIES} | {name for family in FAMILIES for name in family.architectures}
NAME_FIELDS = {"family", "model_type", "architectures"}
LOOKUPS = ("engine/models/family.py", "engine/models/families/__init__.py")


@pytest.fixture(scope="module", params=MAIN)
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[PreTrainedModel, Decoder]:
    """The oracle, and our model loaded from what the oracle saved."""
    folder = tmp_path_factory.mktemp(request.param)
    oracle = save_model(request.param, folder)
    return oracle, load(folder)


@pytest.mark.parametrize("check", CHECKS)
def test_family(pair: tuple[PreTrainedModel, Decoder], check: str) -> None:
    CHECKS[check](*pair)


@pytest.mark.parametrize("name", VARIANTS)
def test_logits_and_size_of_a_variant(name: str, tmp_path: Path) -> None:
    oracle, model = save_model(name, tmp_path), load(tmp_path)
    check_logits(oracle, model)
    assert model.config.num_parameters() == num_text_parameters(oracle)


def test_num_parameters(pair: tuple[PreTrainedModel, Decoder]) -> None:
    oracle, model = pair
    count = num_text_parameters(oracle)
    assert model.config.num_parameters() == count
    shapes = model.config.parameter_shapes()
    wide = sum(prod(shapes[name]) for name in model.config.float32_parameters())
    assert model.config.weight_bytes(2) == 2 * count + 2 * wide


def test_only_the_wanted_rows_of_the_last_layer_are_computed(pair: tuple[PreTrainedModel, Decoder]) -> None:
    """The same logits as with all rows, here and in the step after, which reads all keys and values."""
    _, model = pair
    prompts = [list(range(1, 14)), [5], [7, 3, 9]]
    whole, pruned = PagedRunner(model), PagedRunner(model)
    sequences = [[Sequence(list(p)) for p in prompts] for _ in range(2)]
    for counts in ([9, 1, 3], [4, 0, 0]):
        every, last = (
            runner.step([(s, n) for s, n in zip(own, counts, strict=True) if n], last_only=runner is pruned)
            for runner, own in zip((whole, pruned), sequences, strict=True)
        )
        for rows, row in zip(every, last, strict=True):
            torch.testing.assert_close(rows[-1:], row, rtol=1e-5, atol=1e-5)


def test_longrope_past_the_trained_length(tmp_path: Path) -> None:
    """A max_model_len above the trained length, 128 here, rotates all tokens with the long factors, as does
    transformers in a text of more than that length."""
    oracle = save_model("phi3_longrope", tmp_path)
    config = read_model_config(tmp_path)
    assert config.max_position_embeddings == 128
    options = {"dtype": torch.float32, "device": torch.device("cpu"), "load_format": "auto", "seed": 0}
    long, short = (load_model(tmp_path, config, **options, max_model_len=n) for n in (300, 128))
    (prompt,) = make_prompts(200)
    expected = oracle_logits(oracle, prompt)
    for prompt_part in (prompt[:131], prompt):
        sequence = Sequence(prompt_part)
        (logits,) = PagedRunner(long).step([(sequence, len(prompt_part))])
        torch.testing.assert_close(logits, expected[: len(prompt_part)], **TOLERANCE)
    (unlike,) = PagedRunner(short).step([(Sequence(prompt[:128]), 128)])
    assert not torch.allclose(unlike, expected[:128], atol=1e-2)
    torch.testing.assert_close(unlike, oracle_logits(oracle, prompt[:128]), **TOLERANCE)
    assert long.positions.cos_sin is not None and len(long.positions.cos_sin) == 300


def test_every_family_has_a_case() -> None:
    encoders = {
        model_config({**case().to_dict(), "architectures": None}).family for case in tiny_encoders.CASES.values()
    }
    assert {family.model_type for family in FAMILIES} == set(main_cases()) | encoders | OTHER_LAYOUTS


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_checkpoints_fit(name: str) -> None:
    """Every tensor of a published index has a place, of its shape; none is missing."""
    raw, index = PUBLISHED[name]
    config = model_config(raw)
    family = next(family for family in FAMILIES if family.model_type == config.family)
    shapes = {name: piece.shape for name, piece in checkpoint_pieces(config, family).items()}
    first = {name: shape for name, shape in shapes.items() if ".0." in name or not re.search(r"\.\d+\.", name)}
    assert first == index


def test_a_family_file_is_short() -> None:
    files = [path for path in (ROOT / "engine/models/families").glob("*.py") if path.name != "__init__.py"]
    assert median(len(path.read_text().splitlines()) for path in files) <= MAX_MEDIAN_LINES


def test_no_code_asks_for_the_name_of_a_model() -> None:
    """Behaviour comes from fields of ModelConfig. Names of architectures and model types stand in family files."""
    files = [path for folder in ("engine", "kernels", "server") for path in (ROOT / folder).rglob("*.py")]
    found = [
        f"{path.relative_to(ROOT)}:{node.lineno}"
        for path in files
        if str(path.relative_to(ROOT)) not in LOOKUPS
        for node in ast.walk(ast.parse(path.read_text()))
        if _asks_for_a_name(node)
    ]
    assert not found


def _asks_for_a_name(node: ast.AST) -> bool:
    """True for a comparison, a match or a call of startswith or endswith that has the name of a model as an operand."""
    if isinstance(node, ast.Compare):
        return any(map(_is_name_of_a_model, (node.left, *node.comparators)))
    if isinstance(node, ast.Match):
        return _is_name_of_a_model(node.subject)
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
        return node.func.attr in ("startswith", "endswith") and any(
            map(_is_name_of_a_model, (node.func.value, *node.args))
        )
    return False


def _is_name_of_a_model(node: ast.AST) -> bool:
    if isinstance(node, ast.Attribute):
        return node.attr in NAME_FIELDS
    if isinstance(node, ast.Constant):
        return node.value in NAMES
    if isinstance(node, ast.Tuple | ast.List | ast.Set):
        return any(map(_is_name_of_a_model, node.elts))
    # raw["model_type"], raw.get("architectures"), str(config.family)
    values = [node.slice] if isinstance(node, ast.Subscript) else node.args if isinstance(node, ast.Call) else []
    return any(_is_name_of_a_model(v) or (isinstance(v, ast.Constant) and v.value in NAME_FIELDS) for v in values)


@pytest.mark.parametrize(
    "code",
    [
        "config.family == 'llama'",
        "'MptForCausalLM' in names",
        "kind in ('opt', 'gpt2')",
        "raw['model_type'] != kind",
        "raw.get('architectures') == names",
        "config.family.startswith('qwen')",
        "name.startswith(('gemma', 'x'))",
        "match config.family:\n  case _: pass",
    ],
)
def test_such_code_is_found(code: str) -> None:
    assert any(map(_asks_for_a_name, ast.walk(ast.parse(code))))
