"""Records of measurements: what is written, what is refused, and that every record in data/measurements is valid."""

import csv
import json
import math
import re
from pathlib import Path

import pytest
import torch

from kimivl_lab.measure.provenance import device_slug, instruction_set
from kimivl_lab.measure.records import FILE_NAME, Recorder, find_record, read_record, record_problems

MEASUREMENTS = Path(__file__).resolve().parents[1] / "data" / "measurements"
COLUMNS = ["case", "variant", "latency_ms_p50", "traffic_share", "relative_error", "note"]
LESSON_95 = 'device="cpu-intel-*", dtype="bfloat16"'  # its names
ROW = {"case": "photo", "variant": "sdpa", "latency_ms_p50": 1.25, "traffic_share": 0.5, "relative_error": 0.0}


def record(folder, rows=(ROW,), **settings):
    with Recorder("bench", "float32", COLUMNS, directory=folder, **settings) as recorder:
        for row in rows:
            recorder.add(row)
    return recorder.path


def test_every_committed_record_is_valid():
    problems = [problem for path in sorted(MEASUREMENTS.glob("*.csv")) for problem in record_problems(path)]
    assert problems == []


def test_nothing_but_records_lies_beside_them():
    names = {path.name for path in MEASUREMENTS.glob("*")} - {".gitkeep"}
    tables = {name for name in names if name.endswith(".csv")}
    assert names == tables | {name.replace(".csv", ".json") for name in tables}


def test_what_is_written_is_read(tmp_path):
    path = record(
        tmp_path / "new" / "folder", [ROW, ROW | {"note": "again, with a comma"}], settings={"seed": 3, "warmup": 2}
    )
    rows, origin = read_record(path)
    assert rows == [ROW | {"note": None}, ROW | {"note": "again, with a comma"}]
    assert (origin["seed"], origin["warmup"], origin["finished"]) == (3, 2, True)
    assert origin["versions"]["torch"] and origin["device"] and origin["command"]
    assert record_problems(path) == []


def test_the_name_says_benchmark_device_dtype_and_day(tmp_path):
    match = FILE_NAME.fullmatch(record(tmp_path).name)
    assert match
    assert match.group("benchmark", "device", "dtype") == ("bench", device_slug("cpu"), "float32")


def test_rows_survive_a_run_that_dies(tmp_path):
    with pytest.raises(ZeroDivisionError), Recorder("bench", "float32", COLUMNS, directory=tmp_path) as recorder:
        recorder.add(ROW)
        on_disk, origin = read_record(recorder.path)
        assert on_disk == [ROW | {"note": None}], "a row is on the disk as soon as it is added"
        assert origin["finished"] is False
        recorder.add(ROW | {"variant": "eager"})
        _ = 1 / 0
    rows, origin = read_record(recorder.path)
    assert [row["variant"] for row in rows] == ["sdpa", "eager"]
    assert origin["finished"] is False


def test_an_unknown_column_is_an_error(tmp_path):
    with pytest.raises(ValueError, match="extra"):
        record(tmp_path, [ROW | {"extra": 1}])


@pytest.mark.parametrize("benchmark", ["Bench", "my bench", "my-bench", ""])
def test_bad_names_are_refused(tmp_path, benchmark):
    with pytest.raises(ValueError, match="bad record name"):
        Recorder(benchmark, "float32", COLUMNS, directory=tmp_path)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        (["variant", "relative_error"], "'case' is missing"),
        (["case", "variant", "latency_ms_p50"], "'relative_error' is missing"),
        ([*COLUMNS, "latency"], "'latency' names no unit"),
        ([*COLUMNS, "ms_latency"], "'ms_latency' names no unit"),
    ],
)
def test_columns_without_a_unit_or_an_accuracy_are_refused(tmp_path, columns, message):
    with pytest.raises(ValueError, match=message):
        Recorder("bench", "float32", columns, directory=tmp_path)


