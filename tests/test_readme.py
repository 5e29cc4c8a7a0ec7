"""README, CONTRIBUTING, CHANGELOG, CITATION and data/README say what is so: tables, commands and code are checked."""

import json
import re
import shlex
import shutil
import socket
import statistics
import tomllib
from pathlib import Path
from typing import Any

import PIL.Image
import pytest
import torch
import torch.distributed as dist
import yaml
from PIL import Image

from kimivl_lab import image_geometry
from kimivl_lab.commands import main as cli
from kimivl_lab.datasets import load_sizes, sample_images
from kimivl_lab.kimi_vl.random_checkpoint import write_random_checkpoint
from kimivl_lab.lessons.minutes import table_rows
from kimivl_lab.measure.records import find_record
from kimivl_lab.planner.workload import read_sizes
from kimivl_lab.report.ladder import kept_records, source_of
from kimivl_lab.syncs.counter import HostSyncCounter, on_device
from tests.conftest import relative_error
from tests.test_pretended_gpu import gpu  # noqa: F401  (a fixture)

ROOT = Path(__file__).resolve().parents[1]
README = (ROOT / "README.md").read_text()
DATA_README = (ROOT / "data" / "README.md").read_text()
CONTRIBUTING = (ROOT / "CONTRIBUTING.md").read_text()
CHANGELOG = (ROOT / "CHANGELOG.md").read_text()
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
MAKEFILE = (ROOT / "Makefile").read_text()
TARGETS = dict(re.findall(r"^([.a-z-]+):.*## (.*)$", MAKEFILE, re.MULTILINE))


def table(text, heading):
    """Rows of the table whose first column is called `heading`, as lists of cells."""
    lines = text.split(f"\n| {heading} |", 1)[1].split("\n\n", 1)[0].splitlines()[2:]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


def blocks(language):
    return re.findall(rf"^```{language}\n(.*?)^```", README, re.MULTILINE | re.DOTALL)


def test_the_table_of_notebooks_is_theirs():
    assert table(README, "notebook") == table_rows()


def test_the_table_of_commands_is_the_makefiles():
    assert table(CONTRIBUTING, "command") == [[f"`make {name}`", words] for name, words in TARGETS.items()]


def test_every_make_command_exists():
    code = re.findall(r"`([^`\n]+)`", README + CONTRIBUTING)
    code += [line for block in blocks("bash") for line in block.splitlines()]
    named = {match[1] for one in code if (match := re.match(r"make (?:[A-Z]+=\S+ )?(\.?[a-z-]+)", one))}
    assert {"run", "test"} <= named <= TARGETS.keys()


def test_the_front_picture_shows_the_kept_record_of_the_ladder():
    ((words, target),) = re.findall(r"!\[([^\]]+)\]\(([^)]+)\)", README)
    assert words
    with Image.open(ROOT / target) as picture:
        assert picture.info["Source"] == source_of(find_record("ladder", kept_records())), "run `make notebooks`"


@pytest.fixture
def rank_of_one(monkeypatch):
    """What torchrun says to the only rank of a job."""
    with socket.create_server(("localhost", 0)) as server:
        port = server.getsockname()[1]
    for name, value in {"RANK": 0, "WORLD_SIZE": 1, "MASTER_ADDR": "localhost", "MASTER_PORT": port}.items():
        monkeypatch.setenv(name, str(value))
    yield
    dist.destroy_process_group()


def test_the_code_runs_as_written(tmp_path, monkeypatch, capsys, rank_of_one):
    """In a folder with the data and a small checkpoint under the name that the README uses."""
    shutil.copytree(ROOT / "data" / "images", tmp_path / "data" / "images")
    write_random_checkpoint(tmp_path / "Kimi-VL-A3B-Instruct", vocab_size=1024, dtype=torch.float32)
    monkeypatch.chdir(tmp_path)
    names = {}
    code = blocks("python")
    assert len(code) == 5
    for block in code:
        exec(compile(block, "README.md", "exec"), names)
    printed = capsys.readouterr().out.splitlines()
    assert printed[0] == "(368, 4, 288)" and printed[0] in README
    assert names["rows"].shape == (368, 64)
    assert names["encoder"].encoder_parallel == "data"
    assert names["runner"].stats.graphs[368].calls == 1
    assert names["answer"].shape[1] > names["inputs"]["input_ids"].shape[1] and printed[1].startswith(" w")
    assert printed[-1] == "0 {}" and printed[-1] in README
    assert printed[2] == f"Grid(h=66, w=66) 4356 1089 {[0, 4356, *[5676] * 7]}" and "4,356 patches" in README
    x = torch.arange(5676)[:, None]
    merged = names["patch_merger_packed"](x, names["index"])
    assert torch.equal(merged.flatten(), names["index"])
    assert torch.equal(names["metadata"].merge_gather_idx, names["index"])


@pytest.mark.usefixtures("gpu")
def test_on_a_gpu_the_code_waits_for_what_it_prints_alone(tmp_path, monkeypatch, rank_of_one):
    """On the pretended device, with each tower and encoder moved to it where the code has made it."""
    shutil.copytree(ROOT / "data" / "images", tmp_path / "data" / "images")
    write_random_checkpoint(tmp_path / "Kimi-VL-A3B-Instruct", vocab_size=1024, dtype=torch.float32)
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {}
    tower, _, encoder, *others = blocks("python")  # without the language model
    for block in (tower, encoder):
        exec(compile(block, "README.md", "exec"), names)
    want = names["features"], names["rows"]
    for name in ("tower", "encoder"):
        names[name] = on_device(names[name], pretended=True)
    with HostSyncCounter(pretended=True) as waits:
        for block in others:
            exec(compile(block, "README.md", "exec"), names)
    assert names["metadata"].pos_embeds.is_cuda and waits.by_kind == {"tolist": 1}
    assert names["runner"].backend.name == "cuda" and names["counter"].total == 0
    for name, right in zip(("features", "rows"), want, strict=True):
        assert relative_error(names[name].as_subclass(torch.Tensor), right) < 1e-5


