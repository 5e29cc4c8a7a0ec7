"""The pages: an index with a card for each notebook, and each executed notebook. One file each, nothing to fetch.

Test: tests/test_report.py.
"""

import copy
import os
import re
from collections.abc import Collection
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import jinja2
from latex2mathml.converter import convert
from nbconvert import HTMLExporter
from nbformat import NotebookNode
from pygments.formatters.html import HtmlFormatter

from ..measure.provenance import provenance
from .contents import Contents, contents, pictures
from .execution import Execution

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
    """One notebook in the index. `cached`: not executed in this run, because nothing that it depends on has changed."""

    name: str
    contents: Contents
    execution: Execution
    cached: bool


@dataclass(frozen=True)
class Picture:
    """A PNG in base64, and its words."""

    png: str
    alt: str


def write_notebook_page(
    path: Path, notebook: NotebookNode, execution: Execution, *, cached: bool, names: Collection[str], folder: Path
) -> Card:
    """Writes `<name>.html`, the executed notebook with its pictures inside, and returns its card for the index.

    Args:
        path: the notebook's source: what its relative links start from.
        names: the notebooks that have a page in `folder`.
    """
    card = Card(path.stem, contents(notebook), execution, cached)
    for _, output, words in pictures(notebook):
        output.metadata["alt"] = words
    shown = copy.deepcopy(notebook)
    for cell in shown.cells:
        if cell.cell_type == "markdown":
            cell.source = with_mathml(cell.source)
    body, _ = _exporter().from_notebook_node(shown)

    def link(match: re.Match[str]) -> str:
        target = path.parent / match[1]
        if target.suffix == ".ipynb" and target.parent == path.parent and target.stem in names:
            return f'href="{target.stem}.html"'
        return f'href="{os.path.relpath(target, folder)}"'

    body = re.sub(r'href="(?!\w+:|#)([^"]+)"', link, body)
    page = folder / f"{card.name}.html"
    _write(page, "notebook.html.j2", card=card, body=body)
    return card


def write_index(cards: list[Card], front: Picture | None, folder: Path) -> Path:
    """Writes `index.html`: the machine, the front picture, the cards.

    Args:
        front: None leaves its place to the first notebook's headline picture.
    """
    return _write(folder / "index.html", "index.html.j2", cards=cards, front=front, origin=provenance())


def with_mathml(markdown: str) -> str:
    """The same markdown, each `$...$` and `$$...$$` outside code as a `<math>` element, which needs no connection."""
    return _CODE_OR_FORMULA.sub(_element, markdown)


def _element(match: re.Match[str]) -> str:
    if match["code"] is not None:
        return match["code"]
    if match["block"] is not None:
        return convert(" ".join(match["block"].split()), display="block")
    return convert(match["inline"])


@cache
def _exporter() -> HTMLExporter:
    return HTMLExporter(
        raw_template=_PICTURE_WITH_WORDS,
        exclude_input_prompt=True,
        exclude_output_prompt=True,
        exclude_anchor_links=True,
    )


def _write(path: Path, template: str, **values: Any) -> Path:
    light, dark = (HtmlFormatter(style=style, nobackground=True).get_style_defs(".highlight") for style in _CODE_STYLES)
    css = f"{(_FOLDER / 'style.css').read_text()}\n{light}\n@media (prefers-color-scheme: dark) {{\n{dark}\n}}"
    path.write_text(_TEMPLATES.get_template(template).render(css=css, **values))
    return path
