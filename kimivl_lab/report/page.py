"""The pages: an index with a card for each notebook, and a page for each notebook, solution and text.

Each page is one file. It holds its pictures, its style and its script, and its security policy forbids the browser to
fetch anything. All pages hold the same table of contents, in which a script searches.

Test: tests/test_report.py, tests/test_report_browser.py.
"""

import copy
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import jinja2
from latex2mathml.converter import convert
from nbconvert import HTMLExporter
from nbformat import NotebookNode
from nbformat.v4 import new_markdown_cell, new_notebook
from pygments.formatters.html import HtmlFormatter

from ..bench.gpu_claims import NOISE
from ..measure.provenance import provenance
from .contents import Contents, Heading, anchored, pictures, slug
from .execution import Execution
from .results import Result

_FOLDER = Path(__file__).parent
_TEMPLATES = jinja2.Environment(
    loader=jinja2.FileSystemLoader(_FOLDER), autoescape=True, trim_blocks=True, lstrip_blocks=True
)
_CODE_STYLES = ("vs", "github-dark")  # pygments' styles for light and dark, both of high contrast
_PICTURE_WITH_WORDS = """{%- extends 'basic/index.html.j2' -%}
{% block data_png -%}
<img src="data:image/png;base64,{{ output.data['image/png'] }}" alt="{{ output.metadata['alt'] | escape_html }}">
{%- endblock data_png %}"""

_CODE_OR_FORMULA = re.compile(
    r"(?P<code>```.*?```|`[^`\n]*`)|\$\$(?P<block>.+?)\$\$|(?<!\\)\$(?P<inline>[^$\n]+?)\$", re.S
)


@dataclass(frozen=True)
class Card:
    """One lesson in the index.

    `execution` is None where the outputs are those that the notebook was saved with. `cached`: not executed in this
    run, because nothing that it depends on has changed.
    """

    name: str
    contents: Contents
    execution: Execution | None = None
    cached: bool = False


@dataclass(frozen=True)
class Page:
    """One page before it is written. `card` is None for a solution and for a text such as the glossary."""

    name: str
    body: str
    headings: Sequence[Heading]
    card: Card | None = None

    @property
    def title(self) -> str:
        return self.headings[0].text if self.headings else self.name


@dataclass(frozen=True)
class Picture:
    """A PNG in base64, and its words."""

    png: str
    alt: str


def notebook_page(
    path: Path, notebook: NotebookNode, names: Mapping[Path, str], folder: Path, card: Card | None = None
) -> Page:
    """The page of a notebook, with its pictures inside.

    Args:
        path: the notebook's source: what its relative links start from.
        names: every source that has a page in `folder`, and the page's name.
    """
    shown = copy.deepcopy(notebook)
    for _, output, words in pictures(shown):
        output.metadata["alt"] = words
    for cell in shown.cells:
        if cell.cell_type == "markdown":
            cell.source = with_mathml(cell.source)
    body, _ = _exporter().from_notebook_node(shown)

    def link(match: re.Match[str]) -> str:
        file, mark, fragment = match[1].partition("#")
        target = path.parent / file
        name = names.get(target.resolve())
        if name is None:
            return f'href="{os.path.relpath(target, folder)}{mark}{fragment}"'
        return f'href="{name}.html{mark}{slug(fragment)}"'

    body, headings = anchored(re.sub(r'href="(?!\w+:|#)([^"]+)"', link, body))
    return Page(names[path.resolve()], body, headings, card)


def text_page(path: Path, names: Mapping[Path, str], folder: Path) -> Page:
    """The page of a markdown file, such as the glossary."""
    notebook = new_notebook(cells=[new_markdown_cell(path.read_text(encoding="utf-8"))])
    return notebook_page(path, notebook, names, folder)


def write_pages(pages: Sequence[Page], front: Picture | None, lines: Sequence[Result], folder: Path) -> Path:
    """Writes every page and `index.html`, which shows the front picture, the results and the cards; its path.

    Args:
        front: None leaves its place to the first notebook's headline picture.
    """
    for page in pages:
        _write(folder / f"{page.name}.html", "notebook.html.j2", page=page, pages=pages)
    cards = [page.card for page in pages if page.card]
    by_number = {card.name[:2]: card.name for card in cards}
    values = {"cards": cards, "pages": pages, "front": front, "lines": lines, "by_number": by_number}
    return _write(folder / "index.html", "index.html.j2", origin=provenance(), noise=NOISE, **values)


def with_mathml(markdown: str) -> str:
    """The same markdown, each `$...$` and `$$...$$` outside code as a `<math>` element, which needs no connection."""
    return _CODE_OR_FORMULA.sub(_element, markdown)


def _element(match: re.Match[str]) -> str:
    if match["code"] is not None:
        return match["code"]
    if match["block"] is not None:
        formula = _convert(" ".join(match["block"].split()), display="block")
        return f'<span class="formula">{formula}</span>'  # a formula that is wider than a phone scrolls in its span
    return _convert(match["inline"])


def _convert(formula: str, display: str = "inline") -> str:
    """MathML, in which `1{,}656` is one number, without the space that follows a comma elsewhere."""
    return convert(formula, display=display).replace("</mn><mrow><mo>&#x0002C;</mo></mrow><mn>", ",")


@cache
def _exporter() -> HTMLExporter:
    return HTMLExporter(
        raw_template=_PICTURE_WITH_WORDS,
        exclude_input_prompt=True,
        exclude_output_prompt=True,
        exclude_anchor_links=True,
    )


def render(template: str, styles: Iterable[str], script: str, **values: Any) -> str:
    """A template's HTML, with these style sheets and this script of the folder inside it."""
    light, dark = (HtmlFormatter(style=style, nobackground=True).get_style_defs(".highlight") for style in _CODE_STYLES)
    css = "\n".join((_FOLDER / name).read_text(encoding="utf-8") for name in styles)
    if "style.css" in styles:
        light += f"\n@media (prefers-color-scheme: dark) {{\n{dark}\n}}"
    text = (_FOLDER / script).read_text(encoding="utf-8")
    return _TEMPLATES.get_template(template).render(css=f"{css}\n{light}", script=text, **values)


def _write(path: Path, template: str, **values: Any) -> Path:
    path.write_text(render(template, ("style.css",), "contents.js", **values), encoding="utf-8")
    return path
