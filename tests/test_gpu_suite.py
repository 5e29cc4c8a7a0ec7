"""The suite for a GPU: a step that fails, hangs or is interrupted loses only itself; records decide the claims."""

import argparse
import importlib
import json
import os
import signal
import sys
import threading
import time
from pathlib import Path

import pytest
import torch

from kimivl_lab.bench import gpu_claims, gpu_ready, gpu_suite
from kimivl_lab.bench.gpu_claims import CLAIMS
from kimivl_lab.bench.gpu_suite import ENGINE, STEPS, TESTS, Step, run_steps
from kimivl_lab.measure.records import Recorder

FINE = """print('{"benchmark": "fine", "results": 1}'); print("a warning at exit")"""
RECORDS = "open(r'{folder}/rope__cpu-x__float32__20261201.csv', 'w').write('case,variant,relative_error\\n'); " + FINE
FAILS = "import sys; print('loading', file=sys.stderr); raise RuntimeError('CUDA error: an illegal memory access')"
DIES = "import os, signal; os.kill(os.getpid(), signal.SIGSEGV)"
HANGS = """
import subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
open(r"{folder}/child", "w").write(str(child.pid))
print("round 1 of 9", flush=True)
time.sleep(600)
"""


@pytest.fixture
def options(tmp_path, monkeypatch):
    """Of a suite whose steps are short scripts: the argument of each is what Python runs."""
    fill = {"folder": tmp_path}

    def program(step, options):
        script = step.arguments[0]
        return [sys.executable, "-S", "-c", script.replace("{folder}", str(fill["folder"]))]

    monkeypatch.setattr(gpu_suite, "program_of", program)
    return argparse.Namespace(budget=60.0, out=tmp_path, device="cpu", seed=0, quick=False, preset=None, only=None)


def written(options) -> dict:
    return json.loads((options.out / "gpu_suite" / "results.json").read_text())


def has_ended(pid: int) -> bool:
    """Whether a process is gone, or waits for a parent that will not come."""
    for _ in range(100):
        try:
            if Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z":
                return True
        except FileNotFoundError:
            return True
        time.sleep(0.02)
    return False


def test_steps_that_fail_die_or_hang_lose_only_themselves(options, capfd):
    steps = [
        Step("fails", "x", 1, (FAILS,)),
        Step("hangs", "x", 1, (HANGS,), limit=1),
        Step("dies", "x", 1, (DIES,)),
        Step("long", "x", 10_000, (FINE,)),
        Step("fine", "x", 1, (RECORDS,)),
        Step("next", "x", 1, (FINE,)),
    ]
    (options.out / "position__cpu-x__float32__20261130.csv").write_text("of an earlier run")
    results = run_steps(steps, options)
    assert written(options) == results and not results["interrupted"]
    found = results["steps"]
    assert {name: one["status"] for name, one in found.items()} == {
        **dict.fromkeys(("fails", "hangs", "dies"), "failed"),
        "long": "skipped",
        **dict.fromkeys(("fine", "next"), "ok"),
    }
    assert found["fails"]["why"].startswith("exit code 1: ") and "an illegal memory access" in found["fails"]["why"]
    assert "limit of 1 s" in found["hangs"]["why"] and "round 1 of 9" in found["hangs"]["why"]
    assert found["dies"]["why"].startswith("ended by SIGSEGV") and "10000 s" in found["long"]["why"]
    assert found["fine"]["result"] == {"benchmark": "fine", "results": 1}
    assert [Path(path).name for path in found["fine"]["records"]] == ["rope__cpu-x__float32__20261201.csv"]
    assert not any(found[name].get("records") for name in ("fails", "hangs", "dies", "next"))
    assert has_ended(int((options.out / "child").read_text())), "the child of the step that hung"
    assert "loading" in capfd.readouterr().err and "Traceback" in Path(found["fails"]["log"]).read_text()
    text = gpu_suite.summary(results)
    assert all(name in text for name in found) and all(claim.text in text for claim in CLAIMS)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM], ids=lambda number: number.name)
