"""Checks what is in a wheel and a source distribution, and that links lead out of the README."""

import re
import sys
import tarfile
import zipfile
from pathlib import Path

folder = Path(sys.argv[1])
(wheel,), (source,) = folder.glob("*.whl"), folder.glob("*.tar.gz")
with zipfile.ZipFile(wheel) as file:
    packed = file.namelist()
    (metadata,) = (file.read(name).decode() for name in packed if name.endswith("/METADATA"))
with tarfile.open(source) as archive:
    written = {name.partition("/")[2] for name in archive.getnames()}

missing = [
    *(
        {
            "keras_qat/py.typed",
            "keras_qat_cli/commands.py",
            "tf_keras_qat/__init__.py",
        }
        - {*packed}
    ),
    *(
        {"CHANGELOG.md", "LICENSE", "Makefile", "docs/export.md", "docs/images/exact.svg"}
        | {
            "examples/digits/train.py",
            "tutorials/demo.py",
            "tests/conftest.py",
            "keras_qat/py.typed",
        }
    )
    - written,
]
others = [name for name in packed if not re.match(r"(keras_qat|tf_keras_qat|keras_qat_cli)", name)]
(address,) = re.findall(r"^Project-URL: Source, (.*)$", metadata, flags=re.M)
links = [
    link
    for link in re.findall(r"\]\(([^)\s]+)\)", metadata)
    if "://" not in link or ("/blob/main/" in link and not link.startswith(f"{address}/"))
]
for fault, names in {
    "Missing": missing,
    "Not of the package": others,
    "Links of the README that lead nowhere on a page of the registry": links,
}.items():
    if names:
        sys.exit(f"{fault}: {', '.join(names)}")
print(f"{wheel.name}: {len(packed)} files, {source.name}: {len(written)}; links of README lead out")
