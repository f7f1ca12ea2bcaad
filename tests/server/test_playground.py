"""The files of the page at /: what is served of them, with which headers, and that they need nothing from elsewhere."""

import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from server.playground import PAGE
from tests.server.live import LiveServer, assert_error

ROOT = Path(__file__).parents[2]
FILES = ROOT / "server/page"


def test_the_page_and_its_files_are_served_with_a_strict_policy(client):
    assert {"/", "/page/main.js", "/page/style.css", "/page/icon.svg"} <= set(PAGE)
    for path, file in PAGE.items():
        response = client.get(path)
        assert response.status_code == 200 and response.content == file.content
        assert response.headers["content-type"] == file.media_type
        policy = response.headers["content-security-policy"].split("; ")
        assert policy[:3] == ["default-src 'none'", "script-src 'self'", "style-src 'self'"]
        assert "frame-ancestors 'none'" in policy and "unsafe" not in " ".join(policy)
        assert response.headers["x-content-type-options"] == "nosniff"
        assert client.head(path).headers["content-length"] == str(len(file.content))


def test_a_file_that_the_browser_has_is_not_sent_again(client):
    etag = client.get("/").headers["etag"]
    again = client.get("/", headers={"if-none-match": f'"other", {etag}'})
    assert (again.status_code, again.content, again.headers["etag"]) == (304, b"", etag)
    assert client.get("/", headers={"if-none-match": '"other"'}).status_code == 200


@pytest.mark.parametrize(
    "path", ["/page/", "/page", "/page/index.html", "/page/../app.py", "/page/%2e%2e/app.py", "/page/nothing.js"]
)
def test_there_are_no_other_files(client, path):
    assert_error(client.get(path), 404)


def test_it_needs_no_key_and_opens_nothing_else(folder):
    with LiveServer(folder, api_key=("sk-one",)) as live, live.client() as client:
        assert [client.get(path).status_code for path in PAGE] == [200] * len(PAGE)
        for path in ("/page/other.js", "/page/../v1/models", "/v1/models", "/debug/kv", "/debug/steps"):
            assert client.get(path).status_code == 401, path
        shown = client.get("/metrics", headers={"authorization": "Bearer sk-one"}).text
        assert 'pageserve:http_requests_total{code="200",route="/"}' in shown


def test_it_uses_its_own_files_only():
    named = set()
    for file in FILES.iterdir():
        text = file.read_text(encoding="utf-8")
        addresses = re.findall(r"\w+://[^\s\"']+", text)
        assert addresses == (["http://www.w3.org/2000/svg"] if file.suffix == ".svg" else []), file.name
        assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\(|new Function", text)
        if file.suffix == ".html":
            assert not re.search(r"<style|\sstyle=|\son\w+=|<script(?![^>]*\ssrc=)", text)
            named |= set(re.findall(r'(?:src|href)="page/([^"]+)"', text))
        named |= set(re.findall(r'from "\./([^"]+)"', text))
    assert named == {file.name for file in FILES.iterdir()} - {"index.html"}, "each file is there, and is used"


def test_every_colour_and_every_element_that_scripts_ask_for_exists():
    css, html = ((FILES / name).read_text(encoding="utf-8") for name in ("style.css", "index.html"))
    defined = set(re.findall(r"(--[\w-]+):", css))
    assert set(re.findall(r"var\((--[\w-]+)", css)) - {"--fill", "--doubt"} <= defined
    names = re.search(r"NAMES = \[([^\]]+)\]", (FILES / "theme.js").read_text(encoding="utf-8"))
    assert names and {f"--{name}" for name in re.findall(r'"([\w-]+)"', names.group(1))} <= defined
    ids = set(re.findall(r'\sid="([\w-]+)"', html))
    for file in FILES.glob("*.js"):
        assert set(re.findall(r'\$\("([\w-]+)"\)', file.read_text(encoding="utf-8"))) <= ids, file.name


def test_a_built_wheel_has_the_page(tmp_path):
    for name in ("pyproject.toml", "README.md"):
        shutil.copy(ROOT / name, tmp_path)
    shutil.copytree(ROOT / "server", tmp_path / "server", ignore=shutil.ignore_patterns("__pycache__"))
    command = [sys.executable, "-m", "pip", "wheel", ".", "--no-deps", "--no-build-isolation", "--quiet"]
    subprocess.run([*command, "--wheel-dir", "out"], cwd=tmp_path, check=True)
    with zipfile.ZipFile(next(tmp_path.glob("out/*.whl"))) as wheel:
        assert {f"server/page/{file.name}" for file in FILES.iterdir()} <= set(wheel.namelist())
