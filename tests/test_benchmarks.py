"""Tests the benchmark of accuracies in small: digits, one seed, two networks, some rows."""

import json
import re
from pathlib import Path

import pytest
import tensorflow as tf

from benchmarks import accuracy, gpu, methods, operations, recurrent, zoo

ROWS = ("TFLite 8/8", "calibrate 8/8", "calibrate 8/8 per tensor", "8/8, rate x 0.3")
WORDS = "--data digits --seeds 1 --networks DS-CNN LeNet --epochs 12 --more 2 --batch 32 --rows"


@pytest.mark.slow
def test_the_table_in_small(tmp_path, monkeypatch, capsys):
    words = ["accuracy", "--directory", str(tmp_path), *WORDS.split(), *ROWS]
    monkeypatch.setattr("sys.argv", words)
    accuracy.main()
    first, *_ = capsys.readouterr().out.splitlines()
    assert first.startswith("   1 of 10, ")
    for name in ("DS-CNN", "LeNet"):
        parsed = json.loads((tmp_path / f"{name}-0.json").read_text())
        assert set(parsed) == {"float", *ROWS}
        assert parsed["float"] > 70  # Other people wrote the digits of the test data.
        for label in ROWS:
            assert parsed[label] >= parsed["float"] - 2, (name, label, parsed)
    accuracy.main()  # Nothing remains to be done.
    assert capsys.readouterr().out.startswith("| | DS-CNN | LeNet |")


def test_a_table_of_what_there_is(tmp_path):
    for seed, value in enumerate((90.0, 91.0)):
        (tmp_path / f"LeNet-{seed}.json").write_text(json.dumps({"float": value}))
    text = accuracy.table(tmp_path, ["LeNet", "DS-CNN"], ["float"])
    assert text.splitlines()[-1] == "| float | 90.50 ± 0.50 |  |"


@pytest.mark.slow
def test_recurrent_networks_in_small(monkeypatch, capsys):
    monkeypatch.setitem(recurrent.EPOCHS, "digits", (4, 1))
    words = "recurrent --tasks digits --networks SimpleRNN --seeds 1"
    monkeypatch.setattr("sys.argv", words.split())
    recurrent.main()
    *_, line = capsys.readouterr().out.splitlines()
    assert line.startswith("| digits | SimpleRNN | ")
    assert line.count("|") == 3 + len(recurrent.ROWS)


def found(share, floating=()):
    """Returns the line that `benchmarks.zoo --codes` writes for a file."""
    return {"float_operations": dict.fromkeys(floating, 1), **{key: share for key, _ in zoo.CODES}}


@pytest.mark.parametrize(
    ("row", "status"),
    [
        ({"recipes": {"per channel": found(1.0), "per tensor": found(1.0)}}, 0),
        ({"recipes": {"per channel": found(1.0), "per tensor": found(0.999)}}, 1),
        ({"recipes": {"per channel": found(0.7, ["EXP"])}}, 0),
        ({"recipes": {"per channel": found(1.0)}, "error": "after per tensor: SIGKILL"}, 1),
        ({"error": "after build: ValueError"}, 1),
    ],
)
def test_codes_that_differ_are_in_the_exit_status(row, status, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(zoo, "model_names", lambda wild: ["Net"])
    monkeypatch.setattr(zoo, "measure", lambda name, arguments: {"name": name, **row})
    monkeypatch.setattr("sys.argv", ["zoo", "--codes", "--output", str(tmp_path / "zoo.json")])
    with pytest.raises(SystemExit) as ended:
        zoo.main()
    assert ended.value.code == status
    assert "| models | int8 |" in capsys.readouterr().out


def test_copies_to_the_host_that_the_profiler_sees(monkeypatch):
    seen = [("/device:GPU:0", "MemcpyD2H", 0.1), ("/device:GPU:0", "MemcpyH2D", 0.1)]
    seen += [("/host:CPU", "MemcpyD2H", 0.1), ("/device:GPU:0 context", "MemcpyD2H", 0.2)]
    monkeypatch.setattr(gpu, "events", lambda step, steps: seen * steps)
    assert gpu.copies_to_host(lambda: None) == 2


def test_memory_against_float_and_the_goal(monkeypatch):
    peaks = {"float": 100.0, "int8": 125.0, "frozen": 126.0}
    monkeypatch.setattr(gpu, "in_own_process", lambda *words, program: peaks[words[2]])
    rows = {label: (result, is_good) for label, result, is_good in gpu.memory()}
    assert rows["MobileNetV2 mixed_float16, int8: memory"] == ("125 MB, 1.25x (goal 1.25x)", True)
    assert rows["ResNet50 float32, frozen: memory"] == ("126 MB, 1.26x (goal 1.25x)", False)


def test_operations_of_a_graph_as_on_a_gpu():
    data, variable = tf.Variable(tf.ones([2, 4])), tf.Variable(2.0)
    step = tf.Variable(0, dtype=tf.int64)

    @tf.function(autograph=False)
    def run():
        step.assign_add(1)
        x = data.read_value()
        high = tf.reduce_max(x) * variable
        variable.assign(high)
        x = tf.reshape(tf.nn.relu(x), [8])
        return tf.quantization.fake_quant_with_min_max_vars(x, tf.constant(0.0), high)

    counts = operations.count(operations.optimized_graph(run))
    computed = {"AssignAddVariableOp", "Max", "Mul", "Relu", "FakeQuantWithMinMaxVars"}
    assert set(counts.operations) == {*computed, "AssignVariableOp", "Reshape"}
    if tf.test.is_built_with_cuda():  # Otherwise TensorFlow has no kernels for GPUs.
        assert set(counts.launches) == computed
        # The constant, too: a GPU has it in its own memory.
        assert dict(counts.host_reads) == {"FakeQuantWithMinMaxVars": 2}
        assert counts.bytes == 8 + (32 + 4) + 3 * 4 + (32 + 32) + (32 + 32)


def test_numbers_asked_for_around_a_step():
    x = tf.constant(1.0)
    assert operations.numpy_calls(lambda: (x.numpy(), x.numpy())) == 2


def commands():
    """Yields page, benchmark and options of each command that a page states for its figures."""
    root = Path(__file__).parent.parent
    for page in [
        root / "README.md",
        *root.glob("docs/*.md"),
        *root.glob("benchmarks/results/*.md"),
    ]:
        for name, rest in re.findall(r"python -m benchmarks\.(\w+)([^`|]*)", page.read_text()):
            yield page.name, name, re.findall(r"--[a-z][a-z-]+", rest.split("\n\n")[0])


def test_pages_name_commands_that_there_are():
    folder = Path(accuracy.__file__).parent
    sources = "\n".join(path.read_text() for path in folder.rglob("*.py"))
    named = list(commands())
    assert len(named) > 20
    for page, name, options in named:
        assert (folder / f"{name}.py").exists() or (folder / name).is_dir(), (page, name)
        assert [option for option in options if f'"{option}"' not in sources] == [], (page, name)


def test_pages_name_rows_that_there_are():
    results = Path(accuracy.__file__).parent / "results"
    text = "".join((results / name).read_text() for name in ("accuracy.md", "methods.md"))
    labels = re.findall(r'"([^"\n]+)"', "".join(re.findall(r" --rows ([^`$]*)", text)))
    parts = (accuracy.PARTS | methods.PARTS).values()
    assert set(labels) <= {"float", "tfmot 8/8"}.union(*(part() for part in parts))
    assert len(labels) > 20
