"""The rings: a module imports from its own ring or a lower one, and imports form no circle.

Ring 0 is plain integers and settings, ring 6 the apparatus that measures and draws; `kimivl_lab/__init__.py`, which
imports the public names when they are first used, is in none.
"""

import ast
from collections.abc import Mapping
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "kimivl_lab"
RINGS = (
    ("geometry", "config", "checks", "datasets", "gpus", "published", "auto_classes", "private_api"),
    ("images", "syncs", "kernels"),
    ("moonvit",),
    ("parallel", "graphs", "planner"),
    ("kimi_vl",),
    ("engines",),
    ("measure", "bench", "plots", "lessons", "report", "commands", "cli"),
)
RING_OF = {name: ring for ring, names in enumerate(RINGS) for name in names}


def sources() -> dict[str, str]:
    """Every module's text by its name below the package: "moonvit.rope"; a package itself is "moonvit"."""
    texts = {}
    for path in PACKAGE.rglob("*.py"):
        parts = path.relative_to(PACKAGE).with_suffix("").parts
        if parts != ("__init__",):
            texts[".".join(parts).removesuffix(".__init__")] = path.read_text()
    return texts


def imports(name: str, texts: Mapping[str, str]) -> set[str]:
    """The package's modules that `name` imports anywhere in its text, functions included."""
    is_package = any(other.startswith(f"{name}.") for other in texts)
    package = name.split(".") if is_package else name.split(".")[:-1]
    found = set()
    for node in ast.walk(ast.parse(texts[name])):
        if isinstance(node, ast.Import):
            absolute = [alias.name.removeprefix("kimivl_lab.") for alias in node.names if "kimivl_lab" in alias.name]
        elif isinstance(node, ast.ImportFrom) and (node.level or (node.module or "").startswith("kimivl_lab")):
            parts = package[: len(package) - node.level + 1] if node.level else []
            base = ".".join([*parts, *([node.module.removeprefix("kimivl_lab").lstrip(".")] if node.module else [])])
            absolute = [f"{base}.{alias.name}".lstrip(".") for alias in node.names] + [base]
        else:
            continue
        found |= {module for module in absolute if module in texts}
    return found - {name}


def violations(texts: Mapping[str, str]) -> list[str]:
    """Imports from a higher ring."""
    return [
        f"{name} (ring {RING_OF[name.split('.')[0]]}) imports {other} (ring {RING_OF[other.split('.')[0]]})"
        for name in sorted(texts)
        for other in sorted(imports(name, texts))
        if RING_OF[other.split(".")[0]] > RING_OF[name.split(".")[0]]
    ]


def test_every_module_has_a_ring():
    assert {name.split(".")[0] for name in sources()} <= RING_OF.keys()


def test_imports_go_inwards():
    assert violations(sources()) == []


def test_imports_form_no_circle():
    texts = sources()
    graph = {name: {other for other in imports(name, texts) if not name.startswith(f"{other}.")} for name in texts}
    TopologicalSorter(graph).prepare()  # raises CycleError, which names the circle


@pytest.mark.parametrize(
    "line", ["from ..bench import ladder", "from .. import plots", "import kimivl_lab.measure.timing"]
)
def test_an_outward_import_is_found(line):
    texts = sources()
    texts["moonvit.rope"] += f"\n{line}\n"
    assert any(found.startswith("moonvit.rope (ring 2) imports") for found in violations(texts))


def test_only_the_kernels_name_amx():
    """Modules outside `kernels` know kernels by their options' names alone."""
    texts = sources()
    naming = [name for name in texts if "kernels.amx" in " ".join(imports(name, texts))]
    assert naming and all(name.startswith("kernels.") for name in naming)
