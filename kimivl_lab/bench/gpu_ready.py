"""Whether a machine has what `gpu_suite` needs: `python -m kimivl_lab.bench.gpu_suite --check`, in a minute.

Every finding is printed as it comes. What is "missing" makes the answer no; what is "optional" costs a step, a kernel
or a few tests, and its line says which.

Test: tests/test_gpu_suite.py.
"""

import argparse
import ast
import importlib
import importlib.util
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import torch
from packaging.requirements import Requirement
from packaging.version import Version

from ..kernels.packed_attention import attention_unavailable
from ..measure.provenance import versions
from . import gpu_checks, harness

ROOT = Path(__file__).resolve().parents[2]
GPU_MIB = 16 * 1024  # the published tower in float32 and bfloat16 is 2.4 GiB; a mask over 13,736 patches the most of it
DISK_MIB = 64  # records and logs are a few MiB
CAPTURE_LIMIT_S = 40


class Finding(NamedTuple):
    """One thing that the suite needs: ok, "missing" or "optional"; `says` is for people."""

    name: str
    state: str
    says: str


@cache
def gpu_tests() -> dict[Path, tuple[str, ...]]:
    """The test files that hold tests marked gpu, each with the packages that it imports and that are not here."""
    found = {}
    for path in sorted((ROOT / "tests").glob("test_*.py")):
        text = path.read_text(encoding="utf-8")
        if "pytest.mark.gpu" in text:
            found[path.relative_to(ROOT)] = tuple(missing_packages(_imported_by(text)))
    return found


@cache
def engine_python(device: str) -> tuple[str, str]:
    """The interpreter whose vLLM serves on this device, and ""; or "", and why there is none."""
    if missing := missing_packages(["httpx"]):
        return "", f"{missing[0]} is not installed"
    reasons = []
    for python in (sys.executable, str(ROOT / ".engine-venv" / "bin" / "python")):
        if not Path(python).exists():
            continue
        done = subprocess.run([python, "-c", _HAS_ENGINE, device], capture_output=True, text=True)
        if not done.returncode:
            return python, ""
        reasons.append(f"{python} {_last(done.stderr)}")
    return "", "; ".join(reasons)


def _last(text: str) -> str:
    return (text.strip().splitlines() or ["ended"])[-1]


_HAS_ENGINE = """
import sys
from importlib import metadata, util
if util.find_spec("vllm") is None:
    sys.exit("has no vLLM")
if not metadata.entry_points(group="vllm.general_plugins", name="kimivl_lab"):
    sys.exit("has vLLM without this library: pip install --no-deps -e .")
import torch
if sys.argv[1] != "cpu" and torch.version.cuda is None:
    sys.exit("has a vLLM for CPUs")
"""


def missing_packages(names: Iterable[str]) -> list[str]:
    """Those of the packages that cannot be found."""
    return sorted(name for name in set(names) if importlib.util.find_spec(name) is None)


