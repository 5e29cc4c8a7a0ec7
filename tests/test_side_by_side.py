"""The page that compares engines: each cell has its source, in a release that it names; its numbers are the data's."""

import importlib.metadata
import importlib.util
import re
from pathlib import Path

import pytest
import torch
from torch.nn.functional import gelu

from kimivl_lab.report.side_by_side import MARKS, kept_records, numbers_table, with_numbers

PATH = Path(__file__).resolve().parents[1] / "notebooks" / "90_engines_side_by_side.md"
PAGE = PATH.read_text()
PROJECTS = {"vLLM": "vllm-project/vllm", "SGLang": "sgl-project/sglang"}
PROJECTS |= {"transformers": "huggingface/transformers", "kornia": "kornia/kornia"}
SOURCE = re.compile(r"\(https://github\.com/([^/]+/[^/]+)/(?:blob|tree)/([^/]+)/([^)#]+)(?:#L(\d+))?\)")


def rows(text):
    """The lines of the first markdown table in `text`, without its head, as lists of cells."""
    lines = [line for line in text.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[2:]]


FEATURES = dict(re.findall(r"^### (.*)\n\n((?:\|.*\n)+)", PAGE, re.MULTILINE))
RELEASES = {name: release for name, release, _ in rows(PAGE.partition("## Features")[0])}
each_feature = pytest.mark.parametrize("feature", FEATURES)


@each_feature
def test_every_feature_has_five_lines_and_every_line_its_source(feature):
    lines = rows(FEATURES[feature])
    assert [line[0] for line in lines] == [*PROJECTS, "this lab"]
    for name, words, where in lines:
        assert words
        if name == "this lab":
            continue
        sources = SOURCE.findall(where)
        assert sources, name
        assert {(project, release) for project, release, _, _ in sources} == {(PROJECTS[name], RELEASES[name])}


@each_feature
def test_each_line_of_ours_leads_to_tests_and_lessons_that_are_there(feature):
    *_, (_, _, where) = rows(FEATURES[feature])
    targets = re.findall(r"\]\(([^)]+)\)", where)
    assert targets
    for target in targets:
        assert (PATH.parent / target).exists(), target
    for part in where.split(";"):
        for name in re.findall(r"`(\w+)`", part):
            (target,) = re.findall(r"\]\(([^)]+\.py)\)", part)
            assert f"def {name}(" in (PATH.parent / target).read_text(), name


def test_the_other_links_lead_somewhere():
    for target in re.findall(r"\]\((?!https?:)([^)]+)\)", PAGE):
        assert (PATH.parent / target).exists(), target


@pytest.mark.parametrize("name", ["transformers", "kornia"])
def test_the_lines_are_those_of_the_installed_release(name):
    """Where the release that was read is installed, its files have the lines that are linked."""
    if f"v{importlib.metadata.version(name)}" != RELEASES[name]:
        pytest.skip(f"{name} {importlib.metadata.version(name)} is installed, {RELEASES[name]} was read")
    spec = importlib.util.find_spec(name)
    assert spec is not None and spec.origin is not None
    sources = [(path, line) for project, _, path, line in SOURCE.findall(PAGE) if project == PROJECTS[name]]
    assert sources
    for path, line in sources:
        text = (Path(spec.origin).parents[1] / path.removeprefix("src/")).read_text().splitlines()
        assert not line or text[int(line) - 1].strip(), (path, line)


def test_the_numbers_are_those_of_the_data():
    assert with_numbers(PAGE) == PAGE, "run `make notebooks`"
    assert PAGE.count("](../data/measurements/") == numbers_table().count("](../data/measurements/") >= 4


@pytest.mark.parametrize("page", ["", "".join(reversed(MARKS)), MARKS[0], 2 * "".join(MARKS)])
def test_a_page_without_its_marks_is_refused(page):
    with pytest.raises(ValueError, match="once each"):
        with_numbers(page)


def test_while_it_says_so_no_record_is_of_a_gpu():
    devices = {path.name.split("__")[1] for path in kept_records().glob("*.csv")}
    assert "are from CPUs" not in PAGE or all(device.startswith("cpu-") for device in devices)


def test_quick_gelu_differs_by_what_the_page_says():
    x = torch.linspace(-8, 8, 4001, dtype=torch.float64)
    most = (x * torch.sigmoid(1.702 * x) - gelu(x)).abs().max().item()
    assert f"differ by up to {most:.2f}" in PAGE