def test_an_interrupt_ends_the_step_and_keeps_what_is_done(options, number, request):
    if threading.current_thread() is not threading.main_thread():
        pytest.skip("signals reach the main thread only")
    inherited = signal.signal(number, signal.default_int_handler)  # a shell's background job ignores SIGINT
    request.addfinalizer(lambda: signal.signal(number, inherited))
    before, child = signal.getsignal(number), options.out / "child"

    def interrupt_when_running():
        while not (child.exists() and child.read_text()):
            time.sleep(0.02)
        os.kill(os.getpid(), number)

    steps = [Step("fine", "x", 1, (FINE,)), Step("hangs", "x", 1, (HANGS,)), Step("after", "x", 1, (FINE,))]
    thread = threading.Thread(target=interrupt_when_running, daemon=True)
    thread.start()
    results = run_steps(steps, options)
    thread.join(5)
    assert results == written(options) and results["interrupted"]
    statuses = {name: one["status"] for name, one in results["steps"].items()}
    assert statuses == {"fine": "ok", "hangs": "interrupted", "after": "not started"}
    assert results["steps"]["hangs"]["why"] == f"{number.name} came: round 1 of 9"
    assert has_ended(int(child.read_text())) and signal.getsignal(number) is before


def test_a_terminal_that_is_gone_ends_nothing(options, monkeypatch):
    class Gone:
        def write(self, text):
            raise OSError(5, "Input/output error")

    monkeypatch.setattr(signal, "getsignal", lambda number: signal.SIG_IGN)  # as under nohup
    handler = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    monkeypatch.setattr(sys, "stderr", Gone())
    signals = "import os, signal; os.kill(os.getppid(), signal.SIGHUP); " + FINE
    results = run_steps([Step("fine", "x", 1, (signals,)), Step("fails", "x", 1, (FAILS,))], options)
    signal.signal(signal.SIGHUP, handler)
    assert [one["status"] for one in results["steps"].values()] == ["ok", "failed"] and not results["interrupted"]


def test_a_kill_in_the_middle_leaves_the_results_of_the_others(options, monkeypatch):
    class Killed(BaseException):
        """Nothing of the suite runs after it, as after SIGKILL."""

    run_step = gpu_suite.run_step

    def killed_at_second(step, *arguments, **more):
        if step.name == "second":
            raise Killed
        return run_step(step, *arguments, **more)

    monkeypatch.setattr(gpu_suite, "run_step", killed_at_second)
    with pytest.raises(Killed):
        run_steps([Step(name, "x", 1, (FINE,)) for name in ("first", "second", "third")], options)
    statuses = {name: one["status"] for name, one in written(options)["steps"].items()}
    assert statuses == {"first": "ok", "second": "running", "third": "not started"}


def test_the_exit_code_and_the_last_line_say_how_it_went(options, monkeypatch, capsys):
    monkeypatch.setattr(gpu_suite, "STEPS", (Step("fine", "x", 1, (FINE,)), Step("fails", "x", 1, (FAILS,))))
    for only, code in (("fine", 0), ("f", 1), ("none", 2)):
        with pytest.raises(SystemExit) as ended:
            gpu_suite.main(["--device", "cpu", "--out", str(options.out), "--only", only])
        assert ended.value.code == code
    streams = capsys.readouterr()
    assert json.loads(streams.out.splitlines()[-1])["steps"]["fails"]["status"] == "failed"
    assert "fine 1 + fails 1 = 2 s, budget 460 s" in streams.err
    if not torch.cuda.is_available():
        with pytest.raises(SystemExit) as ended:
            gpu_suite.main(["--out", str(options.out)])
        assert ended.value.code == 2


# --- the steps -------------------------------------------------------------------------------------------------------


