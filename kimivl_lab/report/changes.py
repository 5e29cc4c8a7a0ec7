"""What changed between the saved outputs of a notebook and those of a new execution.

Each change has a class:

    "timing"    a figure, or only numbers and the order of lines in a cell tagged nbval-ignore-output
    "cosmetic"  white space, addresses, the build of torch, the cell's number, ids, metadata, the bytes of a same figure
    "semantic"  everything else: another word, number or kind of output

In a cell without the tag the order of lines is semantic: nbval compares it, and a ranking may be the point.

Test: tests/test_refresh.py.
"""

import base64
import io
import re
from collections.abc import Iterator
from dataclasses import dataclass
from difflib import SequenceMatcher
from functools import cache
from itertools import zip_longest
from os.path import commonprefix
from typing import Any

import numpy as np
from nbformat import NotebookNode
from nbval.plugin import get_sanitize_patterns
from PIL import Image

from ..datasets import repository_root

CLASSES = ("timing", "cosmetic", "semantic")  # the worst last
_LIVE = "nbval-ignore-output"
_NUMBER = re.compile(r"(?<![\w.])[-+]?\d[\d,]*(\.\d+)*(e[-+]?\d+)?( ?(ns|us|µs|ms|s|min)\b)?")
_SHOWN = 50  # characters of each side of a difference


@dataclass(frozen=True)
class Change:
    """One cell that is not as before. `cell` is the number that Jupyter shows, 0 for the notebook as a whole."""

    cell: int
    kind: str
    text: str


def changes(before: NotebookNode, after: NotebookNode) -> list[Change]:
    """Every code cell whose output changed, with its worst change, in the order of the cells.

    An edited cell is compared with the cell that it replaces. The code itself is not compared: its difference is that
    of the text in notebooks/text.
    """
    found = []
    for number, (old, new) in enumerate(_pairs(before, after), 1):
        of_the_cell = list(_cell_changes(old, new))
        if of_the_cell:
            kind, text = max(of_the_cell, key=lambda change: CLASSES.index(change[0]))
            found.append(Change(number, kind, text))
    if before.metadata != after.metadata:
        found.append(Change(0, "cosmetic", "metadata of the notebook"))
    return found


def _pairs(before: NotebookNode, after: NotebookNode) -> Iterator[tuple[NotebookNode | None, NotebookNode | None]]:
    """Cells that belong together: those of the same code, and between them the others in their order."""
    old, new = ([cell for cell in one.cells if cell.cell_type == "code"] for one in (before, after))
    matcher = SequenceMatcher(None, [cell.source for cell in old], [cell.source for cell in new], autojunk=False)
    for _, i1, i2, j1, j2 in matcher.get_opcodes():
        yield from zip_longest(old[i1:i2], new[j1:j2])


def _cell_changes(old: NotebookNode | None, new: NotebookNode | None) -> Iterator[tuple[str, str]]:
    """(class, short text) of everything that differs."""
    old_parts, new_parts = _parts(old), _parts(new)
    old_kinds, new_kinds = ([kind for kind, _ in parts] for parts in (old_parts, new_parts))
    if old_kinds != new_kinds:
        yield "semantic", f"{', '.join(old_kinds) or 'no output'} -> {', '.join(new_kinds) or 'no output'}"
        return
    live = all(cell is not None and _LIVE in cell.metadata.get("tags", []) for cell in (old, new))
    for (kind, one), (_, other) in zip(old_parts, new_parts, strict=True):
        if one != other and kind.startswith("image/"):
            yield _figure_change(kind, one, other)
        elif one != other:
            yield _text_change(one, other, live=live and kind not in ("error", "stderr"))
    if old is not None and new is not None:
        for name in ("execution_count", "id", "metadata"):
            if old.get(name) != new.get(name):
                yield "cosmetic", f"{name} of the cell"


def _parts(cell: NotebookNode | None) -> list[tuple[str, str]]:
    """(kind, text) of the outputs: the printed text in one piece, then all others."""
    printed: dict[str, str] = {}
    others: list[tuple[str, str]] = []
    for output in cell.outputs if cell is not None else ():
        if output.output_type == "stream":
            printed[output.name] = printed.get(output.name, "") + output.text
        elif output.output_type == "error":
            others.append(("error", f"{output.ename}: {output.evalue}"))
        else:
            others += [(mime, _as_text(output.data[mime])) for mime in sorted(output.data)]
    return sorted(printed.items()) + others


def _as_text(value: Any) -> str:
    return value if isinstance(value, str) else repr(value)  # JSON's mime types hold objects


def _figure_change(mime: str, one: str, other: str) -> tuple[str, str]:
    if mime == "image/svg+xml":
        return "timing", "a figure"
    before, after = (np.asarray(Image.open(io.BytesIO(base64.b64decode(png))).convert("RGBA")) for png in (one, other))
    if before.shape != after.shape:
        (height, width), (new_height, new_width) = before.shape[:2], after.shape[:2]
        return "timing", f"a figure of {width}x{height} pixels -> {new_width}x{new_height}"
    share = (before != after).any(axis=-1).mean()
    return ("timing", f"a figure, {share:.1%} of its pixels") if share else ("cosmetic", "the bytes of a same figure")


def _text_change(one: str, other: str, *, live: bool) -> tuple[str, str]:
    before, after = _lines(one), _lines(other)
    if before == after:
        return "cosmetic", "white space, addresses or torch's build"
    if live:
        masked = [_NUMBER.sub("#", line) for line in before], [_NUMBER.sub("#", line) for line in after]
        if sorted(masked[0]) == sorted(masked[1]):
            return "timing", f"numbers in {sum(line not in before for line in after)} of {len(after)} lines"
        before = [line for line, words in zip(before, masked[0], strict=True) if words not in masked[1]]
        after = [line for line, words in zip(after, masked[1], strict=True) if words not in masked[0]]
    pairs = [pair for pair in zip_longest(before, after, fillvalue="") if pair[0] != pair[1]]
    if not pairs:
        return "semantic", "a line that stood there already came again, or one of them went"
    rest = f", and {len(pairs) - 1} more lines" if len(pairs) > 1 else ""
    return "semantic", f"{_excerpt(*pairs[0])}{rest}"


def _excerpt(before: str, after: str) -> str:
    """Both lines from a little before their first difference."""
    same = len(commonprefix([before, after]))
    start = max(0, same - _SHOWN // 2)
    return " -> ".join(repr(line[start : start + _SHOWN]) for line in (before, after))


def _lines(text: str) -> list[str]:
    """Lines without what no reader sees: what nbval rewrites, runs of blanks, empty lines at the end."""
    for pattern, replacement in _sanitize_rules().items():
        text = re.sub(pattern, replacement, text)
    return [" ".join(line.split()) for line in text.strip().splitlines()]


@cache
def _sanitize_rules() -> dict[str, str]:
    return dict(get_sanitize_patterns((repository_root() / "tests" / "nbval_sanitize.cfg").read_text(encoding="utf-8")))
