"""Loads the checkpoints that benchmarks/formats/libraries.py wrote: make formats-libraries.

    python -m benchmarks.formats.check_libraries FOLDER

Prints for each the largest error of a weight, as a share of the largest weight, and of a logit, against the matrices
as the library dequantises them. The exit status is 1 if a logit is off by more than 1e-3.
"""

import json
import sys
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from benchmarks.formats.table import paged
from engine.models.families import read_model_config
from engine.models.loading.load import load_model

MOST_ERROR = 1e-3
PROMPT = [5, 17, 3, 88, 41, 9, 60, 2, 2, 31]


def logits(folder: Path) -> Tensor:
    """fp32 [len(PROMPT), vocab]"""
    config = read_model_config(folder)
    decoder = load_model(folder, config, dtype=torch.float32, device=torch.device("cpu"), load_format="auto", seed=0)
    with torch.inference_mode():
        return paged(decoder).logits(PROMPT)


def main() -> None:
    folder, failed = Path(sys.argv[1]), False
    for path in sorted(entry for entry in folder.iterdir() if (entry / "meant.safetensors").is_file()):
        plain = load_file(folder / "plain" / "model.safetensors")
        meant = load_file(path / "meant.safetensors")
        assert meant.keys() < plain.keys() and all(meant[name].shape == plain[name].shape for name in meant)
        (path / "meant").mkdir(exist_ok=True)
        save_file(plain | meant, path / "meant" / "model.safetensors", metadata={"format": "pt"})
        config = json.loads((path / "config.json").read_text())
        del config["quantization_config"]
        (path / "meant" / "config.json").write_text(json.dumps(config))
        (path / "meant.safetensors").rename(path / "meant" / "matrices")
        error = float((logits(path) - logits(path / "meant")).abs().max())
        failed |= not error <= MOST_ERROR
        print(f"{path.name:<28}{len(meant):>4} matrices   logit error {error:.1e}", flush=True)
    sys.exit("a logit error is above 1e-3" if failed else None)


if __name__ == "__main__":
    main()
