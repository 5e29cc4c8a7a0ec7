"""All that a GPU can show, in order of value: published size, random weights, under eight minutes.

    python -m kimivl_lab.bench.gpu_suite --check                     a minute: is everything here that it needs?
    python -m kimivl_lab.bench.gpu_suite [--out DIR] [--only encoder] [--budget 460]
    python -m kimivl_lab.bench.gpu_suite --device cpu --quick        a dry run of every step, with small towers

It runs from the repository's folder (PYTHONPATH=. is enough): torch, transformers, numpy and Pillow must be installed,
and pytest for the step "tests". The step "engine" is an A/B inside vLLM servers. It needs vLLM and httpx, and this
library installed beside vLLM. Its servers take minutes, so ask for it by --only engine or a --budget of 800.

Each step is a process group of its own. At its limit the whole group is killed, and a step that fails, even by taking
the device down, loses only the rows that it has not written yet. The benchmarks check before they time and write their
records row by row into --out. Beside the records, in the folder `gpu_suite`:

    results.json    rewritten after every step: what ran, what failed and why, what each claim of the lessons came to
    NAME.log        everything that a step printed

Ctrl-C, SIGTERM and SIGHUP end the running step and its group, and the results so far are written and shown. The last
line is one JSON document. The exit code is 0, 1 if a step failed, 2 for bad arguments, 130 if it was interrupted.

Test: tests/test_gpu_suite.py.
"""

import argparse
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NoReturn

import torch

from ..measure.provenance import provenance
from . import gpu_claims, gpu_ready, harness

TESTS = "pytest"
ENGINE = "engine"
_TOWERS = ("encoder", "graphs", "ladder", "syncs", "parallel")  # they have --preset
_POLL_S = 0.1
_LAST_LINES = 4


@dataclass(frozen=True)
class Step:
    """One process: `python -m kimivl_lab.bench.<module> <arguments>`, or pytest on the tests marked gpu.

    Attributes:
        seconds: that it is expected to take, start included.
        limit: seconds after which it is killed.
    """

    name: str
    module: str
    seconds: int
    arguments: tuple[str, ...] = ()
    limit: int = 90


# How `seconds` came about, on one H100 or H200 with no compiled kernel on disk. Each step: 10 s for its imports and its
# CUDA context. A step with a published tower: 6 s more, since it draws 411 million weights on the host. A forward of
# 4,096 patches is 5 TFLOP, so 10 ms at half of the data sheet's rate: a few hundred of them are seconds. What is left:
#   checks     one compiled rotation, 10 s; a group by NCCL, 3 s; five tiny captures
#   tests      collection 8 s; ranks by NCCL 10 s; narrow towers of 27 layers on the pretended device, 10 s
#   encoder    compiled blocks 12 s; 3 batches, 3 variants and a matrix product of 8192, 10 rounds
#   ladder     compiled rotation 10 s; 13,736 patches under one mask take 27 TFLOP and, at 10 rounds, 5 s
#   graphs     host times of 7 narrow towers 10 s; 21 budgets and fills, 2 variants, 18 rounds of 15 ms at most, 8 s
#   syncs      pretended counts 3 s; 4 loops of 64 products of 4096 in float32, 10 rounds, 8 s
#   host       6 captures of a narrow tower of 27 layers, 200 rounds of 10 variants of at most 3 ms, 6 s
#   position   float64 references on the host 5 s; 10 batches, 6 variants, 23 rounds of 1 ms at most
#   rope       compiled rotation for 4 batches 8 s
#   attention  4 batches, at most 5 kernels, 17 rounds
#   parallel   two starts of ranks 20 s; batches of at most 16 images
#   engine     three starts of a vLLM server, a minute each, and its loads: more than is left of eight minutes, so it
#              needs --only engine or a larger --budget
STEPS = (
    Step("checks", "gpu_checks", 30),
    Step("tests", TESTS, 40, limit=120),
    Step("encoder", "encoder", 40, ("--dtype", "bfloat16", "--compiled")),
    Step("ladder", "ladder", 40, ("--dtype", "bfloat16", "--preset", "kimi-vl-a3b", "--repeats", "5")),
    Step("graphs", "graphs", 45, ("--dtype", "bfloat16", "--preset", "kimi-vl-a3b"), limit=120),
    Step("syncs", "syncs", 35, ("--dtype", "bfloat16")),
    Step("host", "host", 20, limit=60),
    Step("position", "position", 20, ("--dtype", "bfloat16"), limit=60),
    Step("rope", "rope", 20, ("--dtype", "bfloat16"), limit=60),
    Step("attention", "attention", 15, limit=60),
    Step("parallel", "parallel", 40, ("--dtype", "bfloat16", "--preset", "kimi-vl-a3b")),
    Step("upload", "upload", 15, limit=60),
    Step("engine", ENGINE, 300, ("--quick", "--dtype", "bfloat16"), limit=600),
)


class Interrupted(BaseException):
    """SIGINT, SIGTERM or SIGHUP came."""


# --- steps -----------------------------------------------------------------------------------------------------------


