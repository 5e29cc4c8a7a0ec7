"""TeX formulas of markdown cells as MathML, so that a page shows them without a connection.

Test: tests/test_report.py.
"""

import re

from latex2mathml.converter import convert
from nbformat import NotebookNode

_CODE_OR_FORMULA = re.compile(
    r"(?P<code>```.*?```|`[^`\n]*`)|\$\$(?P<block>.+?)\$\$|(?<!\\)\$(?P<inline>[^$\n]+?)\$", re.S
)


def with_mathml(markdown: str) -> str:
    """The same markdown, each `$...$` and `$$...$$` outside code as a `<math>` element."""
    return _CODE_OR_FORMULA.sub(_element, markdown)


def show_formulas(notebook: NotebookNode) -> None:
    """Rewrites the markdown cells of `notebook` in place."""
    for cell in notebook.cells:
        if cell.cell_type == "markdown":
            cell.source = with_mathml(cell.source)


def _element(match: re.Match[str]) -> str:
    if match["code"] is not None:
        return match["code"]
    if match["block"] is not None:
        return convert(" ".join(match["block"].split()), display="block")
    return convert(match["inline"])
