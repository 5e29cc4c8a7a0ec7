"""The order of the course, and the line of links that stands at both ends of each lesson.

The order is that of the files `NN_topic.ipynb` and `NN_topic.md` in notebooks/. After a lesson was added, renamed or
given another title, `python -m kimivl_lab.lessons.course` writes the lines again.

Test: tests/test_course.py.
"""

import re
from pathlib import Path

import nbformat

from ..datasets import repository_root

LINKS = re.compile(r"^(?P<comment># )?\[[^\]]+\]\([^)]+\) · .*\(NOTATION\.md\).*$", re.MULTILINE)


def lessons(folder: Path) -> list[Path]:
    """The lessons and pages of `folder` in the order of their numbers: 00_start_here.ipynb first."""
    return sorted(path for path in folder.glob("[0-9][0-9]_*") if path.suffix in {".ipynb", ".md"})


def title(path: Path) -> str:
    """Number and heading up to its colon: "60 Host syncs" for 60_gpu_syncs.ipynb."""
    text = nbformat.read(path, 4).cells[0].source if path.suffix == ".ipynb" else path.read_text(encoding="utf-8")
    return f"{path.name[:2]} {text.splitlines()[0].removeprefix('# ').partition(':')[0]}"


def links(path: Path) -> str:
    """The line of links of one lesson: map, glossary, notation, the lesson before and the lesson after."""
    order = lessons(path.parent)
    here = order.index(path)
    line = "" if here == 0 else f"[Map of the course]({order[0].name}) · "
    line += "[Glossary](GLOSSARY.md) · [Notation](NOTATION.md)"
    for word, other in (("previous", order[max(here - 1, 0)]), ("next", order[min(here + 1, len(order) - 1)])):
        line += "" if other == path else f" · {word}: [{title(other)}]({other.name})"
    return line


def write_links(folder: Path) -> list[Path]:
    """Writes the lines into the notebooks of `folder`, their sources in text/ and its pages; returns what changed."""
    changed = []
    for path in lessons(folder):
        line = links(path)
        if path.suffix == ".md":
            changed += _rewrite(path, line)
            continue
        changed += _rewrite(folder / "text" / f"{path.stem}.py", line)
        notebook = nbformat.read(path, 4)
        before = [cell.source for cell in notebook.cells]
        for cell in (notebook.cells[0], notebook.cells[-1]):
            cell.source = LINKS.sub(lambda _, line=line: line, cell.source)
        if before != [cell.source for cell in notebook.cells]:
            nbformat.write(notebook, path)
            changed.append(path)
    return changed


def _rewrite(path: Path, line: str) -> list[Path]:
    before = path.read_text(encoding="utf-8")
    after = LINKS.sub(lambda found: f"{found['comment'] or ''}{line}", before)
    if after == before:
        return []
    path.write_text(after, encoding="utf-8")
    return [path]


if __name__ == "__main__":
    for written in write_links(repository_root() / "notebooks"):
        print(written)
