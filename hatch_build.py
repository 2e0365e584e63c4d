"""Metadata that follow from the project's address: its links, and those of the README."""

import re
from pathlib import Path

from hatchling.metadata.plugin.interface import MetadataHookInterface


class Address(MetadataHookInterface):
    """Hook that makes a registry's links from `address` in pyproject.toml."""

    def update(self, metadata: dict) -> None:
        """Adds links and a README that can be read without the repository."""
        address = self.config["address"]
        files = f"{address}/blob/main"
        metadata["urls"] = {
            "Source": address,
            "Documentation": f"{files}/README.md",
            "Changelog": f"{files}/CHANGELOG.md",
            "Issues": f"{address}/issues",
        }
        text = (Path(self.root) / "README.md").read_text(encoding="utf-8")
        links = re.compile(r"\]\((?!\w+://|#)([^)\s]+)\)")
        readme = links.sub(rf"]({files}/\1)", text)
        metadata["readme"] = {"content-type": "text/markdown", "text": readme}
