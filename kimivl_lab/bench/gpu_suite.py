"""Every benchmark on one GPU: published size, random weights, under eight minutes.

    python -m kimivl_lab.bench.gpu_suite [--out DIR] [--device cuda] [--budget 460] [--quick]

It runs from the repository's folder (PYTHONPATH=. is enough; only torch, transformers, numpy and Pillow must be
installed). Each step is a benchmark in its own process, which checks before it times and writes its record row by row:
a step that fails, even by taking the device down, loses only its own rows. Steps that no longer fit the budget are
skipped and named. The last line is one JSON document. `--device cpu --quick` is a dry run.

Test: tests/test_benchmarks.py.
"""

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from . import harness


@dataclass(frozen=True)
class Step:
    """One process: `python -m kimivl_lab.bench.<module> <arguments>`; `seconds` is what it is expected to take.

    `gpus`: the fewest GPUs it needs; it starts its own processes for them.
    """

    name: str
    module: str
    seconds: int
    arguments: tuple[str, ...] = ()
    gpus: int = 1


STEPS = (
    Step("attention", "attention", 35),
    Step("rope", "rope", 35),
    Step("position", "position", 40),
    Step("upload", "upload", 25),
    Step("metadata", "metadata", 15),
    Step("syncs, bfloat16", "syncs", 45, ("--dtype", "bfloat16")),
    Step("encoder, bfloat16", "encoder", 80, ("--dtype", "bfloat16", "--compiled")),
    Step("encoder, float32", "encoder", 50, ("--dtype", "float32", "--repeats", "5")),
    Step("graphs, bfloat16", "graphs", 60, ("--dtype", "bfloat16", "--preset", "kimi-vl-a3b")),
    Step("ladder, bfloat16", "ladder", 70, ("--dtype", "bfloat16", "--preset", "kimi-vl-a3b", "--repeats", "5")),
    Step("parallel, bfloat16", "parallel", 120, ("--dtype", "bfloat16", "--preset", "kimi-vl-a3b"), gpus=2),
)


def run_steps(steps: Sequence[Step], options: argparse.Namespace) -> dict[str, Any]:
    """Results by step: the step's own JSON, or why there is none."""
    deadline = time.monotonic() + options.budget
    results: dict[str, Any] = {}
    for step in steps:
        left = deadline - time.monotonic()
        gpus = torch.cuda.device_count() if options.device.startswith("cuda") else step.gpus
        if gpus < step.gpus:
            results[step.name] = {"skipped": f"needs {step.gpus} GPUs, there is {gpus}"}
        elif left < step.seconds and not options.quick:
            results[step.name] = {"skipped": f"{left:.0f} s left of the budget, expects {step.seconds} s"}
        else:
            harness.progress(f"=== {step.name} ({left:.0f} s left)")
            results[step.name] = run_step(step, options, timeout=max(1.0, left))
        if "skipped" in results[step.name] or "failed" in results[step.name]:
            harness.progress(f"=== {step.name}: {results[step.name]}")
    return results


def arguments_of(step: Step, options: argparse.Namespace) -> list[str]:
    """The step's command line."""
    arguments = [*step.arguments, "--out", str(options.out), "--device", options.device, "--seed", str(options.seed)]
    arguments += ["--quick"] * options.quick
    if options.preset and step.module in ("encoder", "graphs", "ladder", "syncs", "parallel"):
        arguments += ["--preset", options.preset]
    return arguments


def run_step(step: Step, options: argparse.Namespace, timeout: float) -> dict[str, Any]:
    """Runs one step in a process of its own."""
    program = [sys.executable, "-m", f"kimivl_lab.bench.{step.module}", *arguments_of(step, options)]
    start = time.monotonic()
    try:
        done = subprocess.run(program, stdout=subprocess.PIPE, text=True, timeout=timeout)
    except subprocess.TimeoutExpired:
        return {"failed": f"still running after {timeout:.0f} s; its rows so far are kept"}
    seconds = round(time.monotonic() - start, 1)
    if done.returncode:
        return {"failed": f"exit code {done.returncode}", "wall_s": seconds}
    return {**json.loads(done.stdout.splitlines()[-1]), "wall_s": seconds}


def main(arguments: Sequence[str] | None = None) -> None:
    parser = harness.parser("gpu_suite", __doc__)
    parser.set_defaults(device="cuda")
    parser.add_argument("--budget", type=float, default=460, help="seconds for all steps (%(default)s)")
    parser.add_argument("--only", help="steps whose name begins so, e.g. encoder")
    parser.add_argument("--preset", help="of the steps that run a tower; the published size by default")
    options = parser.parse_args(arguments)
    if options.device.startswith("cuda") and not torch.cuda.is_available():
        parser.error("torch finds no CUDA device here; --device cpu --quick is a dry run")
    steps = [step for step in STEPS if step.name.startswith(options.only or "")]
    if not steps:
        parser.error(f"no step begins with {options.only!r}: {', '.join(step.name for step in STEPS)}")
    results = run_steps(steps, options)
    failed = [name for name, result in results.items() if "failed" in result]
    harness.finish({"benchmark": "gpu_suite", "device": options.device, "failed": failed, "steps": results})
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
