"""The A/B in engines, with a stub in the place of vLLM: what is recorded, refused, kept, and that nothing survives."""

import argparse
import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import ModuleType
from unittest.mock import Mock

import pytest

from kimivl_lab.bench import engine, engine_simulation
from kimivl_lab.bench.engine import ARMS, COLUMNS, EngineBench, Measured
from kimivl_lab.engines.client import Outcome
from kimivl_lab.engines.server import ServerError, group_lives, own_group, wait_for_health, wait_until
from kimivl_lab.engines.simulation import CallCost, Job, Limits, Stages, simulate
from kimivl_lab.engines.vllm import timed_server
from kimivl_lab.measure.records import read_record, record_problems

STUB = Path(__file__).with_name("stub_server.py")
# In the place of the engine's Python: it reads vLLM's options as a server would, and notes its process.
PYTHON = """#!{python}
import json, os, sys
given = dict(zip(sys.argv, sys.argv[1:]))
arm = json.loads(given["--hf-overrides"])["kimivl_lab_parts"][-1]
options = {options!r}
with open({groups!r}, "a") as file:
    print(arm, os.getpid(), file=file)
if options.get(arm, {{}}).get("broken"):
    sys.exit("no such model")
made = {{"from": 0, "port": int(given["--port"]), "delay": 0.01, **options.get("all", {{}}), **options.get(arm, {{}})}}
os.execv({python!r}, [{python!r}, {stub!r}, json.dumps(made)])
"""


@pytest.fixture
def bench(tmp_path, monkeypatch, capsys):
    """Runs the benchmark on stubs: exit code, its JSON document, rows, provenance, and what it said."""
    monkeypatch.setitem(engine_simulation.WORKLOADS, "published", ([(60, 40, 1)], (2,)))
    monkeypatch.setitem(engine_simulation.WORKLOADS, "receipts", ([(60, 120, 2), (30, 90, 1)], (1,)))
    monkeypatch.setattr(engine, "CALIBRATION", (((60, 40),), ((60, 120),), ((60, 40),) * 2, ((60, 120),) * 4))
    monkeypatch.setattr(engine_simulation, "_PREDICTED", 40)
    monkeypatch.setattr(engine_simulation, "published", lambda: iter([]))
    monkeypatch.setattr(engine, "write_random_checkpoint", lambda folder, **_: folder)
    monkeypatch.setenv("PYTHONPATH", str(STUB.parents[1]))
    started = tmp_path / "groups"
    started.write_text("")

    def run(*arguments, quick=True, **options):
        python = tmp_path / "python"
        names = {"processor" if name == "vllm" else name: given for name, given in options.items()}
        values = {"python": sys.executable, "options": names, "groups": str(started), "stub": str(STUB)}
        python.write_text(PYTHON.format(**values))
        python.chmod(0o755)
        given = ["--engine-python", str(python), "--out", str(tmp_path / "out"), "--device", "cpu", *arguments]
        with pytest.raises(SystemExit) as ended:
            engine.main([*given, *(["--quick"] if quick else [])])
        told = capsys.readouterr()
        (path,) = (tmp_path / "out").glob("*.csv")
        rows, origin = read_record(path)
        return ended.value.code, json.loads(told.out.splitlines()[-1]), rows, origin, path, told.err

    yield run
    groups = [line.split() for line in started.read_text().splitlines()]
    assert groups and not [arm for arm, group in groups if group_lives(int(group))]


def of(rows, phase, **wanted):
    return [row for row in rows if row["phase"] == phase and all(row[name] == value for name, value in wanted.items())]


