"""Prints the dependencies that pyproject.toml declares, one per line, for image layers that come before the source.

`requirements.py torch` prints only the named packages, `requirements.py` all packages.
"""

import re
import sys
from pathlib import Path

pyproject = Path("pyproject.toml").read_text(encoding="utf-8")
block = re.search(r"^dependencies = \[\n(.*?)^\]", pyproject, re.MULTILINE | re.DOTALL)
assert block is not None, "pyproject.toml declares no dependencies"
for requirement in re.findall(r'^\s*"(.+)",?$', block[1], re.MULTILINE):
    if not sys.argv[1:] or re.split(r"[^\w-]", requirement)[0] in sys.argv[1:]:
        print(requirement)
