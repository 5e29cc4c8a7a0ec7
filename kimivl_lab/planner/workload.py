"""Image sizes become merged tokens and calls, the workload that a plan is made for; and CSV files become image sizes.

Test: tests/test_budgets.py, tests/test_plan.py.
"""

import csv
import io
import random
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

import numpy as np

from ..checks import as_positive
from ..geometry import IN_TOKEN_LIMIT, image_geometry
from ..graphs.packing import Traffic
from ..parallel.balance import get_dp_encoder_lb_assignment

Size: TypeAlias = tuple[int, int] | tuple[int, int, int]  # width and height in pixels; how many such images (else 1)

_COLUMNS = ("width", "height", "count")
_SEPARATORS = {",": "comma", ";": "semicolon", "\t": "tab"}


@dataclass(frozen=True)
class TokenCounts:
    """How many images have each number of merged tokens.

    Attributes:
        tokens: (m,) int64, ascending, distinct.
        counts: (m,) float64.
    """

    tokens: np.ndarray
    counts: np.ndarray

    @property
    def images(self) -> int:
        return int(self.counts.sum())

    @property
    def mean(self) -> float:
        """Merged tokens of one image, on average."""
        return float(np.average(self.tokens, weights=self.counts))


def count_tokens(sizes: Iterable[Size], in_token_limit: int = IN_TOKEN_LIMIT) -> TokenCounts:
    """Merged tokens of image sizes, by `image_geometry`.

    Raises:
        ValueError: no sizes; one that is not (width, height) or (width, height, count); one that the processor refuses.
    """
    counts: Counter[int] = Counter()
    for size in sizes:
        if not 2 <= len(size) <= 3:
            raise ValueError(f"a size is (width, height) or (width, height, count), got {size!r}")
        count = as_positive(f"the count of size {size!r}", size[2] if len(size) == 3 else 1)
        counts[image_geometry(size[0], size[1], in_token_limit=in_token_limit).tokens] += count
    if not counts:
        raise ValueError("no image sizes: a plan needs at least one")
    tokens = sorted(counts)
    return TokenCounts(np.array(tokens, dtype=np.int64), np.array([counts[number] for number in tokens], dtype=float))


def all_calls_of_one(workload: TokenCounts) -> Traffic:
    """Every image in a call alone: the whole workload, without drawing."""
    return Traffic(workload.tokens[:, None], workload.counts)


def draw_calls(workload: TokenCounts, images: int, calls: int, seed: str) -> Traffic:
    """`calls` calls of `images` images, each drawn by frequency, independently; the same for the same seed."""
    drawn = random.Random(seed).choices(workload.tokens.tolist(), workload.counts.tolist(), k=calls * images)
    return Traffic(np.sort(np.array(drawn, dtype=np.int64).reshape(calls, images), axis=1), np.ones(calls))


def busiest_rank(calls: Traffic, ranks: int) -> tuple[Traffic, int]:
    """What the rank with the most patches encodes of each call, and the most images that any rank gets of one.

    The images of a call are balanced over `ranks` by the engines' rule, so the ranks need not hold equal numbers of
    images. [1000, 400, 400, 300] on 2 ranks: the busiest has 3 images of 1,100 tokens, the other one the largest image.
    Ranks without an image do not count.
    """
    if ranks == 1:
        return calls, calls.tokens.shape[1]
    busiest, most = [], 0
    for call in calls.tokens.tolist():
        placed = get_dp_encoder_lb_assignment(call, ranks)
        held = placed.by_rank[placed.loads.index(max(placed.loads))]
        busiest.append(sorted(call[image] for image in held))
        most = max(most, *placed.counts)
    width = max(map(len, busiest))
    tokens = np.array([[0] * (width - len(held)) + held for held in busiest], dtype=np.int64)
    return Traffic(tokens, calls.weights), most


def read_sizes(path: Path, in_token_limit: int = IN_TOKEN_LIMIT) -> tuple[list[tuple[int, int, int]], list[str]]:
    """Sizes from a CSV file with lines of width,height[,count], and one message for each line that is not used.

    A header may name the columns in any order, among others. Without a header the order is width, height, count.
    Commas, semicolons or tabs separate columns: the one of them that the first line contains.

    Raises:
        ValueError: no text, no lines, a header without width and height or with one of the three columns twice, or a
            first line with several separators or without one.
        OSError: the file cannot be read.
    """
    try:
        text = path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path}: not a CSV file ({error.reason} at byte {error.start}; UTF-8 is read)") from error
    try:
        reader = csv.reader(io.StringIO(text, newline=""), delimiter=_separator(path, text))
        lines = [(reader.line_num, [cell.strip() for cell in cells]) for cells in reader]
    except csv.Error as error:
        raise ValueError(f"{path}: not a CSV file ({error})") from error
    lines = [(number, cells) for number, cells in lines if any(cells)]
    if not lines:
        raise ValueError(f"{path}: the file is empty; give lines of width,height[,count]")
    columns: Sequence[str] = [name.lower() for name in lines[0][1]]
    if any(name.isdecimal() for name in columns):
        columns = _COLUMNS
    else:
        _require_columns(path, columns)
        lines = lines[1:]
    sizes, faults = [], []
    for number, cells in lines:
        try:
            sizes.append(_size(columns, cells, in_token_limit))
        except ValueError as error:
            faults.append(f"{path}, line {number}: {error}")
    return sizes, faults


def _separator(path: Path, text: str) -> str:
    """The separator under which the first line names width and height or holds two numbers; else the only one in it."""
    first = next((line for line in text.splitlines() if line.strip()), ",")
    present = [separator for separator in _SEPARATORS if separator in first]
    fitting = []
    for separator in present:
        cells = [cell.strip().lower() for cell in next(csv.reader([first], delimiter=separator))]
        if {"width", "height"} <= set(cells) or all(cell.isdecimal() for cell in cells[:2]):
            fitting.append(separator)
    for found in (fitting, present):
        if len(found) == 1:
            return found[0]
    names = " and ".join(_SEPARATORS[separator] for separator in present) or "no separator"
    raise ValueError(
        f"{path}: the first line, {first[:80]!r}, contains {names}: "
        f"give width,height[,count] in lines, separated by comma, semicolon or tab"
    )


def _require_columns(path: Path, columns: Sequence[str]) -> None:
    repeated = [name for name in _COLUMNS if columns.count(name) > 1]
    if repeated:
        raise ValueError(f"{path}: the header names {', '.join(repeated)} more than once: {', '.join(columns):.200}")
    if not {"width", "height"} <= set(columns):
        raise ValueError(f"{path}: the header names {', '.join(columns):.200}, but width and height are needed")


def _size(columns: Sequence[str], cells: Sequence[str], in_token_limit: int) -> tuple[int, int, int]:
    if len(cells) > len(columns):
        raise ValueError(f"{len(cells)} fields, at most {len(columns)} are expected")
    fields = {"count": "1"} | dict(zip(columns, cells, strict=False))
    width, height, count = (_whole(name, fields.get(name)) for name in _COLUMNS)
    image_geometry(width, height, in_token_limit=in_token_limit)
    return width, height, count


def _whole(name: str, text: str | None) -> int:
    if text is None:
        raise ValueError(f"no {name}")
    if not (text.isdecimal() and len(text) < 10 and int(text)):
        raise ValueError(f"{name} must be a whole number from 1 to 999999999, got {text[:40]!r}")
    return int(text)