def test_a_run_is_recorded_and_can_be_simulated_again(bench, tmp_path, capsys):
    """The clocks are the stub's own: exact, however busy this machine is. The tower's encodes three times as fast."""
    slow, fast = 0.0015, 0.0005
    made = {"vllm": {"per_token": slow}, "metadata": {"per_token": slow}, "tower": {"per_token": fast}}
    code, result, rows, origin, path, _ = bench(**made)
    assert code == 0 and result["other_answers"] == [] and record_problems(path) == []
    assert origin["finished"] and origin["engine"] == ["stub"] and origin["timer"].startswith("the client's")
    for workload in ("published", "receipts"):
        for share, part in (("light", 0.2), ("half", 0.5), ("high", 0.8)):
            loads = of(rows, "load", case=f"{workload} {share}")
            (capacity,) = of(rows, "capacity", workload=workload)
            assert [row["variant"] for row in loads] == list(ARMS) and {row["failed_count"] for row in loads} == {0}
            rates = [row["arrivals_per_s"] for row in loads]
            assert len(set(rates)) == 1 and rates[0] == pytest.approx(part * capacity["arrivals_per_s"])
            assert len({(row["tokens"], row["images"], row["requests_count"]) for row in loads}) == 1
    for row in of(rows, "calibration") + of(rows, "load"):
        per_token = fast if row["variant"] == "tower" else slow
        assert row["encoder_ms"] == pytest.approx(1e3 * per_token * row["tokens"], rel=0.01)
        assert row["encoder_ms"] < row["prefill_ms"] < row["ttft_ms"]
    assert len(of(rows, "simulation")) == 18 and all(row["error_ratio"] > 0 for row in of(rows, "simulation"))
    capsys.readouterr()
    engine.main(["--simulate", str(path), "--out", str(tmp_path / "again")])
    (again,) = (tmp_path / "again").glob("*.csv")
    assert read_record(again)[0] == of(rows, "simulation") + of(rows, "prediction")
    assert record_problems(again) == []


def outcomes(times):
    return [Outcome(n, 0.0, 1, 64, "" if time else "timeout", ttft_ms=time or None) for n, time in enumerate(times)]


def test_the_ratios_are_to_vllm_and_of_the_requests_that_both_answered():
    made = EngineBench(argparse.Namespace(quick=True, checkpoint=None), Mock(), Path(), {})
    made.rates = {"receipts": 2.0}
    times = [100.0 + n for n in range(40)]
    faster = [0.8 * time for time in times[:-1]]
    for arm, found in {"vllm": times, "metadata": times, "tower": [*faster, 0]}.items():
        encoder = [time * (0.5 if arm == "tower" else 1) / 1e3 for time in times]
        measured = Measured(outcomes(found), {"encoder_ms": sum(encoder)}, encoder, seconds=20.0)
        made.loads[arm, "receipts", "high"], made.different[arm] = {2: measured}, 0.0
    made.loads["vllm", "receipts", "high"][1] = Measured(outcomes([119.5] * 20), {}, [], 10.0)  # the others lack it
    vllm, metadata, tower = made.pooled_rows()
    assert "ttft_ratio" not in vllm and vllm["arrivals_per_s"] == 1.6 and vllm["ttft_ms"] == 119.5
    assert (vllm["requests_count"], vllm["restart_count"], tower["restart_count"]) == (60, 2, 1)
    assert (metadata["ttft_ratio"], metadata["note"]) == (1, "no difference shown")
    assert tower["failed_count"] == 1 and tower["answered_per_s"] == 39 / 20
    assert tower["ttft_low_ratio"] <= 0.8 <= tower["ttft_high_ratio"] and tower["note"] == "tower is faster"
    assert (tower["ttft_ratio"], tower["encoder_ratio"]) == (0.8, 0.5)
    for arm, second in (("vllm", times), ("tower", [1.01 * one for one in times])):  # the restarts do not agree
        made.loads[arm, "receipts", "high"][3] = Measured(outcomes(second), {}, [], 20.0)
    *_, tower = made.pooled_rows()
    assert tower["pairs_count"] == 2 and tower["ttft_high_ratio"] > 1 and tower["note"] == "no difference shown"
    assert (tower["ttft_least_ratio"], tower["ttft_most_ratio"]) == (0.8, 1.01)


def test_a_load_has_the_interval_of_its_restarts():
    """Two restarts of a server whose machine changed: 0.7 and 0.9 agree, and do not show that a third is below 1."""
    made = EngineBench(argparse.Namespace(quick=False, checkpoint=None), Mock(), Path(), {})
    made.rates, made.different = {"receipts": 2.0}, dict.fromkeys(ARMS, 0.0)
    times = [100.0 + n for n in range(12)]
    for restart, ratio in enumerate([0.7, 0.9], start=1):
        for arm, factor in (("vllm", 1.0), ("tower", ratio)):
            found = Measured(outcomes([factor * time for time in times]), {}, [], 10.0)
            made.loads.setdefault((arm, "receipts", "light"), {})[restart] = found
    _, tower = made.pooled_rows()
    assert tower["pairs_count"] == 2 and tower["ttft_ratio"] == pytest.approx((0.7 * 0.9) ** 0.5, abs=1e-4)
    assert tower["ttft_low_ratio"] < 0.1 and tower["ttft_high_ratio"] > 1 and tower["note"] == "no difference shown"
    for restart, ratio in enumerate([0.79, 0.8, 0.81], start=3):
        made.loads["vllm", "receipts", "light"][restart] = Measured(outcomes(times), {}, [], 10.0)
        slower = Measured(outcomes([ratio * time for time in times]), {}, [], 10.0)
        made.loads["tower", "receipts", "light"][restart] = slower
    _, tower = made.pooled_rows()
    assert tower["pairs_count"] == 5 and tower["note"] == "tower is faster"


