"""The card seen from outside any CUDA context: its name, and how much of its memory is in use. No torch here."""

import importlib.util
import os
import shutil
import subprocess
from typing import Any

FIELDS = ("name", "driver_version", "memory.used", "memory.total", "clocks.sm", "clocks.mem", "power.draw",
          "temperature.gpu")  # fmt: skip
NVIDIA_SMI_SECONDS = 20.0  # a driver that nobody has used before takes some to wake


def card_facts() -> dict[str, Any]:
    """The facts that nvidia-smi reports for CUDA's card 0; empty without a card or without nvidia-smi's answer."""
    command = ["nvidia-smi", f"--id={_index()}", f"--query-gpu={','.join(FIELDS)}", "--format=csv,noheader,nounits"]
    if shutil.which(command[0]) is None:
        return {}
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=NVIDIA_SMI_SECONDS)
    except (OSError, subprocess.TimeoutExpired):
        return {}
    values = [value.strip() for value in done.stdout.strip().split(",")]
    return dict(zip(FIELDS, values, strict=True)) if len(values) == len(FIELDS) else {}


def memory_in_use() -> tuple[int, int] | None:
    """(bytes in use by all processes, bytes in all) of the card; None where nothing says."""
    if importlib.util.find_spec("pynvml") is not None:
        used_total = _nvml()
        if used_total is not None:
            return used_total
    facts = card_facts()
    try:
        return int(facts["memory.used"]) << 20, int(facts["memory.total"]) << 20
    except (KeyError, ValueError):
        return None


def _nvml() -> tuple[int, int] | None:
    import pynvml

    try:
        pynvml.nvmlInit()
        try:
            memory = pynvml.nvmlDeviceGetMemoryInfo(_handle(pynvml))
            return int(memory.used), int(memory.total)
        finally:
            pynvml.nvmlShutdown()
    except pynvml.NVMLError:
        return None


def _handle(pynvml: Any) -> Any:
    index = _index()
    if index.isdigit():
        return pynvml.nvmlDeviceGetHandleByIndex(int(index))
    return pynvml.nvmlDeviceGetHandleByUUID(index)


def _index() -> str:
    """The first of CUDA_VISIBLE_DEVICES, a number or a UUID."""
    return os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")[0].strip() or "0"
