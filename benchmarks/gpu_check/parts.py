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
    patience: float = 1.0  # by how much time limits of cases are longer

    @property
    def seconds(self) -> float:
        """The time until the part's process is ended."""
        return max(0.0, self.until - time.monotonic())

    def record_path(self, part: str) -> Path:
        return self.folder / f"{part}.jsonl"


@dataclass(frozen=True, slots=True)
class Part:
    """`seconds` are set aside for it; what earlier parts did not use is added. `packages` are import names.

    Its measurements are the function `entry` of `module`. at_most: what it may take at the cost of the parts behind it,
    where they are of no use without it. on_request: only where it is named.
    """

    name: str
    module: str
    seconds: float
    packages: tuple[str, ...]
    title: str
    entry: str = "run"
    at_most: float = 0.0
    on_request: bool = False

    def missing(self, tiny: bool = False) -> list[str]:
        """The packages that this Python does not have. A CPU needs no Triton."""
        wanted = [name for name in self.packages if not (tiny and name == "triton")]
        return [name for name in wanted if importlib.util.find_spec(name) is None]

    def run(self, recorder: Recorder, setting: Setting) -> None:
        getattr(importlib.import_module(f"benchmarks.gpu_check.{self.module}"), self.entry)(recorder, setting)


KERNEL_PACKAGES = ("torch", "triton", "numpy")
# By value: the figures with goals first, so that whatever overruns its time takes it from parts that can wait.
PARTS = (
    # the first to read torch's libraries from the disk: on a machine that has just started that takes a minute
    Part("limits", "limits", 20, ("torch", "numpy"), "Limits of the card", at_most=150),
    Part("decode", "steps", 100, (*ENGINE_PACKAGES, "triton"), "Decode steps", entry="run_decode"),
    Part("prefill", "steps", 60, (*ENGINE_PACKAGES, "triton"), "Prefill and mixed steps", entry="run_prefill"),
    Part("serving", "serving", 70, (*ENGINE_PACKAGES, "triton"), "Engine"),
    Part("users", "users", 40, (*ENGINE_PACKAGES, "triton"), "100 users on a 7B"),
    Part("peers", "transformers_peer", 50, ("torch", "transformers"), "transformers on the same prompts"),
    Part("attention", "kernels", 40, KERNEL_PACKAGES, "Attention kernels", entry="run_attention"),
    Part("graphs", "graphs", 35, (*ENGINE_PACKAGES, "triton"), "Start-up, graphs against eager steps"),
    Part("linears", "linears", 30, KERNEL_PACKAGES, "Linear layers"),
    Part("tests", "tests", 45, ("torch", "triton", "transformers", "pytest"), "Tests on the device"),
    Part("kernels", "kernels", 30, KERNEL_PACKAGES, "Other kernels"),
    Part("http", "http", 25, (*ENGINE_PACKAGES, "triton", "fastapi", "uvicorn", "sse_starlette", "httptools",
                              "pydantic", "httpx", "prometheus_client"), "Server over HTTP"),
    Part("drafts", "drafts", 25, (*ENGINE_PACKAGES, "triton"), "A draft model"),
    Part("codes", "codes", 60, (*ENGINE_PACKAGES, "triton"), "Weights in 4 and 8 bits", on_request=True),
    Part("features", "tests", 150, (*ENGINE_PACKAGES, "triton", "transformers", "pytest", "llguidance", "jsonschema"),
         "Features of the engine on the device", entry="run_features", on_request=True),
    Part("peer_kernels", "kernels", 120, KERNEL_PACKAGES, "Experts, torch's own attention, swaps",
         entry="run_peers", on_request=True),
    Part("tiles", "tiles", 300, KERNEL_PACKAGES, "Other tiles of attention", on_request=True),
    Part("ncu", "tools", 240, KERNEL_PACKAGES, "Counters of kernels, by ncu", entry="run_ncu", on_request=True),
    Part("sanitizer", "tools", 300, KERNEL_PACKAGES, "Memory errors, by compute-sanitizer", entry="run_sanitizer",
         on_request=True),
)  # fmt: skip
NAMES = tuple(part.name for part in PARTS)
DEFAULT = tuple(part.name for part in PARTS if not part.on_request)


def select(names: Iterable[str]) -> list[Part]:
    """The named parts in their order, the limits always first; ValueError for a name that is none."""
    wanted = set(names)
    if unknown := wanted - set(NAMES):
        raise ValueError(f"there is no part {', '.join(sorted(unknown))}; there are {', '.join(NAMES)}")
    return [part for part in PARTS if part.name in wanted or part.name == "limits"]