def _imported_by(text: str) -> Iterator[str]:
    """Packages that a module imports at its top."""
    for node in ast.parse(text).body:
        if isinstance(node, ast.Import):
            yield from (alias.name.partition(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield node.module.partition(".")[0]


def no_cuda() -> str:
    """Why torch sees no CUDA device."""
    build = f"torch {torch.__version__} in {sys.prefix}"
    if torch.version.cuda is None:
        return f"{build} was built without CUDA: install a build for CUDA"
    return f"{build} is for CUDA {torch.version.cuda} but finds no device: look at nvidia-smi and CUDA_VISIBLE_DEVICES"


def findings(
    options: argparse.Namespace, run_step: Callable[..., dict[str, Any]], steps: Sequence[Any]
) -> Iterator[Finding]:
    """All findings, the quickest first; the last one captures a graph and replays it."""
    on_gpu = torch.cuda.is_available()
    if on_gpu:
        yield Finding("CUDA", "ok", f"{torch.cuda.device_count()} x {torch.cuda.get_device_name()}")
        free, total = (amount / 2**20 for amount in torch.cuda.mem_get_info())
        state = "ok" if free >= GPU_MIB else "missing"
        yield Finding("GPU memory", state, f"{free:.0f} of {total:.0f} MiB free, {GPU_MIB} needed")
    else:
        yield Finding("CUDA", "missing", no_cuda())
    yield _versions(versions())
    yield _disk(Path(options.out))
    yield _modules(steps)
    yield _tests()
    if any(step.module == "engine" for step in steps):
        python, why = engine_python(options.device)
        yield Finding("vLLM", "optional" if why else "ok", f"{why}: the step is skipped" if why else f"in {python}")
    if on_gpu:
        for check in gpu_checks.run_checks(options.device, ["compiler"]):
            yield Finding("compiler", "ok" if check.ok else "optional", check.means)
        reason = attention_unavailable("flash_attn", torch.device(options.device), torch.bfloat16)
        yield Finding("flash-attn", "optional" if reason else "ok", reason or "runs")
        yield _capture(options, run_step, steps[0])


def report(options: argparse.Namespace, run_step: Callable[..., dict[str, Any]], steps: Sequence[Any]) -> int:
    """Prints every finding and the answer, and one JSON document as the last line; 0 if nothing is missing, else 1."""
    found = []
    for finding in findings(options, run_step, steps):
        found.append(finding)
        harness.progress(f"{finding.state:<9} {finding.name}: {finding.says}")
    missing = [finding.name for finding in found if finding.state == "missing"]
    harness.progress(f"NOT READY, missing: {', '.join(missing)}" if missing else "ready")
    harness.finish({"benchmark": "gpu_suite", "missing": missing, "findings": [one._asdict() for one in found]})
    return 1 if missing else 0


def _versions(found: Mapping[str, str]) -> Finding:
    """Whether the packages here are those that pyproject.toml promises to work with."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    asked = {asked.name: asked.specifier for asked in map(Requirement, project["dependencies"])}
    wrong = [
        f"{name} {found[name]} is here, {asked[name]} is asked for"
        for name in found.keys() & asked.keys()
        if not asked[name].contains(Version(found[name]).public, prereleases=True)
    ]
    says = f"{_words(found)}, CUDA {torch.version.cuda}"
    return Finding("versions", "missing" if wrong else "ok", "; ".join([*sorted(wrong), says]))


def _disk(folder: Path) -> Finding:
    """Whether records can be written there."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        probe = folder / ".probe"
        probe.write_bytes(b"")
        probe.unlink()
    except OSError as error:
        return Finding("disk", "missing", f"{folder} cannot be written: {error}")
    free = shutil.disk_usage(folder).free / 2**20
    return Finding("disk", "ok" if free >= DISK_MIB else "missing", f"{free:.0f} MiB free in {folder}")


def _modules(steps: Sequence[Any]) -> Finding:
    """Whether the benchmarks can be imported."""
    modules = [step.module for step in steps if step.module not in ("pytest", "engine")]
    failed = {}
    for module in modules:
        try:
            importlib.import_module(f"kimivl_lab.bench.{module}")
        except Exception as error:  # whatever a broken package raises
            failed[module] = f"{type(error).__name__}: {error}"
    if failed:
        return Finding("benchmarks", "missing", _words(failed))
    return Finding("benchmarks", "ok", f"{len(modules)} can be imported")


def _tests() -> Finding:
    """Whether the tests marked gpu can run."""
    if missing := missing_packages(["pytest"]):
        return Finding("tests", "optional", f"{missing[0]} is not installed: the step is skipped")
    left_out = {str(file): ", ".join(missing) for file, missing in gpu_tests().items() if missing}
    if left_out:
        return Finding("tests", "optional", f"left out for want of packages: {_words(left_out)}")
    return Finding("tests", "ok", f"pytest and all that {len(gpu_tests())} files import")


def _capture(options: argparse.Namespace, run_step: Callable[..., dict[str, Any]], step: Any) -> Finding:
    """Whether a tiny tower can be captured and replayed, in a process that can be killed."""
    capture = replace(step, name="capture", module="gpu_checks", arguments=("--only", "graphs_bfloat16"))
    result = run_step(capture, options, CAPTURE_LIMIT_S)
    works = result["status"] == "ok"
    says = f"captured and replayed in {result['wall_s']} s" if works else f"{result['why']}; see {result['log']}"
    return Finding("graphs", "ok" if works else "missing", says)


def _words(values: Mapping[str, str]) -> str:
    return ", ".join(f"{name} {value}" for name, value in values.items())
