"""The results table: every number has its record, and what no record shows is said."""

import csv
import dataclasses
import shutil

import pytest

from kimivl_lab.bench.gpu_claims import CLAIMS, Bound
from kimivl_lab.datasets import data_path
from kimivl_lab.measure.published import published_rows
from kimivl_lab.measure.records import Recorder, read_record
from kimivl_lab.report import results
from kimivl_lab.report.results import NEEDS_GPU, markdown


def of(lines, words):
    return [line for line in lines if words in line.claim]


def copied(name, folder, **changes):
    """A kept record in `folder`, under another name's device, dtype or date."""
    (path,) = data_path("measurements").glob(f"{name}.csv")
    parts = dict(zip(("benchmark", "device", "dtype", "date"), path.stem.split("__"), strict=True)) | changes
    new = folder / f"{'__'.join(parts.values())}.csv"
    shutil.copy(path, new)
    shutil.copy(path.with_suffix(".json"), new.with_suffix(".json"))
    return new


def test_every_number_has_its_record_machine_and_date():
    lines = results.results()
    for line in lines:
        if line.record == NEEDS_GPU:
            assert not (line.measured or line.machine or line.date) and line.predicted
        elif line.record.startswith("published/"):
            assert data_path(line.record).exists() and line.measured and line.machine
        else:
            _, origin = read_record(data_path("measurements", f"{line.record}.csv"))
            assert (line.machine, line.date) == (origin["device"], origin["date"][:10])
            assert line.predicted and line.measured
    assert [line.lesson for line in lines] == sorted(line.lesson for line in lines)
    assert sum(line.record.startswith("published/host_syncs") for line in lines) == sum(
        row["unit"] == "ms" for row in published_rows("host_syncs")
    )


def test_without_a_record_a_claim_needs_a_gpu_or_is_left_out(tmp_path):
    lines = [line for line in results.results(tmp_path) if not line.record.startswith("published/")]
    assert {line.claim for line in lines} == {claim.text for claim in CLAIMS if claim.needs_gpu}
    assert {line.record for line in lines} == {NEEDS_GPU}


def test_a_record_of_a_gpu_decides_what_a_cpu_cannot_show(tmp_path):
    """The same rows, once under a CPU's name and once under a GPU's."""
    name = "graphs__cpu-intel-xeon-2-cores__float32__20261129"
    copied(name, tmp_path)
    (line,) = of(results.results(tmp_path), "frees the host")
    assert line.record == NEEDS_GPU
    gpu = copied(name, tmp_path, device="nvidia-h100")
    (line,) = of(results.results(tmp_path), "frees the host")
    assert line.record == gpu.stem and line.measured.endswith("times as fast")


def test_numbers_are_those_of_the_newest_record(tmp_path):
    name = "attention__cpu-amd-epyc-2-cores__float32__20261201"
    copied(name, tmp_path, date="20261130")
    new = copied(name, tmp_path)
    with new.open(newline="") as file:
        rows = list(csv.DictReader(file))
    ms = {"sdpa": "10", "sdpa_masked": "70", "simd": "35"}
    for row in rows:
        row["latency_ms_p50"] = ms[row["variant"]] if row["case"] == "16 of 16x16" else "100"
    with new.open("w", newline="") as file:
        writer = csv.DictWriter(file, rows[0].keys(), lineterminator="\n")
        writer.writeheader()
        writer.writerows(row for row in rows if row["case"] == "16 of 16x16")
    (line,) = of(results.results(tmp_path), "one mask over all images takes longer")
    assert line.record == new.stem
    assert line.measured.startswith("7 times") and line.predicted.startswith("by scores 16 times")
    (line,) = of(results.results(tmp_path), "packed attention is not slower")
    assert line.measured == "7 times as fast", "the fastest packed way"


def test_a_claim_that_did_not_hold_says_so(tmp_path):
    path = copied("ladder__cpu-intel-xeon-2-cores__float32__20261129", tmp_path)
    assert "did not hold" not in of(results.results(tmp_path), "no rung")[0].measured
    lines = path.read_text().splitlines()
    columns = lines[0].split(",")
    last = lines[-1].split(",")
    last[columns.index("latency_ms_p50")] = "1e6"
    path.write_text("\n".join([*lines[:-1], ",".join(last)]) + "\n")
    assert "did not hold for 1 of" in of(results.results(tmp_path), "no rung")[0].measured


def test_a_different_answer_of_one_restart_is_not_lost(tmp_path):
    """The rows of restarts have one name."""
    columns = ("case", "variant", "phase", "policy", "restart_count", "error_ratio", "relative_error")
    with Recorder("engine", "float32", columns, directory=tmp_path) as record:
        for restart, different in enumerate((0, 0.25, 0)):
            row = {"case": "answers", "variant": "tower", "phase": "check", "restart_count": restart}
            record.add(row | {"relative_error": different})
        row = {"case": "light", "variant": "simulated", "phase": "simulation", "relative_error": 0}
        record.add(row | {"policy": "vllm", "error_ratio": 0.9})
        record.add(row | {"policy": "tower", "error_ratio": 1.2})
    lines = results.results(tmp_path)
    assert of(lines, "own answers")[0].measured == "0 to 0.25 of the answers differ; did not hold for 1 of 3"
    (line,) = of(lines, "model of a serving engine")
    assert (line.predicted, line.measured) == ("1", "0.9 to 1.2 of the measured mean")


def test_every_prediction_belongs_to_a_claim():
    assert results._PREDICTIONS.keys() <= {claim.text for claim in (*CLAIMS, *results._MORE)}


@pytest.mark.parametrize(
    ("bound", "held", "missed", "words"),
    [
        (Bound("", 0), 0, 1, "0"),
        (Bound("at most", 0.05), 0.05, 0.06, "at most 0.05"),
        (Bound("less than", 1), 0.9, 1, "less than 1"),
        (Bound("more than", 1), 1.1, 1, "more than 1"),
        (Bound("at least", 3038.4), 3038.4, 3038, "at least 3,038"),
    ],
)
def test_a_bound_says_what_it_checks(bound, held, missed, words):
    assert bound.holds(held) and not bound.holds(missed) and str(bound) == words


def test_the_table_as_markdown():
    lines = results.results()
    table = markdown(lines).splitlines()
    assert table[0] == "| lesson | claim | predicted | measured | record | machine | date |"
    assert len(table) == 2 + len(lines)
    width = len(dataclasses.fields(results.Result))
    assert {len(row.strip("|").split("|")) for row in table} == {width}, "no cell holds a bar"