def test_the_steps_fit_six_of_their_eight_minutes_and_the_most_valuable_come_first():
    assert sum(step.seconds for step in STEPS if step.module != ENGINE) <= 360 and STEPS[-1].module == ENGINE
    assert all(step.seconds < step.limit for step in STEPS)
    assert [step.name for step in STEPS[:5]] == ["checks", "tests", "encoder", "ladder", "graphs"]


def test_the_tests_step_runs_the_files_that_can_be_imported_and_names_the_others(tmp_path, monkeypatch):
    options = argparse.Namespace(out=tmp_path, device="cpu", seed=0, quick=True, preset="tiny")
    step = next(step for step in STEPS if step.module == TESTS)
    files = list(gpu_ready.gpu_tests())
    assert Path("tests/test_graph_runner.py") in files and Path("tests/test_geometry.py") not in files
    assert all("pytest" in program for program in [gpu_suite.program_of(step, options)])
    monkeypatch.setattr(gpu_ready, "gpu_tests", lambda: {files[0]: ("peft",), files[1]: ()})
    program = gpu_suite.program_of(step, options)
    assert str(files[1]) in program and str(files[0]) not in program and gpu_suite.cannot_run(step, options) is None
    monkeypatch.setattr(
        gpu_suite, "program_of", lambda step, options: [sys.executable, "-S", "-c", "print('3 passed')"]
    )
    assert gpu_suite.run_step(step, options, 10)["result"] == {
        "tests": "3 passed",
        "left_out_for_want_of": {str(files[0]): ("peft",)},
    }
    monkeypatch.setattr(gpu_ready, "missing_packages", lambda names: sorted(names))
    assert gpu_suite.cannot_run(step, options) == "pytest is not installed"


def test_the_engine_step_needs_a_vllm_for_the_device_and_this_library_beside_it(tmp_path, monkeypatch):
    def found(device):
        gpu_ready.engine_python.cache_clear()
        return gpu_ready.engine_python(device)

    monkeypatch.setattr(gpu_ready, "ROOT", tmp_path)  # without .engine-venv
    step, environment = STEPS[-1], tmp_path / ".engine-venv" / "bin"
    monkeypatch.chdir(tmp_path)  # the project's folder has this library's entry point
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\nexec {PYTHON} -S "$@"\n')  # -S: no package but those of the folder
    python.chmod(0o755)
    options = argparse.Namespace(out=tmp_path, device="cpu", seed=0, quick=False, preset=None)
    assert found("cpu") == ("", f"{python} has no vLLM")
    assert (
        run_steps([step], argparse.Namespace(**vars(options), budget=900.0))["steps"]["engine"]["status"] == "skipped"
    )
    (tmp_path / "vllm.py").touch()
    assert "without this library" in found("cpu")[1]
    (tmp_path / "lab-1.dist-info").mkdir()
    entry = "[vllm.general_plugins]\nkimivl_lab = kimivl_lab_vllm:register\n"
    (tmp_path / "lab-1.dist-info" / "entry_points.txt").write_text(entry)
    (tmp_path / "torch.py").write_text("class version:\n    cuda = None\n")
    assert found("cuda") == ("", f"{python} has a vLLM for CPUs")
    environment.mkdir(parents=True)
    (environment / "python").symlink_to(python)
    assert found("cpu") == (str(python), "") and gpu_suite.cannot_run(step, options) is None
    program = gpu_suite.program_of(step, options)
    assert program[program.index("--engine-python") + 1] == str(python) and "--quick" in program
    gpu_ready.engine_python.cache_clear()


PYTHON = sys.executable


def test_packages_that_a_file_imports_are_found():
    text = "import json\nimport no_such_package.part as x\nfrom another_missing import y\nfrom . import z\n"
    assert gpu_ready.missing_packages(gpu_ready._imported_by(text)) == ["another_missing", "no_such_package"]


# --- the claims ------------------------------------------------------------------------------------------------------


def test_claims_look_at_columns_that_their_benchmarks_write():
    for claim in CLAIMS:
        module = importlib.import_module(f"kimivl_lab.bench.{claim.benchmark}")
        assert claim.column in module.COLUMNS and claim.benchmark in {step.module for step in STEPS}