def arguments_of(step: Step, options: argparse.Namespace) -> list[str]:
    """The step's command line, after the module."""
    arguments = [*step.arguments, "--out", str(options.out), "--device", options.device, "--seed", str(options.seed)]
    arguments += ["--quick"] * options.quick
    if options.preset and step.module in _TOWERS:
        arguments += ["--preset", options.preset]
    return arguments


def program_of(step: Step, options: argparse.Namespace) -> list[str]:
    """The step's whole command."""
    if step.module == ENGINE:
        step = replace(step, arguments=(*step.arguments, "--engine-python", gpu_ready.engine_python(options.device)[0]))
    if step.module != TESTS:
        return [sys.executable, "-m", f"kimivl_lab.bench.{step.module}", *arguments_of(step, options)]
    files = [str(file) for file, missing in gpu_ready.gpu_tests().items() if not missing]
    fixed = ["-m", "gpu", "-q", "--tb=short", "-p", "no:cacheprovider", "--continue-on-collection-errors"]
    return [sys.executable, "-m", "pytest", *fixed, *files]


def cannot_run(step: Step, options: argparse.Namespace) -> str | None:
    """Why a step is skipped on this machine; None if it can run."""
    if step.module == ENGINE:
        return gpu_ready.engine_python(options.device)[1] or None
    if step.module != TESTS:
        return None
    if "pytest" in gpu_ready.missing_packages(["pytest"]):
        return "pytest is not installed"
    return None if not all(gpu_ready.gpu_tests().values()) else "no test file can be imported here"


def run_step(step: Step, options: argparse.Namespace, limit: float) -> dict[str, Any]:
    """Runs one step in a process group of its own, shows what it prints and kills the group at the limit.

    Returns:
        "status": "ok", "failed" or "interrupted", the last two with "why"; "wall_s"; "log"; "records", the tables that
        it wrote; "result", the JSON document that it printed, if it did.
    """
    folder = Path(options.out) / "gpu_suite"
    folder.mkdir(parents=True, exist_ok=True)
    log = folder / f"{step.name}.log"
    before, clock, status, why = _records(options), time.monotonic(), "ok", None
    with log.open("wb") as written, log.open("rb") as shown:
        process = subprocess.Popen(
            program_of(step, options), stdout=written, stderr=subprocess.STDOUT, start_new_session=True
        )
        try:
            while process.poll() is None:
                if time.monotonic() - clock > limit:
                    status, why = "failed", f"still running after its limit of {limit:.0f} s; its rows so far are kept"
                    break
                _show(shown.read())
                time.sleep(_POLL_S)
        except Interrupted as reason:
            status, why = "interrupted", str(reason)
        finally:
            _kill_group(process)
        _show(shown.read())
    text = log.read_text(errors="replace", encoding="utf-8")
    if why is None and process.returncode:
        status, why = "failed", _ended(process.returncode)
    if step.module == TESTS:
        left_out = {str(file): missing for file, missing in gpu_ready.gpu_tests().items() if missing}
        result = {"tests": _last_lines(text, 1), "left_out_for_want_of": left_out}
    else:
        result = _document(text)
    return {
        "status": status,
        **({"why": f"{why}: {_last_lines(text)}"} if why else {}),
        "wall_s": round(time.monotonic() - clock, 1),
        "log": str(log),
        "records": [path for path, changed in _records(options).items() if changed != before.get(path)],
        **({"result": result} if result else {}),
    }


def _records(options: argparse.Namespace) -> dict[str, int]:
    """When each record in the folder was changed last."""
    return {str(path): path.stat().st_mtime_ns for path in sorted(Path(options.out).glob("*.csv"))}


def _kill_group(process: subprocess.Popen[bytes]) -> None:
    """Kills what is left of the step, its children too; a step that ended by itself may have left some."""
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _ended(code: int) -> str:
    if code >= 0:
        return f"exit code {code}"
    with suppress(ValueError):
        return f"ended by {signal.Signals(-code).name}"
    return f"ended by signal {-code}"


def _document(text: str) -> dict[str, Any] | None:
    """The last line that is a JSON object; libraries may print after it."""
    for line in reversed(text.splitlines()):
        if line.startswith("{"):
            with suppress(json.JSONDecodeError):
                return json.loads(line)
    return None


def _last_lines(text: str, count: int = _LAST_LINES) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip() and not line.startswith("{")]
    return " | ".join(line[:300] for line in lines[-count:]) or "it printed nothing"


def _show(output: bytes | str) -> None:
    """On stderr, as far as that is still open: the terminal may be gone."""
    text = output if isinstance(output, str) else output.decode(errors="replace")
    with suppress(OSError):
        sys.stderr.write(text)
        sys.stderr.flush()


# --- the suite -------------------------------------------------------------------------------------------------------