@pytest.mark.parametrize(
    "given",
    [
        *(["--restarts", "-1"], ["--restarts", "0"], ["--in-token-limit", "0"], ["--minutes", "nan"]),
        *(["--timeout", "inf"], ["--requests", "-3"], ["--checkpoint", "none"], ["--simulate", "none.csv"]),
    ],
)
def test_an_option_that_cannot_be_is_refused_before_a_server_starts(given, tmp_path, capsys):
    with pytest.raises(SystemExit) as ended:
        engine.main(["--engine-python", sys.executable, "--out", str(tmp_path / "out"), *given])
    told = capsys.readouterr().err
    assert ended.value.code == 2 and given[0] in told and given[1].rstrip("0") in told
    assert not (tmp_path / "out").exists()


def test_the_simulation_of_what_the_model_made_has_no_error():
    """Calibration from known stage times and loads that the model itself answers: they are found again."""
    stages = Stages(CallCost(0.01, 3e-4), CallCost(0.005, 2e-4), CallCost(0.002, 1e-8))
    settings = {"seed": 5, "in_token_limit": 1024, "new_tokens": 4, "batched_tokens": 4096, "max_requests": 16}
    settings["chunked"] = False
    rows = []
    for count in (1, 2, 4):
        images, prompt = [256] * count, 20 + 264 * count
        encode = stages.encode(images)
        sizes = {"case": f"{count} of 448x448", "images": count, "tokens": 256 * count, "prompt_tokens": prompt}
        times = {"encoder_ms": 1e3 * encode, "prefill_ms": 1e3 * (encode + stages.language([prompt]))}
        times |= {"outside_ms": 1e3 * stages.prepare([448 * 448] * count), "decode_ms": 1e3 * stages.language([1])}
        rows.append({"phase": "calibration", "variant": "vllm", **sizes, **times})
    common = {"case": "published half", "variant": "vllm", "workload": "published", "load_share": 0.5}
    common |= {"arrivals_per_s": 2.0}
    times = []
    for restart in (1, 2):
        rows.append({**common, "phase": "restart", "restart_count": restart, "requests_count": 50})
        requests = engine_simulation.drawn(settings, "published", "half", restart, 50, 2.0)
        jobs = [Job(one.arrival, (256, 256), 36, 4, (448 * 448,) * 2) for one in requests]
        times += simulate(jobs, stages, Limits(4096, None, 16, chunked=False)).ttft
    mean = 1e3 * sum(times) / len(times)
    rows.append({**common, "phase": "load", "requests_count": 100, "ttft_ms": mean})
    (simulated,) = [row for row in engine_simulation.simulated_rows(rows, settings) if row["phase"] == "simulation"]
    assert simulated["error_ratio"] == pytest.approx(1, abs=1e-4) and simulated["policy"] == "vllm"


def test_an_arm_that_answers_otherwise_is_not_timed(bench):
    code, result, rows, *_ = bench(metadata={"answers": 1})
    assert code == 1 and result["other_answers"] == ["metadata"]
    (check,) = of(rows, "check", variant="metadata")
    assert check["relative_error"] == 1 and not of(rows, "load", variant="metadata")
    assert of(rows, "load", variant="tower") and of(rows, "load", variant="vllm")


def test_a_server_that_dies_ends_the_run_with_what_it_has(bench):
    code, result, rows, origin, path, told = bench(tower={"die": 40}, metadata={"per_token": 0.0001})
    assert code == 1 and "tower" in result["stopped"] and "Traceback" not in told
    assert of(rows, "restart", variant="vllm") and of(rows, "load", variant="vllm")
    assert not origin["finished"] and record_problems(path) == []


def test_a_server_that_hangs_ends_the_run_with_what_it_has(bench):
    code, result, rows, *_ = bench("--timeout", "3", vllm={"mode": "hang", "from": 60})
    assert code == 1 and "timeout" in result["stopped"]
    assert of(rows, "capacity") and any(row["failed_count"] for row in of(rows, "restart"))


def test_a_server_that_does_not_start_is_quoted(bench):
    code, result, rows, *_ = bench(vllm={"broken": True})
    assert code == 1 and "no such model" in result["stopped"] and rows == []


