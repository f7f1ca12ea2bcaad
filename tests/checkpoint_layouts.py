"""`make layouts`: loads checkpoints in every layout that transformers 4.57 and 5 write, and compares the logits.

Each release is installed by pip into a folder of its own under .cache/layouts, beside the tests' own release. Prints a
row per checkpoint; exit status 1 if one fails.
"""

import logging
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import torch

from engine.models.families import read_model_config
from engine.models.loading.load import load_model
from tests.engine.models.paged import PagedRunner, Sequence
from tests.layout_writer import PROMPT

ROOT = Path(__file__).parents[1]
RELEASES = ("4.57.*", "5.*")
TOLERANCE = 2e-5


def install(release: str) -> Path:
    """The folder with this release of transformers and its dependencies; torch is the tests' own."""
    folder = ROOT / ".cache" / "layouts" / f"transformers-{release.rstrip('.*')}"
    if not folder.is_dir():
        command = [
            sys.executable,
            "-m",
            "pip",
            "install",
            "--quiet",
            "--target",
            str(folder),
            f"transformers=={release}",
        ]
        subprocess.run(command, check=True)
    return folder


def write(packages: Path, folder: Path) -> str:
    """Write the checkpoints with the release in `packages`; returns its full version."""
    environment = {**os.environ, "PYTHONPATH": f"{packages}:{ROOT}", "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, "-W", "ignore", "-m", "tests.layout_writer", str(folder)]
    subprocess.run(command, check=True, env=environment, stderr=subprocess.PIPE)
    version = [sys.executable, "-c", "import transformers; print(transformers.__version__)"]
    return subprocess.run(version, check=True, env=environment, capture_output=True, text=True).stdout.strip()


def difference(folder: Path) -> float:
    """The largest difference of a logit between the release that wrote the checkpoint and this server."""
    config = read_model_config(folder)
    cpu = torch.device("cpu")
    model = load_model(folder, config, dtype=torch.float32, device=cpu, load_format="auto", seed=0)
    logits = PagedRunner(model).step([(Sequence(PROMPT), len(PROMPT))])[0]
    return float((logits - torch.load(folder / "logits.pt")).abs().max())


def main() -> int:
    logging.disable(logging.WARNING)  # a line for each pickle
    failed = 0
    for release in RELEASES:
        with tempfile.TemporaryDirectory() as temporary:
            version = write(install(release), Path(temporary))
            for folder in sorted(Path(temporary).iterdir()):
                try:
                    error = difference(folder)
                    result = f"{error:.1e}" if error <= TOLERANCE else f"FAILED: {error:.1e}"
                except Exception as refusal:  # a row for each checkpoint, whatever happens
                    result = f"FAILED: {refusal}"
                failed += result.startswith("FAILED")
                print(f"transformers {version:8} {folder.name:28} {result}", flush=True)
    print(f"{failed} failed")
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
