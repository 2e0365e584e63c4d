"""Every model of `keras.applications`: does it quantize, train, reload, become int8, and agree?

    python -m benchmarks.zoo                        all models, some hours on 2 cores
    python -m benchmarks.zoo MobileNetV2 ResNet50   these
    python -m benchmarks.zoo --wild                 architectures of other packages and by hand
    python -m benchmarks.zoo --resume               those that the output file lacks, or that failed
    python -m benchmarks.zoo --codes                no training: the codes of files with a scale for
                                                    each channel and with one for all weights

Each model runs in a process of its own (`benchmarks.zoo_worker`), so one that crashes or runs out
of time is a row like the others. The exit status is 1 if a model failed, or one that is int8 as a
whole has other codes than its file. With `--tfmot`, and tensorflow_model_optimization installed,
that library is run beside it.
"""

from __future__ import annotations

import argparse
import collections
import concurrent.futures
import importlib.metadata
import importlib.util
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from benchmarks import markdown

ROOT = Path(__file__).parent.parent
COLUMNS = (
    ("model", 18),
    ("reloads", 7),
    ("int8", 9),
    ("converts", 8),
    ("layers", 7),
    ("identical", 9),
    ("LSB", 3),
    ("end", 6),
    ("simulated", 9),
    ("seconds", 7),
    ("peak MB", 7),
)
CODES = (
    ("predict", "predict, XNNPACK"),
    ("xnnpack", "simulate, XNNPACK"),
    ("reference", "simulate, reference"),
)
"""What is compared with a file's codes, by its name in the rows of `--codes`."""
PACKAGES = (
    *("tensorflow", "tensorflow-cpu", "tf-keras", "ai-edge-litert", "keras-qat"),
    *("keras-cv-attention-models", "segmentation-models", "keras-unet-collection"),
    *("efficientnet", "image-classifiers", "keras-tcn"),
)
"""Whose versions are noted, as far as they are installed."""
NOTES = (
    "int8: operations of the file that compute in int8, of all; converts: QUANTIZE and DEQUANTIZE "
    "inside it.",
    "reloads: after a step of training; layers: how many agree, with XNNPACK, each fed what the "
    "model in Keras computed before it: at least 99.9 % of the codes the same, none 2 LSB off; "
    "identical, LSB: the mean share over the layers and the largest difference.",
    "end: share of identical codes of the logits, against the model in Keras; simulated: against "
    "keras_qat.simulate.",
)


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("names", nargs="*", metavar="NAME", help="models; all by default")
    parser.add_argument("--tfmot", action="store_true", help="run tfmot beside it")
    parser.add_argument("--wild", action="store_true", help="those of benchmarks.wild instead")
    parser.add_argument("--codes", action="store_true", help="no training, only the files' codes")
    parser.add_argument("--output", type=Path, default=Path("zoo.json"), help="zoo.json by default")
    parser.add_argument("--resume", action="store_true", help="leave out what is in the output")
    parser.add_argument("--jobs", type=int, default=1, help="models at a time")
    parser.add_argument("--timeout", type=float, default=3600, help="seconds for each model")
    arguments = parser.parse_args()
    if arguments.tfmot and not importlib.util.find_spec("tensorflow_model_optimization"):
        parser.error("--tfmot: pip install tensorflow-model-optimization first")
    names = model_names(arguments.wild)
    unknown = sorted(set(arguments.names) - set(names))
    if unknown:
        parser.error(f"no models: {', '.join(unknown)}. There are: {', '.join(names)}")
    rows: dict[str, dict[str, Any]] = {}
    if arguments.resume and arguments.output.exists():
        models = json.loads(arguments.output.read_text())["models"]
        rows = {row["name"]: row for row in models if "error" not in row}
    names = [name for name in arguments.names or names if name not in rows]

    if not arguments.codes:
        print(header(arguments.tfmot))
    with concurrent.futures.ThreadPoolExecutor(arguments.jobs) as pool:
        tasks = [pool.submit(measure, name, arguments) for name in names]
        for task in concurrent.futures.as_completed(tasks):
            row = task.result()
            rows[row["name"]] = row
            save(rows, arguments.output)
            if arguments.codes:
                print(row["name"], row.get("recipes"), row.get("error", ""), flush=True)
            else:
                print(line(row, arguments.tfmot), remark(row), flush=True)
    if arguments.codes:
        print(code_summary(rows))
        raise SystemExit(0 if all(has_all_codes(row) for row in rows.values()) else 1)
    print(f"\n{summary(rows, arguments.tfmot)}")
    raise SystemExit(0 if all(is_green(row) for row in rows.values()) else 1)


