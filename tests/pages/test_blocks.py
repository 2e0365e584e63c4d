"""Runs the programs of README and docs. Those of a page run one after the other, unchanged.

Blocks with the tag `python` run. A `py` block cannot run alone (another framework, several
machines), and only has to be valid Python. Outputs and commands have other tags, or none.
"""

import ast
import re
from pathlib import Path
from typing import Any

import pytest

import keras_qat
from keras_qat.keras2.backend import keras
from tests.pages.preludes import PRELUDES

ROOT = Path(__file__).parent.parent.parent
PAGES = {
    str(page.relative_to(ROOT)): page for page in [ROOT / "README.md", *ROOT.glob("docs/**/*.md")]
}
OTHER_LANGUAGES = {"c", "c++", "cmake", "cpp", "java", "kotlin", "ruby", "swift"}
TAGS = {"python", "py", "console", "text", "", *OTHER_LANGUAGES}
QUICK = {"README.md"}
"""The page that runs by default, which users read first."""


def blocks(page: str) -> list[tuple[str, int, str]]:
    text = PAGES[page].read_text()
    result = re.finditer(r"^( *)```(.*?)\n(.*?)^\1```$", text, flags=re.M | re.S)
    return [
        (item[2], text[: item.start(3)].count("\n"), re.sub(f"^{item[1]}", "", item[3], flags=re.M))
        for item in result
    ]


def without_numbers(text: str) -> list[str]:
    """Returns the words of an output. Accuracies and spaces around them depend on the machine."""
    return re.sub(r"[\d.]+", "0", text).split()


def programs(page: str) -> list[tuple[str, int]]:
    return [(text, line) for tag, line, text in blocks(page) if tag == "python"]


@pytest.fixture
def undone(monkeypatch):
    """Reverts registrations and the policy of a page."""
    undo: list[Any] = []
    policy = keras.mixed_precision.global_policy()

    def note(place: Any, verb: str) -> None:
        register = getattr(place, verb)

        def noted(*args, **kwargs):
            result = register(*args, **kwargs)
            undo.append(getattr(result, "undo", result))
            return result

        monkeypatch.setattr(place, verb, noted)

    note(keras_qat, "register_op")
    note(keras_qat.targets, "register")
    yield
    for restore in reversed(undo):
        restore()
    keras.mixed_precision.set_global_policy(policy)


def with_costs(page: str) -> Any:
    return pytest.param(page, marks=[] if page in QUICK else pytest.mark.slow, id=page)


@pytest.mark.filterwarnings("ignore:pack_int4=True. kernels round sums:UserWarning")
@pytest.mark.filterwarnings("ignore:.*is a model of Keras 3")  # As its page says.
@pytest.mark.skipif(keras.__name__ != "tf_keras", reason="pages import tf_keras")
@pytest.mark.parametrize("page", map(with_costs, filter(programs, PAGES)))
def test_programs_of_a_page(page, tmp_path, monkeypatch, undone, capsys):
    monkeypatch.chdir(tmp_path)
    keras.utils.set_random_seed(1)
    names = {"__name__": "__main__"} | PRELUDES.get(page, dict)()
    for program, line in programs(page):
        # Lines are counted as on the page, for tracebacks.
        exec(compile("\n" * line + program, str(PAGES[page]), "exec"), names)
    if page == "README.md":
        shown = next(text for tag, _, text in blocks(page) if text.startswith("float 0."))
        printed = capsys.readouterr().out
        assert without_numbers(printed) == without_numbers(shown)
        assert re.search(r"digit +100\.000% +0 LSB +0 LSB +100\.00%", printed)


def test_tags_of_blocks():
    for page in PAGES:
        for tag, line, text in blocks(page):
            assert tag in TAGS, f"{page}:{line}: ```{tag}"
            if tag in ("python", "py"):
                ast.parse(text, page)


def test_preludes_are_of_pages():
    assert set(PRELUDES) | QUICK <= set(PAGES)