def record_of(benchmark, rows, folder, dtype="bfloat16"):
    columns = ("case", "variant", "relative_error", *(name for name in rows[0] if name not in ("case", "variant")))
    recorder = Recorder(benchmark, dtype, list(dict.fromkeys(columns)), directory=folder)
    with recorder as record:
        for row in rows:
            record.add({"relative_error": 0.001, **row})
    return recorder.path


def findings(*records):
    return {one["claim"]: one for one in gpu_claims.judge(records)}


def test_without_records_nothing_is_measured(tmp_path):
    assert {one["finding"] for one in findings().values()} == {"not measured"}
    on_cpu = [{"case": "a", "variant": "host", "syncs_count": None, "pretended_syncs_count": 0}]
    found = findings(record_of("syncs", on_cpu, tmp_path))
    assert {one["finding"] for one in found.values()} == {"not measured"}, "a CPU counts no syncs"
    cut = record_of("syncs", on_cpu, tmp_path, "float32")
    for left in (b"", b"case,variant,relative_error,syncs_count\nx,host", b"case,\xff"):
        cut.write_bytes(left)
        assert {one["finding"] for one in gpu_claims.judge([cut])} == {"not measured"}
    cut.with_suffix(".json").unlink()
    assert {one["finding"] for one in gpu_claims.judge([cut])} == {"not measured"}


@pytest.mark.parametrize("good", [True, False])
def test_claims_are_decided_by_the_numbers_of_the_record(good, tmp_path):
    syncs = [
        {"case": "12 images", "variant": "host", "syncs_count": 0 if good else 2, "pretended_syncs_count": 0},
        {"case": "12 images", "variant": "per_layer", "syncs_count": 28, "pretended_syncs_count": 28},
    ]
    graphs = [
        {"case": "b", "variant": "replay", "phase": "budget", "speedup_ratio": 0.97 if good else 0.9},
        {"case": "b", "variant": "eager", "phase": "budget", "speedup_ratio": 1.0},
        {"case": "h", "variant": "replay", "phase": "host", "speedup_ratio": 4.0 if good else 0.5},
        {"case": "b", "variant": "replay", "phase": "capture", "speedup_ratio": None},
    ]
    times = {"interpolate": 9.0, "separable": 3.0, "cache_hit": 2.0 if good else 4.0}
    position = [{"case": "4x6", "variant": name, "latency_ms_p50": ms} for name, ms in times.items()]
    rungs = {"before": 9.0, "attention": 4.0, "graphs": 4.1 if good else 5.0}
    ladder = [{"case": "8 images", "variant": name, "latency_ms_p50": ms} for name, ms in rungs.items()]
    ladder.append({"case": "2 images", "variant": "before", "latency_ms_p50": 50.0})  # another case starts anew
    records = {"syncs": syncs, "graphs": graphs, "position": position, "ladder": ladder}
    found = findings(*(record_of(name, rows, tmp_path) for name, rows in records.items()))
    decided = {text: one["finding"] for text, one in found.items() if one["finding"] != "not measured"}
    right = {
        "graphs give the eager values: relative error of replays",
        "every rung of the ladder gives the reference's values",
    }
    assert {text for text, finding in decided.items() if finding == "held"} - right == (
        set(decided) - right if good else set()
    )
    assert right < set(decided) and len(decided) == 8
    shown = found["a warm forward with host grids waits for nothing"]
    assert shown["numbers"] == ("1 numbers from 0 to 0" if good else "1 of 1 numbers: 12 images bfloat16 2")
    assert shown["decided_by"] == "syncs: syncs_count"


