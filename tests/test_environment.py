"""environment.yml, constraints.txt, Makefile and pyproject.toml say one thing."""

import re
import tomllib
from pathlib import Path

import yaml
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name
from packaging.version import Version

ROOT = Path(__file__).resolve().parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
EXTRAS = {name: [Requirement(line) for line in lines] for name, lines in PROJECT["optional-dependencies"].items()}
LIBRARY = [Requirement(line) for line in PROJECT["dependencies"]]
UNTESTED = {"flash"}  # extras that no constraint covers: constraints.txt says why


def _constraints() -> dict[str, Requirement]:
    lines = (line.partition("#")[0].strip() for line in (ROOT / "constraints.txt").read_text().splitlines())
    return {canonicalize_name(pin.name): pin for pin in map(Requirement, filter(None, lines))}


def _environment() -> tuple[dict, list[str], list[str]]:
    """environment.yml, its conda packages and its pip lines."""
    environment = yaml.safe_load((ROOT / "environment.yml").read_text())
    conda = [entry for entry in environment["dependencies"] if isinstance(entry, str)]
    (pip,) = [entry["pip"] for entry in environment["dependencies"] if isinstance(entry, dict)]
    return environment, conda, pip


def test_every_direct_dependency_is_pinned_within_its_range() -> None:
    pins = _constraints()
    required = LIBRARY + [one for extra, lines in EXTRAS.items() if extra not in UNTESTED for one in lines]
    assert set(pins) == {canonicalize_name(one.name) for one in required}
    for one in required:
        (pin,) = pins[canonicalize_name(one.name)].specifier
        assert pin.operator == "==", f"{one.name}: a constraint is one exact version"
        assert not Version(pin.version).local, f"{one.name}: a local version would bind the pin to one build"
        assert one.specifier.contains(pin.version), f"{one.name} {pin.version} is outside {one.specifier}"


def test_conda_supplies_python_and_pip_only() -> None:
    environment, conda, _ = _environment()
    assert environment["name"] == PROJECT["name"]
    assert environment["channels"] == ["conda-forge", "nodefaults"]
    python, pip = conda
    assert pip == "pip" and (exact := re.fullmatch(r"python=(3\.\d+)", python))
    assert SpecifierSet(PROJECT["requires-python"]).contains(exact[1])


def test_pip_installs_the_project_as_the_makefile_does() -> None:
    _, _, pip = _environment()
    constraint, editable = pip
    assert constraint == "-c constraints.txt"
    match = re.fullmatch(r"-e \.\[([a-z,]+)\]", editable)
    assert match and set(match[1].split(",")) == set(EXTRAS) - UNTESTED
    assert f'-c constraints.txt -e ".[{match[1]}]"' in (ROOT / "Makefile").read_text()


def test_the_makefile_asks_for_the_python_that_pyproject_needs() -> None:
    match = re.search(r"v >= \((\d+), (\d+)\)", (ROOT / "Makefile").read_text())
    assert match and PROJECT["requires-python"] == f">={match[1]}.{match[2]}"
    assert SpecifierSet(PROJECT["requires-python"]).contains(f"{match[1]}.{match[2]}")


def test_ci_runs_the_readmes_test_command_and_nothing_else() -> None:
    script = (ROOT / ".ci" / "run").read_text().splitlines()
    commands = [line for line in script if line and not line.startswith(("#", "set ", "cd "))]
    assert commands == ["make test"]
    assert "set -euo pipefail" in script