def test_a_signal_ends_the_run_and_its_server(bench, tmp_path):
    """SIGTERM while a load runs; the servers have process groups that get no signal from the terminal."""

    def interrupt():
        while not any("capacity" in path.read_text() for path in tmp_path.glob("out/*.csv")):
            time.sleep(0.02)
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=interrupt, daemon=True).start()
    code, result, rows, origin, *_ = bench()
    assert code == 1 and result["stopped"] == "SIGTERM" and not origin["finished"]
    assert of(rows, "capacity") and not of(rows, "restart", variant="tower")


def test_a_signal_that_nohup_ignores_stays_ignored():
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with engine._ends_on_signals():
            os.kill(os.getpid(), signal.SIGHUP)
        with pytest.raises(KeyboardInterrupt), engine._ends_on_signals():
            os.kill(os.getpid(), signal.SIGTERM)
    finally:
        signal.signal(signal.SIGHUP, before)


def test_the_timed_server_turns_on_the_clock_that_has_no_option(monkeypatch):
    """With modules in the place of vLLM's: the options that its main program parses hold the clock."""
    cli_args, entry, parsed = ModuleType("cli_args"), ModuleType("entry"), []
    cli_args.__dict__["make_arg_parser"] = lambda parser: parser
    entry.__dict__["main"] = lambda: parsed.append(
        cli_args.__dict__["make_arg_parser"](argparse.ArgumentParser()).parse_args([])
    )
    monkeypatch.setitem(sys.modules, "vllm.entrypoints.launchers.cli_args", cli_args)
    monkeypatch.setitem(sys.modules, "vllm.entrypoints.launchers.api_server.entry", entry)
    timed_server.main()
    assert parsed == [argparse.Namespace(enable_mm_processor_stats=True)]


def test_without_an_engine_it_says_how_to_make_one(capsys, tmp_path):
    with pytest.raises(SystemExit) as ended:
        engine.main(["--engine-python", str(tmp_path / "none"), "--out", str(tmp_path)])
    assert ended.value.code == 2 and "make engine-venv" in capsys.readouterr().err


def test_the_published_row_is_simulated_from_its_eager_mean(monkeypatch):
    """One unknown time makes the eager mean the published one; the graph's follow. Short answers save time."""
    monkeypatch.setattr(engine_simulation, "_ANSWER", 8)
    rows = list(engine_simulation.published())
    assert len(rows) == 12
    for eager, graph in zip(rows[::2], rows[1::2], strict=True):
        assert (eager["variant"], graph["variant"]) == ("simulated eager", "simulated graph")
        assert eager["error_ratio"] == pytest.approx(1, abs=0.01) and eager["ttft_ms"] == pytest.approx(132.9, rel=0.01)
        assert graph["ttft_ms"] < eager["ttft_ms"] and graph["ttft_ms"] / graph["error_ratio"] == pytest.approx(
            111.13, rel=1e-4
        )
    assert set().union(*rows) <= set(COLUMNS)


def test_a_killed_run_leaves_no_server(tmp_path):
    """kill -9: the block's end never runs."""
    program = (
        "import sys, time\nfrom pathlib import Path\nfrom kimivl_lab.engines.server import own_group\n"
        "with own_group(['sleep', '600'], Path(sys.argv[1])) as process:\n    print(process.pid, flush=True)\n"
        "    time.sleep(600)\n"
    )
    command = [sys.executable, "-c", program, str(tmp_path / "log")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout
        group = int(process.stdout.readline())
        assert group_lives(group)
        process.kill()
    assert wait_until(lambda: not group_lives(group), 10)


def test_no_process_survives_a_server(tmp_path):
    """A parent and a child that ignore SIGTERM, as a hanging server and its worker do, and a block that fails."""
    program = (
        "import signal, subprocess, sys, time\n"
        "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        "subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'])\n"
        "time.sleep(600)\n"
    )
    with (
        pytest.raises(KeyboardInterrupt),
        own_group([sys.executable, "-c", program], tmp_path / "log", patience=0.5) as process,
    ):
        raise KeyboardInterrupt
    assert not group_lives(process.pid)
    with (
        own_group([sys.executable, "-c", "import time; time.sleep(600)"], tmp_path / "log") as process,
        pytest.raises(ServerError, match="did not come up in 0 s"),
    ):
        wait_for_health("http://127.0.0.1:9", process, tmp_path / "log", 0.3)
    assert not group_lives(process.pid)