def test_auto_is_judged_on_several_ranks_only(tmp_path):
    rows = [
        {"case": "a", "variant": name, "phase": "sweep", "ranks_count": 1, "latency_ms_p50": ms}
        for name, ms in {"data": 2.0, "tensor": 1.0, "auto": 1.05}.items()
    ]
    text = "the choice between data and tensor parallel is within a tenth of the better one"
    assert findings(record_of("parallel", rows, tmp_path))[text]["finding"] == "not measured"
    for ms, finding in ((1.05, "held"), (2.0, "did not hold")):
        several = [row | {"ranks_count": 2} for row in rows[:2]] + [rows[2] | {"ranks_count": 2, "latency_ms_p50": ms}]
        assert findings(record_of("parallel", several, tmp_path))[text]["finding"] == finding


# --- --check ---------------------------------------------------------------------------------------------------------


@pytest.mark.skipif(torch.cuda.is_available(), reason="a machine without CUDA")
def test_check_without_cuda_names_what_is_missing(tmp_path, capsys):
    with pytest.raises(SystemExit) as ended:
        gpu_suite.main(["--check", "--out", str(tmp_path)])
    streams = capsys.readouterr()
    assert ended.value.code == 1 and "NOT READY, missing: CUDA" in streams.err
    document = json.loads(streams.out)
    assert document["missing"] == ["CUDA"]
    assert {"versions", "disk", "benchmarks", "tests"} < {one["name"] for one in document["findings"]}


@pytest.fixture
def pretend_gpu(monkeypatch):
    """torch says that there is one GPU, with `free` MiB."""

    def pretend(free: int) -> None:
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda *which: "Pretended GPU")
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda *which: (free * 2**20, 80 * 2**30))
        monkeypatch.setattr(gpu_ready, "attention_unavailable", lambda *which: "flash_attn is not installed")

    return pretend


@pytest.mark.parametrize(
    ("free", "captured", "missing"),
    [
        (40_000, {"status": "ok", "wall_s": 9.0}, []),
        (1_000, {"status": "ok", "wall_s": 9.0}, ["GPU memory"]),
        (40_000, {"status": "failed", "why": "still running after its limit", "log": "x.log"}, ["graphs"]),
    ],
    ids=["ready", "memory", "capture"],
)
def test_check_on_a_gpu(free, captured, missing, pretend_gpu, tmp_path, capsys):
    pretend_gpu(free)
    options, asked = argparse.Namespace(out=tmp_path, device="cuda"), []

    def run_step(step, options, limit):
        asked.append((step.module, step.arguments, limit))
        return captured

    assert gpu_ready.report(options, run_step, STEPS) == bool(missing)
    streams = capsys.readouterr()
    document = json.loads(streams.out.splitlines()[-1])
    assert document["missing"] == missing
    states = {one["name"]: one["state"] for one in document["findings"]}
    assert states["flash-attn"] == "optional" and states["CUDA"] == "ok" and "compiler" in states
    assert [(module, limit < 60) for module, _, limit in asked] == [("gpu_checks", True)]
    assert captured.get("why", "Pretended GPU") in streams.err


def test_check_names_a_version_that_is_not_promised():
    good = {"python": "3.12.3", "torch": "2.11.0+cu130", "transformers": "5.17.0", "numpy": "2.4.1"}
    assert gpu_ready._versions(good).state == "ok"
    old = gpu_ready._versions(good | {"transformers": "5.16.2", "torch": "2.10.1+cu128"})
    assert old.state == "missing" and old.says.startswith(
        "torch 2.10.1+cu128 is here, <2.15,>=2.11 is asked for; transf"
    )


def test_check_names_a_benchmark_that_cannot_be_imported_and_a_folder_that_cannot_be_written(tmp_path):
    (tmp_path / "file").write_text("")
    options = argparse.Namespace(out=tmp_path / "file", device="cpu")
    found = {one.name: one for one in gpu_ready.findings(options, lambda *_: {}, [Step("x", "no_such_module", 1)])}
    assert found["benchmarks"].state == "missing" and "no_such_module" in found["benchmarks"].says
    assert found["disk"].state == "missing" and "cannot be written" in found["disk"].says
