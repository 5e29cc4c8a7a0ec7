"""The parts of an executed notebook that the index shows: title, question, headline figure and result.

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
    what the cell tagged "result" holds. A part that is missing, as in a notebook that failed before it, is empty."""

    title: str
    question: str
    picture: str
    picture_alt: str
    result_html: str


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
    return Contents(
        title=_plain(title[1]) if title else "",
        question=notebook.metadata.get("kimivl_lab", {}).get("question", ""),
        picture=picture,
        picture_alt=alt,
        result_html="".join(results),
    )


def pictures(notebook: NotebookNode) -> Iterator[tuple[NotebookNode, NotebookNode, str]]:
    """(cell, output, words) of every PNG output; the words are the paragraph of reading below the picture."""
    for cell, following in zip(notebook.cells, [*notebook.cells[1:], None], strict=True):
        below = following.source if following and following.cell_type == "markdown" else ""
        words = _plain(re.split(r"\n\s*\n", below.strip())[0].removeprefix("*How to read it:*"))
        for output in cell.get("outputs", []):
            if "image/png" in output.get("data", {}):
                yield cell, output, words


def _plain(markdown: str) -> str:
    """Inline markdown as plain words: no emphasis, code or formula marks, no link targets."""
    words = re.sub(r"!?\[([^\]]*)\]\([^)]*\)", r"\1", " ".join(markdown.split()))
    return re.sub(r"\*\*|[*`$]|(?<!\w)_|_(?!\w)", "", words).strip()


def _result_html(cell: NotebookNode) -> str:
    """A text cell's markdown without its headings; a code cell's printed lines, each a paragraph."""
    if cell.cell_type == "markdown":
        return markdown2html(re.sub(r"^#+ .*$", "", cell.source, flags=re.MULTILINE))
    text = "\n".join(output.get("text") or output.get("data", {}).get("text/plain", "") for output in cell.outputs)
    return "".join(f"<p>{html.escape(line)}</p>" for line in text.splitlines() if line.strip())