def rewrite(path, **changes):
    """Writes the record's only row anew."""
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS)
        writer.writeheader()
        writer.writerow(ROW | changes)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda path: path.with_suffix(".json").unlink(), "no sidecar"),
        (lambda path: path.with_suffix(".json").write_text('{"date": "today"}'), "lacks 'commit'"),
        (lambda path: path.write_text(",".join(COLUMNS) + "\n"), "no rows"),
        (lambda path: path.write_text("case,variant,speed\na,b,3\n"), "'speed' names no unit"),
        (lambda path: rewrite(path, traffic_share=1.5), "traffic_share is 1.5, above its bound 1.001"),
        (lambda path: rewrite(path, latency_ms_p50=-1), "latency_ms_p50 is -1.0"),
        (lambda path: rewrite(path, relative_error=math.nan), "relative_error is nan"),
        (lambda path: rewrite(path, relative_error=math.inf), "relative_error is inf"),
    ],
)
def test_a_damaged_record_is_found(tmp_path, damage, message):
    path = record(tmp_path)
    damage(path)
    assert any(message in problem for problem in record_problems(path)), record_problems(path)


def test_a_share_of_a_measured_peak_may_pass_one_by_the_peaks_noise(tmp_path):
    columns = ["case", "variant", "peak_share", "peak_spread_ratio", "relative_error"]
    with Recorder("bench", "float32", columns, directory=tmp_path) as recorder:
        for share, spread in ((0.9, None), (1.03, 1.05), (1.06, 1.05), (1.01, None)):
            recorder.add({**dict.fromkeys(columns, 0.0), "peak_share": share, "peak_spread_ratio": spread})
    assert [problem.split(":", 1)[1] for problem in record_problems(recorder.path)] == [
        "4: peak_share is 1.06, above its bound 1.05",
        "5: peak_share is 1.01, above its bound 1.001",
    ]


def test_a_record_of_another_name_is_found(tmp_path):
    path = record(tmp_path)
    assert "not <benchmark>" in record_problems(path.rename(tmp_path / "bench.csv"))[0]


def test_the_newest_record_is_found(tmp_path):
    names = ["bench__b__float32__20250101", "bench__a__float32__20260101", "bench__a__bfloat16__20240101"]
    for name in [*names, "other__a__float32__20270101"]:
        (tmp_path / f"{name}.csv").touch()
    assert find_record("bench", tmp_path).stem == names[1]
    assert find_record("bench", tmp_path, device="b").stem == names[0]
    assert find_record("bench", tmp_path, dtype="bfloat16").stem == names[2]
    with pytest.raises(FileNotFoundError, match="bench"):
        find_record("bench", tmp_path, device="c")


def test_the_record_that_fits_this_machine_best_is_found(tmp_path, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)

    def kept(device, date, **sidecar):
        path = tmp_path / f"bench__{device}__float32__{date}.csv"
        path.touch()
        path.with_suffix(".json").write_text(json.dumps(sidecar))
        assert find_record("bench", tmp_path) == path

    kept("nvidia-h200", "20270101", cuda="13.0")
    kept("cpu-a", "20230101", isa="another")  # the same kind
    kept("cpu-b", "20240101")  # newer, from a time before records named their instruction set
    kept("cpu-c", "20220101", isa=instruction_set())
    kept(device_slug("cpu"), "20200101", isa="another")  # this processor itself


def test_a_record_that_a_lesson_prints_is_the_same_on_every_machine():
    """nbval compares printed outputs. Where a lesson only draws a record, the one that fits the machine is shown."""
    root, only_drawn, calls = MEASUREMENTS.parents[1], {"graphs", "parallel"}, 0
    for path in (*root.glob("notebooks/text/**/*.py"), *root.glob("kimivl_lab/lessons/*.py")):
        for call in re.findall(r"find_record\((\".*)\)", path.read_text("utf-8").replace("**names", LESSON_95)):
            benchmark = call.split('"')[1]
            given = {"device": "*", "dtype": "*"} | dict(re.findall(r'(device|dtype)="([^"]*)"', call))
            found = list(MEASUREMENTS.glob(f"{benchmark}__{given['device']}__{given['dtype']}__*.csv"))
            assert len(found) == 1 or benchmark in only_drawn, f"{path.name}: {call} chooses between {found}"
            calls += 1
    assert calls >= 10