def run_steps(steps: Sequence[Step], options: argparse.Namespace) -> dict[str, Any]:
    """Runs the steps that fit the budget and keeps `results.json` current.

    Returns:
        What the file holds: "interrupted", "steps" by name and "claims".
    """
    results: dict[str, Any] = {
        "benchmark": "gpu_suite",
        **provenance(options.device, seed=options.seed, quick=options.quick, budget_s=options.budget),
        "interrupted": False,
        "steps": {step.name: {"status": "not started", "expected_s": step.seconds} for step in steps},
    }
    deadline = time.monotonic() + options.budget
    with _signals_interrupt():
        try:
            for step in steps:
                found, left = results["steps"][step.name], deadline - time.monotonic()
                if (reason := cannot_run(step, options)) is not None:
                    found |= {"status": "skipped", "why": reason}
                elif left < step.seconds and not options.quick:
                    found |= {"status": "skipped", "why": f"{left:.0f} s left, expected to take {step.seconds} s"}
                else:
                    _show(f"=== {step.name}: {step.seconds} s expected, {left:.0f} s left\n")
                    found["status"] = "running"
                    _write(results, options)
                    found |= run_step(step, options, limit=max(1.0, min(step.limit, left)))
                if found["status"] != "ok":
                    _show(f"=== {step.name} {found['status']}: {found['why']}\n")
                _write(results, options)
                if found["status"] == "interrupted":
                    raise Interrupted(found["why"])
        except Interrupted as reason:
            results["interrupted"] = True
            for found in results["steps"].values():
                if found["status"] == "running":
                    found |= {"status": "interrupted", "why": str(reason)}
        _write(results, options)
    return results


def _write(results: dict[str, Any], options: argparse.Namespace) -> None:
    """Judges the claims on the records so far, and replaces the file in one move: a kill leaves the old or the new."""
    written = [path for found in results["steps"].values() for path in found.get("records", ())]
    results["claims"] = gpu_claims.judge(Path(path) for path in written)
    path = Path(options.out) / "gpu_suite" / "results.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    new = path.with_suffix(".new")
    new.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    os.replace(new, path)


@contextmanager
def _signals_interrupt() -> Generator[None]:
    """Inside it, SIGINT, SIGTERM and SIGHUP raise `Interrupted`: the steps have sessions of their own and get none."""

    def interrupt(number: int, frame: object) -> NoReturn:
        raise Interrupted(f"{signal.Signals(number).name} came")

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    for number, handler in before.items():
        if handler is not signal.SIG_IGN:  # nohup ignores SIGHUP, and the suite then runs on
            signal.signal(number, interrupt)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def summary(results: Mapping[str, Any]) -> str:
    """What ran, what did not and why, and what the claims came to."""
    lines = ["", f"{'step':<11}{'expected':>9}{'took':>8}  result"]
    for name, found in results["steps"].items():
        took = f"{found['wall_s']:.0f} s" if "wall_s" in found else ""
        why = f": {found['why']}" if "why" in found else ""
        lines.append(f"{name:<11}{found['expected_s']:>7} s{took:>8}  {found['status']}{why}")
    few = " (a quick run has too few rounds to decide)" if results["quick"] else ""
    lines += ["", f"{'finding':<13}{'lesson':<8}claim{few}"]
    for claim in results["claims"]:
        numbers = f" ({claim['numbers']})" if claim["numbers"] else ""
        lines.append(f"{claim['finding']:<13}{claim['lesson']:<8}{claim['claim']}. {claim['decided_by']}{numbers}")
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = harness.parser("gpu_suite", __doc__)
    parser.set_defaults(device="cuda")
    parser.add_argument("--check", action="store_true", help="only say whether everything that it needs is here")
    parser.add_argument("--budget", type=float, default=460, help="seconds for all steps (%(default)s)")
    parser.add_argument("--only", help="steps whose name begins so, e.g. encoder")
    parser.add_argument("--preset", help='of the towers: "kimi-vl-a3b"; in a dry run on a CPU "tiny"')
    options = parser.parse_args(arguments)
    if not hasattr(os, "killpg"):
        parser.error("it ends a step by its process group, which Windows does not have: run it in Linux or WSL")
    on_cpu = not options.device.startswith("cuda")
    if options.preset is None and on_cpu and options.quick:
        options.preset = "tiny"
    steps = [step for step in STEPS if step.name.startswith(options.only or "")]
    if not steps:
        parser.error(f"no step begins with {options.only!r}: {', '.join(step.name for step in STEPS)}")
    if options.check:
        sys.exit(gpu_ready.report(options, run_step, steps))
    if not on_cpu and not torch.cuda.is_available():
        parser.error(f"{gpu_ready.no_cuda()}; --check says what is missing, --device cpu --quick is a dry run")
    expected = " + ".join(f"{step.name} {step.seconds}" for step in steps)
    harness.progress(f"expected: {expected} = {sum(step.seconds for step in steps)} s, budget {options.budget:.0f} s")
    results = run_steps(steps, options)
    _show(f"{summary(results)}\n")
    with suppress(OSError):
        harness.finish(results)
    failed = any(found["status"] == "failed" for found in results["steps"].values())
    sys.exit(130 if results["interrupted"] else 1 if failed else 0)


if __name__ == "__main__":
    main()
