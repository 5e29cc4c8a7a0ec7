"""The lessons as one course: their order, and the links that lead from each to its neighbours."""

import re
import shutil
from importlib.util import find_spec
from pathlib import Path

import nbformat
import pytest

from kimivl_lab.lessons.course import lessons, links, title, write_links
from kimivl_lab.lessons.minutes import table_rows

NOTEBOOKS = Path(__file__).resolve().parents[1] / "notebooks"
COURSE = lessons(NOTEBOOKS)

FORMULA = re.compile(r"\$\$(.+?)\$\$|(?<![\\$\w])\$([^$\n]+)\$", re.DOTALL)
NO_LETTERS = re.compile(r"_?\\(?:text|mathrm|begin|end)\{[^}]*\}|_(?:\{[^}]*\}|[A-Za-z]+)")  # words, and an index
GREEK = (
    "alpha beta gamma delta epsilon eta zeta theta iota kappa lambda mu nu xi pi rho sigma tau phi chi psi omega ell"
)

each_lesson = pytest.mark.parametrize("path", COURSE, ids=lambda path: path.stem)


def ends(path):
    """The paragraphs in front of the first section, and those of the last one."""
    text = path.read_text()
    if path.suffix == ".ipynb":
        text = "\n\n".join(cell.source for cell in nbformat.read(path, 4).cells if cell.cell_type == "markdown")
    first, *_, last = re.split(r"^## ", text, flags=re.MULTILINE)
    return first.strip().split("\n\n"), last.strip().split("\n\n")


def test_the_order_is_that_of_the_readmes_table():
    named = [re.findall(r"\(notebooks/(.+)\)", link)[0] for link, *_ in table_rows()]
    assert [path.name for path in COURSE if path.suffix == ".ipynb"] == named
    assert COURSE[0].name == "00_start_here.ipynb" and len({path.name[:2] for path in COURSE}) == len(COURSE)


@each_lesson
def test_both_ends_lead_to_the_lesson_before_and_after(path):
    first, last = ends(path)
    assert first[1] == last[-1] == links(path), "run `python -m kimivl_lab.lessons.course`"
    here = COURSE.index(path)
    targets = re.findall(r"(previous|next): \[([^\]]+)\]\(([^)]+)\)", links(path))
    beside = [("previous", COURSE[here - 1])] * (here > 0)
    beside += [("next", other) for other in COURSE[here + 1 : here + 2]]
    assert targets == [(word, title(other), other.name) for word, other in beside]


@pytest.mark.parametrize("path", [path for path in COURSE if path.suffix == ".ipynb"], ids=lambda path: path.stem)
def test_a_lesson_begins_where_the_last_one_ended_and_says_what_comes_next(path):
    first, last = ends(path)
    assert len(first) == (2 if path == COURSE[0] else 3)
    assert path == COURSE[0] or re.search(r"[Ll]essons? \d\d", first[2])
    assert last[-2].startswith("**Next:** ")


@each_lesson
def test_files_and_modules_that_the_prose_names_are_there(path):
    text = path.read_text().replace("\\n", " ")
    files = re.findall(r"`((?:kimivl_lab|data|notebooks|tests)/[\w./-]+)`", text)
    assert [name for name in files if not (NOTEBOOKS.parent / name).exists()] == []
    modules = {module.rstrip(".") for module in re.findall(r"python -m (kimivl_lab[\w.]+)", text)}
    assert [module for module in modules if find_spec(module) is None] == []


def letters(text):
    """The letters in the formulas of `text`, Greek ones by their commands."""
    formulas = " ".join(NO_LETTERS.sub(" ", display or inline) for display, inline in FORMULA.findall(text))
    found = re.findall(r"\\[A-Za-z]+|[A-Za-z]", formulas)
    return {one for one in found if one[1:] in {"", *GREEK.split()}}


@pytest.mark.parametrize("path", sorted(NOTEBOOKS.rglob("*.ipynb")), ids=lambda path: path.stem)
def test_every_letter_of_a_formula_is_in_the_notation(path):
    notation = (NOTEBOOKS / "NOTATION.md").read_text()
    explained = letters(" ".join(line.split("|")[1] for line in notation.splitlines() if line.startswith("| $")))
    cells = [cell.source for cell in nbformat.read(path, 4).cells if cell.cell_type == "markdown"]
    assert letters("\n\n".join(cells)) - explained <= {r"\pi"}
    assert letters(r"$t_\text{one}(n) = \tau_i + \rho$ and $$A_h \cdot x$$") == {"t", "n", r"\tau", r"\rho", "A", "x"}


def test_a_new_lesson_is_linked_by_its_neighbours(tmp_path):
    folder = tmp_path / "notebooks"
    (folder / "text").mkdir(parents=True)
    for path in (NOTEBOOKS / "20_position_embedding.ipynb", NOTEBOOKS / "30_rope_2d.ipynb"):
        shutil.copy(path, folder)
        shutil.copy(NOTEBOOKS / "text" / f"{path.stem}.py", folder / "text")
    stale = "[Map of the course](x.ipynb) · [Notation](NOTATION.md)"
    (folder / "22_between.md").write_text(f"# Between: a page\n\n{stale}\n\n## Part\n\nText.\n\n{stale}\n")
    write_links(folder)
    before, new, after = (ends(path)[0][1] for path in lessons(folder))
    assert before.endswith(" · next: [22 Between](22_between.md)")
    assert new == links(folder / "22_between.md") and after == links(folder / "30_rope_2d.ipynb")
    assert (folder / "text" / "30_rope_2d.py").read_text().count(f"# {after}\n") == 2
    assert write_links(folder) == []
