"""The report as a page: complete, of one file, sorted in a browser where there is one."""

import dataclasses
from html.parser import HTMLParser

import pytest

import keras_qat
from keras_qat.analysis.verify import Agreement, TensorReport, Verdict
from keras_qat.analysis.verify.pages import count_nines
from tests.browser import data_after, in_browser


class Reader(HTMLParser):
    """Rows of the tables, tags, and what is left open."""

    def __init__(self, text):
        super().__init__()
        self.tags, self.open, self.rows = [], [], []
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        if tag not in ("meta", "input"):
            self.open.append(tag)
        if tag == "tr":
            self.rows.append([])
        elif tag in ("td", "th"):
            self.rows[-1].append("")

    def handle_startendtag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if {"td", "th"} & set(self.open):
            self.rows[-1][-1] += data


@pytest.fixture(scope="module")
def report(exported):
    x = exported.x[:16]
    answers = exported.model.predict(x, verbose=0).argmax(-1)
    return keras_qat.verify(exported.model, exported.tflite, x, answers, per_layer=True)


@pytest.fixture
def doubtful(report):
    """The same with a layer that computes something else, and a name that has to be escaped."""
    odd: TensorReport = dataclasses.replace(
        report.tensors[2], name="<b>&odd", fed=Agreement(0.5, 7.0, 1.0), simulated=0.5, sqnr=None
    )
    tensors = (*report.tensors[:2], odd, *report.tensors[3:])
    return dataclasses.replace(report, tensors=tensors, verdict=Verdict("not the same"))


def test_holds_the_report(report, tmp_path):
    text = report.to_html(tmp_path / "report.html")
    assert (tmp_path / "report.html").read_text(encoding="utf-8") == text
    page = Reader(text)
    assert page.open == []
    rows = {row[0]: row for row in page.rows}
    for tensor in report.tensors:
        assert rows[tensor.name][-2] == f"{tensor.file_scale:.6g}"
    assert rows["stem"][3] == "100.000%"
    assert 'class="verdict good"' in text and "Same and good: the file" in text
    bars = [tag for _, tag in page.tags if "bar" in tag.get("class", "").split()]
    # A layer that is fed has four bars, an input three; those of what is all the same are full.
    assert len(bars) == 1 + sum(4 - (tensor.fed is None) for tensor in report.tensors)
    full = [bar for bar in bars if {"good", "run"} & set(bar["class"].split())]
    assert {bar["style"] for bar in full} == {"--length: 100.0%"}
    # The axis ends at 60 dB, whatever the layers have.
    sqnr = [report.outputs[0].float_sqnr, *(tensor.sqnr for tensor in report.tensors)]
    noise = [bar["style"] for bar in bars if "noise" in bar["class"]]
    assert noise == [f"--length: {ratio / 60:.1%}" for ratio in sqnr]


def test_needs_nothing_else(report):
    for _, attributes in Reader(report.to_html()).tags:
        assert not {"src", "href"} & set(attributes)
    assert "http" not in report.to_html() and "@import" not in report.to_html()


def test_shows_what_differs(doubtful):
    text = doubtful.to_html()
    assert "<b>" not in text
    assert 'class="verdict bad"' in text
    assert "With identical inputs, more than 0.1 % of the values differ" in text
    page = Reader(text)
    assert page.open == []
    (row,) = [row for row in page.rows if row[0] == "<b>&odd"]
    assert row[3] == "50.000%" and row[10] == "-"
    (bar,) = [tag for _, tag in page.tags if tag.get("class") == "number wrong bar bad"]
    assert bar["style"] == f"--length: {count_nines(0.5):.1%}"


def test_without_layers(exported):
    text = keras_qat.verify(exported.model, exported.tflite, exported.x[:8]).to_html()
    assert "per_layer=True" in text and text.count("--length: ") == 1


def test_nines():
    assert [count_nines(item) for item in (0.0, 0.9, 1.0)] == pytest.approx([0, 1 / 6, 1])


def test_where_it_cannot_be_written(report, tmp_path):
    with pytest.raises(FileNotFoundError, match="does not exist"):
        report.to_html(tmp_path / "none" / "report.html")


@pytest.mark.slow
@in_browser
def test_is_sorted_and_filtered_in_a_browser(doubtful, tmp_path):
    """By a click on the order of layers, then on identical outputs: what differs comes first."""
    script = """
        const rows = () => [...[...document.querySelectorAll('table')].at(-1).tBodies[0].rows];
        const heads = [...document.querySelectorAll('th button')].slice(-13);
        const click = (index, times) => { for (; times; times--) heads[index].click(); };
        click(1, 2); document.body.dataset.down = rows()[0].cells[0].textContent;
        click(3, 3); document.body.dataset.up = rows()[1].cells[0].textContent;
        const field = document.querySelector('input');
        field.value = '&ODD'; field.dispatchEvent(new Event('input', {target: field}));
        document.body.dataset.left = rows().filter(row => !row.hidden).length;
    """
    data = data_after(doubtful.to_html(), script, tmp_path)
    assert data["down"] == doubtful.tensors[-1].name
    assert data["up"] == "&lt;b&gt;&amp;odd"  # Behind the input, which has no such number.
    assert data["left"] == "1"
