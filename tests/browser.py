"""Pages in a browser, where one is installed."""

import re
import shutil
import subprocess
from pathlib import Path

import pytest

NAMES = ("chromium", "chromium-browser", "google-chrome")
BROWSER = next(filter(None, map(shutil.which, NAMES)), None)
in_browser = pytest.mark.skipif(not BROWSER, reason="no browser: chromium or google-chrome")


def data_after(page: str, script: str, folder: Path) -> dict[str, str]:
    """Runs a script in a page, and returns what it set in `document.body.dataset`."""
    path = folder / "page.html"
    text = page.replace("</body>", f"<script>{{{script}}}</script></body>")
    path.write_text(text, encoding="utf-8")
    command = [BROWSER, "--headless", "--no-sandbox", "--disable-gpu", "--dump-dom"]
    command += [f"--user-data-dir={folder / 'profile'}", path.as_uri()]
    shown = subprocess.run(command, capture_output=True, text=True, check=True, timeout=120).stdout
    (body,) = re.findall(r"<body([^>]*)>", shown)
    return dict(re.findall(r'data-(\w+)="([^"]*)"', body))
