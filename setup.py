"""The README as registries show it: links to pages of the repository are made complete."""

import re
from pathlib import Path

from setuptools import setup

ROOT = Path(__file__).parent
README, PROJECT = ((ROOT / name).read_text("utf-8") for name in ("README.md", "pyproject.toml"))
(ADDRESS,) = re.findall(r'^Source = "(.*)"', PROJECT, flags=re.M)

setup(
    long_description=re.sub(
        r"(\]\()(?!\w+://|#)([^)\s]+\))", rf"\g<1>{ADDRESS}/blob/main/\g<2>", README
    ),
    long_description_content_type="text/markdown",
)
