"""FAULTS.md maps every kind of fault to tests that exist, and every test of a fault to its kind."""

import ast
import re
from pathlib import Path

TESTS = Path(__file__).parent
LINES = re.findall(r"^\| ([A-Z]\d+) \| ([^|]+) \| ([^|]+) \|$", (TESTS / "FAULTS.md").read_text(), re.MULTILINE)


def functions(path: Path) -> set[str]:
    """The test functions of a file, each as `file::function`."""
    nodes = ast.parse(path.read_text()).body
    return {
        f"{path.stem}::{node.name}" for node in nodes if isinstance(node, ast.FunctionDef) and node.name[:5] == "test_"
    }


def listed(cell: str) -> set[str]:
    return set(re.findall(r"`(test_\w+::test_\w+)`", cell))


def test_every_kind_has_tests_that_exist():
    existing = set().union(*(functions(path) for path in TESTS.glob("test_*.py")))
    assert len(LINES) > 100
    for kind, words, cell in LINES:
        assert words and listed(cell), f"{kind} has no test"
        assert listed(cell) <= existing, f"{kind}: {listed(cell) - existing}"


def test_no_kind_of_this_library_is_left_out():
    kinds = [kind for kind, _, _ in LINES]
    for letter, count in {"S": 15, "W": 13, "M": 8}.items():
        assert [kind for kind in kinds if kind[0] == letter] == [f"{letter}{n}" for n in range(1, count + 1)]


def test_every_test_of_a_fault_has_a_kind():
    mapped = set().union(*(listed(cell) for _, _, cell in LINES))
    ours = [path for path in TESTS.glob("test_faults_*.py") if path.stem != Path(__file__).stem]
    assert set().union(*(functions(path) for path in ours)) <= mapped


def test_a_test_is_named_after_its_kind():
    """A name such as test_S7_... belongs to that line, at least."""
    cells = {kind: listed(cell) for kind, _, cell in LINES if kind[0] in "SWM"}
    for path in TESTS.glob("test_*.py"):
        for function in functions(path):
            if match := re.match(r".*::test_([SWM]\d+)_", function):
                assert function in cells[match[1]], function