def model_names(wild: bool) -> list[str]:
    """The names of all models, found in a process of its own to keep this one small."""
    program = (
        "import json; from benchmarks import wild, zoo_worker; "
        f"print(json.dumps(list({'wild.builders' if wild else 'zoo_worker.constructors'}())))"
    )
    done = subprocess.run(
        [sys.executable, "-c", program],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        check=True,
        text=True,
    )
    return list(json.loads(done.stdout.splitlines()[-1]))


def measure(name: str, arguments: argparse.Namespace) -> dict[str, Any]:
    """The result of one model, that of tfmot inside it."""
    given = [name, "--wild"] if arguments.wild else [name]
    row = run_worker([*given, "--codes"] if arguments.codes else given, arguments.timeout)
    if arguments.tfmot:
        row["tfmot"] = run_worker([*given, "--tfmot"], arguments.timeout)
    return row


def run_worker(arguments: list[str], timeout: float) -> dict[str, Any]:
    """The last line of JSON that a worker printed, and how it ended if it did not finish."""
    command = [sys.executable, "-m", "benchmarks.zoo_worker", *arguments]
    environment = {"TF_CPP_MIN_LOG_LEVEL": "3", **os.environ}
    start = time.perf_counter()
    try:
        done = subprocess.run(
            command, cwd=ROOT, capture_output=True, text=True, timeout=timeout, env=environment
        )
        output, error = done.stdout, ""
        if done.returncode < 0:
            error = signal.Signals(-done.returncode).name
        elif done.returncode:
            error = (done.stderr.strip().splitlines() or [f"exit {done.returncode}"])[-1]
    except subprocess.TimeoutExpired as expired:
        output, error = (expired.stdout or b"").decode(), f"longer than {timeout:.0f} s"
    lines = [splitline for splitline in output.splitlines() if splitline.startswith("{")]
    row = json.loads(lines[-1]) if lines else {"name": arguments[0]}
    if error:
        row.setdefault("error", f"after {row.get('step', 'the start')}: {error}")
    row["total_seconds"] = round(time.perf_counter() - start, 1)
    return row


def is_green(row: dict[str, Any]) -> bool:
    """Whether every step passed, float operations were announced, and no layer is 2 LSB off.

    Where layers were not compared, what is int8 as a whole has to give all codes of the outputs.
    """
    kept = bool(row.get("float_layers"))
    agrees = kept or row.get("identical") == 1
    if "layers" in row:
        agrees = row["layers"]["largest"] <= 1
    return (
        "error" not in row
        and bool(row.get("trains"))
        and bool(row.get("reloads"))
        and (kept or not row.get("float_operations", {"?": 1}))
        and agrees
    )


def has_all_codes(row: dict[str, Any]) -> bool:
    """Whether nothing failed, and what is int8 as a whole gives all codes, with each recipe."""
    whole = [item for item in row.get("recipes", {}).values() if not item["float_operations"]]
    return "error" not in row and all(item[key] == 1 for item in whole for key, _ in CODES)


def header(tfmot: bool) -> str:
    """The head of the table, in Markdown like the rows."""
    columns = [*COLUMNS, ("tfmot", 24)] if tfmot else COLUMNS
    titles, widths = zip(*columns, strict=True)
    return markdown.head(titles, widths)


def line(row: dict[str, Any], tfmot: bool) -> str:
    """A row of the table; what went wrong or stays in float is added in words."""
    floating = sum(row.get("float_operations", {}).values())
    total = row.get("operations")
    layers = row.get("layers")
    cells = [
        row["name"],
        mark(row.get("reloads")),
        "-" if total is None else f"{total - floating}/{total}",
        str(sum(row["conversions"].values())) if "conversions" in row else "-",
        f"{layers['agree']}/{layers['compared']}" if layers else "-",
        f"{layers['identical']:.3%}" if layers else "-",
        f"{layers['largest']:.0f}" if layers else "-",
        f"{row['identical']:.1%}" if "identical" in row else "-",
        f"{row['simulated']:.1%}" if "simulated" in row else "-",
        f"{row.get('total_seconds', 0):.0f}",
        str(max(row.get("peak_mb", {"": 0}).values())),
    ]
    widths = [width for _, width in COLUMNS]
    if tfmot:
        cells.append(tfmot_cell(row.get("tfmot")))
        widths.append(24)
    return markdown.row(cells, widths)