def test_the_recipe_writes_sizes_that_plan_reads(tmp_path, monkeypatch):
    (recipe,) = blocks("py")
    monkeypatch.chdir(tmp_path)
    for name in ("coffee", "china"):
        exec(compile(recipe, "README.md", "exec"), {"PIL": PIL, "file": sample_images()[name]})
    assert read_sizes(tmp_path / "my_sizes.csv") == ([(600, 400, 1), (640, 427, 1)], [])


def test_the_command_lines_are_understood():
    lines = [line for block in blocks("bash") for line in block.splitlines() if line.startswith("kimivl-lab")]
    assert len(lines) == 10
    for line in lines:
        arguments = cli._parser().parse_args(shlex.split(line, comments=True)[1:])
        paths = getattr(arguments, "images", None) or []
        for path in paths if isinstance(paths, list) else [paths]:
            assert (ROOT / path).exists()


def test_the_layout_is_the_repositorys():
    (layout,) = blocks("text")
    for line in layout.splitlines():
        assert (ROOT / line.split()[0]).is_dir(), line


def test_every_file_under_data_is_in_its_dictionary():
    listed = set(re.findall(r"^\| ([\w.]+\.\w+) \|", DATA_README, re.MULTILINE)) | {"front.png", "README.md"}
    folders = (path for path in (ROOT / "data").rglob("*") if path.is_file() and path.parent.name != "measurements")
    assert listed == {path.name for path in folders}


def test_every_column_of_published_numbers_has_a_meaning():
    explained = {name for row in table(DATA_README, "column") for name in re.findall(r"`(\w+)`", row[0])}
    found = set()
    for path in (ROOT / "data" / "published").glob("*.csv"):
        found |= set(path.read_text().splitlines()[0].split(","))
    assert explained == found


def test_every_picture_has_its_size_and_licence():
    rows = {row[0]: row for row in table(DATA_README, "file")}
    for path in (ROOT / "data" / "images").iterdir():
        with Image.open(path) as image:
            assert rows[path.name][1] == f"{image.width}x{image.height}"
        assert all(rows[path.name])


def test_every_workload_has_its_counts_and_source():
    rows = {row[0]: row for row in table(DATA_README.split("## workloads/")[1], "file")}
    assert set(rows) == {path.name for path in (ROOT / "data" / "workloads").iterdir()}
    for name, (_, *said, source) in rows.items():
        sizes = load_sizes(name.removesuffix(".csv"))
        patches = [image_geometry_or_none(w, h) for w, h, count in sizes for _ in range(count)]
        kept = [count for count in patches if count is not None]
        counts = (len(patches), len(sizes), statistics.median_low(kept), max(kept))
        assert said == [f"{count:,}" for count in counts], name
        assert source


def image_geometry_or_none(width, height):
    """Patches; None for a size that the processor refuses."""
    try:
        return image_geometry(width, height).patches
    except ValueError:
        return None


def test_the_ledger_lists_every_record():
    listed = [row[0].strip("`") for row in table(DATA_README + "\n", "record")]
    assert listed == sorted(path.stem for path in (ROOT / "data" / "measurements").glob("*.csv"))


def test_the_ledger_has_the_commands_and_commits_of_the_records():
    for name, command, commit in table(DATA_README + "\n", "record"):
        origin = json.loads((ROOT / "data" / "measurements" / f"{name.strip('`')}.json").read_text())
        assert (command.strip("`").strip(), commit) == (origin["command"].strip(), origin["commit"][:10]), name


def test_recipes_name_files_and_lists_that_are_there():
    recipes = CONTRIBUTING.split("## How to add something")[1].split("\n## ")[0]
    starts = re.findall(r"^\*\*(.+?)\.\*\*", recipes, re.MULTILINE)
    assert len(starts) == 5 == len(re.findall(r"Tests:\s", recipes))
    named = [path for path in re.findall(r"`([\w/.-]+)`", recipes) if "/" in path and "NN_" not in path]
    assert [path for path in named if not (ROOT / path).exists()] == []
    sources = "".join(
        (ROOT / path).read_text() for path in named if path.startswith("kimivl_lab") and path[-3:] == ".py"
    )
    for name in re.findall(r"`([A-Z_]{4,}|[a-z]+_unavailable)`", recipes):
        assert re.search(rf"^(?:def )?{name}\b", sources, re.MULTILINE), name


def test_the_changelog_is_by_date_and_its_records_are_kept():
    dates = re.findall(r"^## (\d{4}-\d\d-\d\d)$", CHANGELOG, re.MULTILINE)
    assert dates == sorted(set(dates), reverse=True) and len(dates) == CHANGELOG.count("\n## ")
    assert CHANGELOG.count("**Did not pay, or was wrong**") == len(dates), "negative results stay"
    for record in set(re.findall(r"`(\w+__)\*`", CHANGELOG)):
        assert list((ROOT / "data" / "measurements").glob(f"{record}*.csv")), record


def test_the_citation_is_of_this_version():
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert citation["cff-version"] == "1.2.0" and citation["message"] and citation["title"] and citation["authors"]
    assert (citation["version"], citation["license"]) == (PROJECT["version"], PROJECT["license"])
    assert PROJECT["version"] in CHANGELOG
