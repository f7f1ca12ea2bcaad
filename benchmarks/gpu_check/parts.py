"""The parts of the check: what each needs, how long it may take, and what it is given. No torch here."""

import importlib
import importlib.util
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from benchmarks.gpu_check.record import Recorder

ENGINE_PACKAGES = ("torch", "numpy", "msgspec", "safetensors", "tokenizers", "jinja2", "yaml", "tqdm")


@dataclass(frozen=True, slots=True)
class Setting:
    """The settings of a part. The part "limits" writes limits.json to the folder."""

    tiny: bool
    folder: Path  # for models and records, shared by all parts of a run
    until: float = 0.0  # on time.monotonic's clock, which all processes share: when the part's process is ended

    @property
    def seconds(self) -> float:
        """What is left."""
        return max(0.0, self.until - time.monotonic())

    @property
    def patience(self) -> float:
        """By how much time limits are longer: a busy CPU may pause a toy run, a GPU that is paid for may not hang."""
        return 10.0 if self.tiny else 1.0

    def record_path(self, part: str) -> Path:
        return self.folder / f"{part}.jsonl"


@dataclass(frozen=True, slots=True)
class Part:
    """`seconds` are set aside for it; what earlier parts did not use is added. `packages` are import names.

    at_most: what it may take at the cost of the parts behind it, where they are of no use without it. on_request: only
    where it is named.
    """

    name: str
    module: str
    seconds: float
    packages: tuple[str, ...]
    title: str
    at_most: float = 0.0
    on_request: bool = False

    def missing(self, tiny: bool = False) -> list[str]:
        """The packages that this Python does not have. A CPU needs no Triton."""
        wanted = [name for name in self.packages if not (tiny and name == "triton")]
        return [name for name in wanted if importlib.util.find_spec(name) is None]

    def run(self, recorder: Recorder, setting: Setting) -> None:
        importlib.import_module(f"benchmarks.gpu_check.{self.module}").run(recorder, setting)


PARTS = (
    # the first to read torch's libraries from the disk: on a machine that has just started that takes a minute
    Part("limits", "limits", 30, ("torch", "numpy"), "Limits of the card", at_most=150),
    Part("tests", "tests", 120, ("torch", "triton", "transformers", "pytest"), "Tests on the device"),
    Part("kernels", "kernels", 110, ("torch", "triton", "numpy"), "Kernels"),
    Part("steps", "steps", 110, (*ENGINE_PACKAGES, "triton"), "Steps of the model runner"),
    Part("serving", "serving", 80, (*ENGINE_PACKAGES, "triton"), "Engine"),
    Part("peers", "transformers_peer", 85, ("torch", "transformers"), "transformers on the same prompts"),
    Part("http", "http", 35, (*ENGINE_PACKAGES, "triton", "fastapi", "uvicorn", "sse_starlette", "httptools",
                              "pydantic", "httpx", "prometheus_client"), "Server over HTTP"),
    Part("tiles", "tiles", 300, ("torch", "triton", "numpy"), "Other tiles of attention", on_request=True),
)  # fmt: skip
NAMES = tuple(part.name for part in PARTS)
DEFAULT = tuple(part.name for part in PARTS if not part.on_request)


def select(names: Iterable[str]) -> list[Part]:
    """The named parts in their order, the limits always first; ValueError for a name that is none."""
    wanted = set(names)
    if unknown := wanted - set(NAMES):
        raise ValueError(f"there is no part {', '.join(sorted(unknown))}; there are {', '.join(NAMES)}")
    return [part for part in PARTS if part.name in wanted or part.name == "limits"]
