"""Tests docs/command-line.md: runs its program and its commands, and compares their output."""

import re
import shlex
from pathlib import Path

import pytest
from click.testing import CliRunner

from keras_qat.keras2.backend import keras
from keras_qat_cli.commands import cli

PAGE = Path(__file__).parent.parent.parent / "docs" / "command-line.md"
BLOCK = re.compile(r"^```(python|console)\n(.*?)^```$", re.M | re.S)
VARIES = re.compile(
    r"\d+ bytes|scale [\d.]+, zero point -?\d+|[\d.]+ dB|[\d.]+% of rows|\d\d\.\d\d%$", re.M
)
"""Figures that depend on training."""


def ran(line):
    """Returns what a command prints, in the form of the page."""
    name, *arguments = shlex.split(line)
    assert name == "keras-qat"
    goes_to_file = ">" in arguments
    if goes_to_file:
        arguments = arguments[: arguments.index(">")]
    done = CliRunner().invoke(cli, arguments)
    shown = done.stderr if goes_to_file else done.output
    return shown + (f"[exit code {done.exit_code}]\n" if done.exit_code else "")


@pytest.mark.slow
@pytest.mark.skipif(keras.__name__ != "tf_keras", reason="the page imports tf_keras")
def test_page(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for kind, text in BLOCK.findall(PAGE.read_text()):
        if kind == "python":
            exec(compile(text, str(PAGE), "exec"), {})
            continue
        commands = [item for item in re.split(r"^\$ ", text, flags=re.M) if item]
        for command in commands:
            line, _, expected = command.partition("\n")
            printed = ran(line)
            assert VARIES.sub("#", printed) == VARIES.sub("#", expected), line