def remark(row: dict[str, Any]) -> str:
    """What went wrong, or what stays in float and why; nothing of most models."""
    if "error" in row:
        return f"{row['name']}: {row['error']}"
    kept = collections.Counter(row["float_layers"].values())
    reasons = "; ".join(f"{count} layers ({reason})" for reason, count in sorted(kept.items()))
    return f"{row['name']}: in float {reasons}" if kept else ""


def mark(passed: Any) -> str:
    """A cell that says whether a step passed; None: it was not reached."""
    return "-" if passed is None else "yes" if passed else "NO"


def tfmot_cell(row: dict[str, Any] | None) -> str:
    """What tfmot makes of a model, in a few words."""
    if row is None:
        return "-"
    if "error" in row:
        return f"{row.get('step', '')}: {row['error'].partition(':')[0]}"[:24]
    floating = sum(row["float_operations"].values())
    return f"int8 {row['operations'] - floating}/{row['operations']}"


def steps(rows: list[dict[str, Any]]) -> list[str]:
    """A second table: what each step took, and the largest memory of the process until its end."""
    names = list(dict.fromkeys(name for row in rows for name in row.get("seconds", {})))
    lines = [f"| model | {' | '.join(names)} |", "|---" * (len(names) + 1) + "|"]
    for row in rows:
        cells = [
            f"{row['seconds'][name]:.1f} s, {row['peak_mb'][name]} MB" if name in result else "-"
            for result in [row.get("seconds", {})]
            for name in names
        ]
        lines.append(f"| {' | '.join([row['name'], *cells])} |")
    return lines


def facts() -> dict[str, Any]:
    """What the numbers depend on."""
    versions = {}
    for package in PACKAGES:
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return {"python": sys.version.split()[0], "cores": os.cpu_count(), "versions": versions}


def summary(rows: dict[str, dict[str, Any]], tfmot: bool) -> str:
    """The whole table, by name, with what its columns mean."""
    ordered = [rows[name] for name in sorted(rows)]
    lines = [header(tfmot), *(line(row, tfmot) for row in ordered), "", *NOTES, ""]
    lines += [*filter(None, map(remark, ordered)), "", *steps(ordered), ""]
    green = sum(map(is_green, ordered))
    all_int8 = sum(is_green(row) and not row["float_layers"] for row in ordered)
    lines.append(f"{green} of {len(ordered)} green, {all_int8} of them all int8; {facts()}")
    return "\n".join(lines)


def code_summary(rows: dict[str, dict[str, Any]]) -> str:
    """How many models have all codes, and the others, for each recipe."""
    recipes = {key: None for row in rows.values() for key in row.get("recipes", {})}
    lines = [f"| models | int8 | {' | '.join(title for _, title in CODES)} |"]
    lines.append("| --- " * (len(CODES) + 2) + "|")
    for recipe in recipes:
        result = {
            name: row["recipes"][recipe]
            for name, row in rows.items()
            if recipe in row.get("recipes", {})
        }
        whole = {name: value for name, value in result.items() if not value["float_operations"]}
        equal = [sum(item[key] == 1 for item in whole.values()) for key, _ in CODES]
        lines.append(f"| {len(result)}, {recipe} | {len(whole)} | {' | '.join(map(str, equal))} |")
        lines += [
            f"| {name}, {recipe} | in part | {' | '.join(f'{row[key]:.2%}' for key, _ in CODES)} |"
            for name, row in sorted(result.items())
            if name not in whole or any(row[key] < 1 for key, _ in CODES)
        ]
    lines += ["", *(f"{name}: {row['error']}" for name, row in rows.items() if "error" in row)]
    return "\n".join([*lines, str(facts())])


def save(rows: dict[str, dict[str, Any]], path: Path) -> None:
    """Writes what is known so far, whole or not at all."""
    data = {**facts(), "models": [rows[name] for name in sorted(rows)]}
    scratch = path.with_name(f".{path.name}.new")
    scratch.write_text(json.dumps(data, indent=1) + "\n")
    scratch.replace(path)


if __name__ == "__main__":
    main()
