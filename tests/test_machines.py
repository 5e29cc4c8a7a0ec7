"""Other machines: what Windows and macOS do not have, shares of a server's cores, and folders of other users."""

import ast
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from kimivl_lab.kernels import library
from kimivl_lab.lessons.environment import environment
from kimivl_lab.measure import provenance

ROOT = Path(__file__).resolve().parents[1]
# torch and the packages beside it are imported first: they are what they are on that system
ELSEWHERE = """
import ctypes, importlib, os, pkgutil, signal, sys
import jupytext, matplotlib.pyplot, nbval.plugin, nbclient, nbconvert, torch, transformers
import torch._inductor, torch.distributed.launcher.api, torch.export
from transformers import GenerationMixin
from pathlib import Path

for module in ("fcntl", "grp", "pwd", "resource", "termios"):
    sys.modules[module] = None
for name in "fork getuid geteuid killpg sched_getaffinity setsid sysconf".split():
    if hasattr(os, name):
        delattr(os, name)
for name in "SIGALRM SIGHUP SIGKILL SIGQUIT".split():
    if hasattr(signal, name):
        delattr(signal, name)
ctypes.CDLL = None
is_there, read = Path.exists, Path.read_text
system = ("/proc/", "/sys/")
Path.exists = lambda self: is_there(self) and not str(self).startswith(system)
def read_text(self, *args, **options):
    return read(Path("none") if str(self).startswith(system) else self, *args, **options)
Path.read_text = read_text

import kimivl_lab
for module in pkgutil.walk_packages(kimivl_lab.__path__, "kimivl_lab."):
    if not module.name.endswith("__main__") and ".engines.vllm" not in module.name:
        importlib.import_module(module.name)
sys.platform = "win32"
from kimivl_lab import KimiVLImageProcessor, MoonViTConfig, MoonVitPretrainedModel
from kimivl_lab.bench import gpu_suite
from kimivl_lab.lessons.environment import environment
from kimivl_lab.measure.memory import peak_memory_mib
from kimivl_lab.measure.provenance import provenance

batch = KimiVLImageProcessor()("data/images/tiny_flag.png")
tower = MoonVitPretrainedModel(MoonViTConfig.preset("tiny")).eval()
with torch.no_grad():
    print(tuple(tower(batch.pixel_values, batch.image_grid_hws).shape))
print([one.name for one in environment() if not one.ok and "cores" not in one.name])
print(peak_memory_mib(lambda: None), provenance()["device"].endswith("cores"))
try:
    gpu_suite.main(["--check"])
except SystemExit as stop:
    print(stop.code)
"""


def test_without_what_only_unix_has_the_library_works_and_what_needs_it_says_so():
    command = [sys.executable, "-c", ELSEWHERE]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.stdout.splitlines() == ["(1, 4, 288)", "[]", "None True", "2"], done.stderr
    assert "WSL" in done.stderr.splitlines()[-1]


def test_every_text_file_is_opened_as_utf_8():
    """Without a word about it, Windows takes another encoding."""
    found = []
    for path in ROOT.glob("kimivl_lab/**/*.py"):
        for call in ast.walk(ast.parse(path.read_text("utf-8"))):
            if isinstance(call, ast.Call) and isinstance(call.func, ast.Attribute):
                given = len(call.args) + any(word.arg == "encoding" for word in call.keywords)
                if given < {"read_text": 1, "write_text": 2}.get(call.func.attr, 0):
                    found.append(f"{path.relative_to(ROOT)}:{call.lineno}")
    assert found == []


@pytest.mark.parametrize(
    ("limit", "cores"), [("150000 100000", 2), ("50000 100000", 1), ("max 100000", 8), ("9900000 100000", 8)]
)
def test_cores_are_those_that_a_container_may_use(limit, cores, tmp_path, monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: range(8), raising=False)
    monkeypatch.setattr(provenance, "_CPU_MAX", tmp_path / "cpu.max")
    assert provenance.usable_cores() == 8
    (tmp_path / "cpu.max").write_text(f"{limit}\n")
    assert provenance.usable_cores() == cores


def test_a_containers_limit_of_memory_is_seen(tmp_path, monkeypatch):
    monkeypatch.setattr("kimivl_lab.lessons.environment._MEMORY_MAX", tmp_path / "memory.max")
    monkeypatch.setattr("kimivl_lab.lessons.environment._LEAST_GIB", 0.5)
    for limit, ok in ((2**28, False), ("max", True)):
        (tmp_path / "memory.max").write_text(f"{limit}\n")
        (one,) = (one for one in environment() if "memory" in one.name)
        assert one.ok is ok and (one.found == "0.2 GiB") is not ok


def test_more_threads_than_cores_are_found_and_the_cure_is_named(monkeypatch):
    monkeypatch.setattr("kimivl_lab.lessons.environment.usable_cores", lambda: 2)
    for threads, ok in ((2, True), (64, False)):
        monkeypatch.setattr(torch, "get_num_threads", lambda threads=threads: threads)
        (one,) = (one for one in environment() if "threads" in one.name)
        assert one.ok is ok and "OMP_NUM_THREADS=2" in one.cure


@pytest.fixture
def simd(tmp_path, monkeypatch):
    """Loads the kernels anew with an empty cache: the library, or the reason for which there is none."""
    try:
        library.kernel_isa("simd")
    except library.BuildError as error:
        pytest.skip(f"needs AVX2: {error}")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return lambda: library._load.__wrapped__("simd")


def test_kernels_in_a_folder_of_another_user_are_not_loaded(simd, tmp_path, monkeypatch):
    assert not isinstance(simd(), str)
    monkeypatch.setattr(library.Path, "stat", lambda path, **_: SimpleNamespace(st_uid=4711, st_mode=0o100644))
    assert "4711" in (reason := simd()) and str(tmp_path) in reason and "XDG_CACHE_HOME" in reason
    monkeypatch.setattr(library.Path, "stat", lambda path, **_: SimpleNamespace(st_uid=0, st_mode=0o100644))
    assert not isinstance(simd(), str), "root may install them for all"


def test_a_folder_that_cannot_be_written_is_named(simd, tmp_path):
    (tmp_path / "kimivl-lab").write_text("no folder")
    assert "kimivl-lab" in (reason := simd()) and "XDG_CACHE_HOME" in reason
