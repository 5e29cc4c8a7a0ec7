"""The parts of an executed notebook that the report shows: title, question, headline figure, result, headings.

Test: tests/test_report.py.
"""

import html
import re
from collections.abc import Iterator
from dataclasses import dataclass

from nbconvert.filters import markdown2html
from nbformat import NotebookNode


@dataclass(frozen=True)
class Contents:
    """`picture` is the last PNG, in base64, of the cell tagged "headline", `picture_alt` its words; `result_html` is
    what the cell tagged "result" holds; `machine` is the first line that the notebook prints, which every lesson uses
    for the machine. A part that is missing, as in a notebook that failed before it, is empty."""

    title: str
    question: str
    picture: str
    picture_alt: str
    result_html: str
    machine: str


@dataclass(frozen=True)
class Heading:
    """A heading of a page: its level, its words, and the anchor that a link names after `#`."""

    level: int
    text: str
    anchor: str


def contents(notebook: NotebookNode) -> Contents:
    """Reads the parts of one notebook."""
    texts = [cell.source for cell in notebook.cells if cell.cell_type == "markdown"]
    title = re.match(r"# +(.+)", "\n".join(texts))
    headlines = [
        (output.data["image/png"].replace("\n", ""), words)
        for cell, output, words in pictures(notebook)
        if "headline" in cell.metadata.get("tags", [])
    ]
    picture, alt = headlines[-1] if headlines else ("", "")
    results = [_result_html(cell) for cell in notebook.cells if "result" in cell.metadata.get("tags", [])]
    printed = [output.text for cell in notebook.cells for output in cell.get("outputs", []) if "text" in output]
    return Contents(
        title=plain(title[1]) if title else "",
        question=notebook.metadata.get("kimivl_lab", {}).get("question", ""),
        picture=picture,
        picture_alt=alt,
        result_html="".join(results),
        machine=printed[0].partition("\n")[0] if printed else "",
    )


def pictures(notebook: NotebookNode) -> Iterator[tuple[NotebookNode, NotebookNode, str]]:
    """(cell, output, words) of every PNG output; the words are the paragraph of reading below the picture."""
    for cell, following in zip(notebook.cells, [*notebook.cells[1:], None], strict=True):
        below = following.source if following and following.cell_type == "markdown" else ""
        words = plain(re.split(r"\n\s*\n", below.strip())[0].removeprefix("*How to read it:*"))
        for output in cell.get("outputs", []):
            if "image/png" in output.get("data", {}):
                yield cell, output, words


def anchored(body: str) -> tuple[str, list[Heading]]:
    """The HTML with an id on every heading, and the headings. The ids are those of GitHub: "Predict: the cost" has the
    id "predict-the-cost", and a second heading with these words has "predict-the-cost-1"."""
    found: list[Heading] = []

    def add(match: re.Match[str]) -> str:
        text = " ".join(html.unescape(re.sub(r"<[^>]*>", "", match[2])).split())
        base = slug(text)
        before = sum(slug(heading.text) == base for heading in found)
        found.append(Heading(int(match[1]), text, f"{base}-{before}" if before else base))
        return f'<h{match[1]} id="{html.escape(found[-1].anchor)}">{match[2]}</h{match[1]}>'

    return re.sub(r"<h([1-6])>(.*?)</h\1>", add, body, flags=re.DOTALL), found


def slug(text: str) -> str:
    """A heading's anchor. Jupyter's form of the same anchor, "Predict:-the-cost", gives the same result."""
    return re.sub(r"[^\w -]", "", text.lower()).strip().replace(" ", "-")


def plain(markdown: str) -> str:
    """Inline markdown as plain words: no emphasis, code or formula marks, no link targets."""
    words = re.sub(r"!?\[([^\]]*)\]\([^)]*\)", r"\1", " ".join(markdown.split()))
    return re.sub(r"\*\*|[*`$]|(?<!\w)_|_(?!\w)", "", words).strip()


def _result_html(cell: NotebookNode) -> str:
    """A text cell's markdown without its headings; what a code cell printed, up to each full stop."""
    if cell.cell_type == "markdown":
        return markdown2html(re.sub(r"^#+ .*$", "", cell.source, flags=re.MULTILINE))
    text = "\n".join(output.get("text") or output.get("data", {}).get("text/plain", "") for output in cell.outputs)
    paragraphs = re.split(r"(?<=[.!?])\n", text.strip())
    return "".join(f"<p>{html.escape(' '.join(one.split()))}</p>" for one in paragraphs if one.strip())
