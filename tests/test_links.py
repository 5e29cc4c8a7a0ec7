"""Every link inside the project leads somewhere, and the headings of each document make one outline."""

import re
from functools import cache
from pathlib import Path

import nbformat
import pytest

ROOT = Path(__file__).resolve().parents[1]
DOCUMENTS = sorted(
    path
    for pattern in ("*.md", "data/*.md", "notebooks/*.md", "tests/*.md", "notebooks/*.ipynb", "notebooks/*/*.ipynb")
    for path in ROOT.glob(pattern)
)
LINK = re.compile(r"\]\(\s*<?([^)>\s]+)>?(?:\s+\"[^\"]*\")?\s*\)|^\[[^\]]+\]:\s*(\S+)|(?:href|src)=\"([^\"]+)\"", re.M)

each_document = pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))


@cache
def prose(path):
    """The markdown of a document without its code, in which brackets are no links and # is a comment."""
    if path.suffix == ".ipynb":
        cells = nbformat.read(path, as_version=4).cells
        text = "\n\n".join(cell.source for cell in cells if cell.cell_type == "markdown")
    else:
        text = path.read_text("utf-8")
    return re.sub(
        r"^(```|~~~).*?^\1|`[^`\n]+`",
        lambda code: "" if "\n" in code[0] else code[0].strip("`"),
        text,
        flags=re.MULTILINE | re.DOTALL,
    )


def headings(text):
    """(level, words)"""
    return [(len(marks), words.strip()) for marks, words in re.findall(r"^(#{1,6}) +(.+)$", text, re.MULTILINE)]


def anchors(path):
    """What a link may say after #: in a notebook as Jupyter makes it, elsewhere as GitHub does."""
    found = []
    for _, words in headings(prose(path)):
        words = re.sub(r"!?\[([^\]]*)\]\([^)]*\)|[*`]", r"\1", words)
        if path.suffix == ".ipynb":
            found.append(words.replace(" ", "-"))
        else:
            slug = re.sub(r"[^\w -]", "", words.lower()).replace(" ", "-")
            found.append(f"{slug}-{found.count(slug)}" if slug in found else slug)
    return found


def broken_links(path, text):
    links = ["".join(groups) for groups in LINK.findall(text)]
    for link in links:
        if re.match(r"[a-z]+:", link):
            continue  # no network here
        name, _, anchor = link.partition("#")
        target = path.parent / name if name else path
        is_there = target.exists() and target.resolve().is_relative_to(ROOT)
        has_anchors = target.suffix in (".md", ".ipynb")
        if not is_there or (anchor and not (has_anchors and anchor in anchors(target))):
            yield link


@each_document
def test_links_lead_somewhere(path):
    assert list(broken_links(path, prose(path))) == []


def test_a_link_that_leads_nowhere_is_found(tmp_path):
    good = (
        '[a](README.md#use-the-library) ![b](data/figures/front.png "t") [c](https://example.org/#x) [d](#the-course)'
    )
    assert list(broken_links(ROOT / "README.md", good)) == []
    bad = ["REDME.md", "README.md#use-the-librar", "LICENSE#x", "#no", "../x.md", "data/figures/front.pn"]
    text = "".join(f"[a]({link}) " for link in bad) + '\n[b]: none.md\n<img src="none.png">'
    assert list(broken_links(ROOT / "README.md", text)) == [*bad, "none.md", "none.png"]
    assert "The-question" in anchors(next(iter(ROOT.glob("notebooks/00_*.ipynb"))))


def outline_faults(text):
    """What is wrong with the headings: a jump of levels, or one that stands twice and so has two anchors."""
    above, seen = 0, set()
    for level, words in headings(text):
        if level > above + 1:
            yield f"level {level} below level {above}: {words}"
        if words in seen or (level == 1 and seen):
            yield f"twice: {words}"
        above = level
        seen.add(words)


@each_document
def test_headings_make_one_outline(path):
    assert list(outline_faults(prose(path))) == []


def test_a_fault_of_an_outline_is_found():
    assert list(outline_faults("# A\n## B\n### C\n## D\n### E\n#no heading\n")) == []
    assert list(outline_faults("# A\n### C\n")) == ["level 3 below level 1: C"]
    assert list(outline_faults("## B\n")) == ["level 2 below level 0: B"]
    assert list(outline_faults("# A\n## B\n### C\n## B\n# E\n")) == ["twice: B", "twice: E"]
