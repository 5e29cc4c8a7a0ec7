"""Image sizes -> merged tokens and calls: what a plan is made for."""

import csv
import random
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

import numpy as np

from ..checks import as_positive
from ..geometry import IN_TOKEN_LIMIT, image_geometry
from ..graphs.traffic import Traffic

Size: TypeAlias = tuple[int, int] | tuple[int, int, int]  # width, height in pixels, and how often it comes (once)


@dataclass(frozen=True)
class TokenCounts:
    """How often images of each number of merged tokens come.

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
    """Every image in a call of its own: the whole workload, nothing drawn."""
    return Traffic(workload.tokens[:, None], workload.counts)


def draw_calls(workload: TokenCounts, images: int, calls: int, seed: str) -> Traffic:
    """`calls` calls of `images` images, each drawn by frequency, independently; the same for the same seed."""
    drawn = random.Random(seed).choices(workload.tokens.tolist(), workload.counts.tolist(), k=calls * images)
    return Traffic(np.sort(np.array(drawn, dtype=np.int64).reshape(calls, images), axis=1), np.ones(calls))


def read_sizes(path: str | Path, in_token_limit: int = IN_TOKEN_LIMIT) -> tuple[list[tuple[int, int, int]], list[str]]:
    """(width, height, count) of the rows of a CSV file, and for each bad row one line that says which and why.

    The columns are width, height and, where there is one, count; under a header they may stand in any order, among
    others.

    Raises:
        ValueError: a file that is empty or no text, or whose header does not name width and height.
        OSError: it cannot be read.
    """
    try:
        with open(path, newline="", encoding="utf-8-sig") as file:
            reader = csv.reader(file)
            rows = [(reader.line_num, [cell.strip() for cell in row]) for row in reader]
    except (UnicodeDecodeError, csv.Error) as error:
        raise ValueError(f"{path}: not a CSV file ({error})") from error
    rows = [(line, cells) for line, cells in rows if any(cells)]
    if not rows:
        raise ValueError(f"{path}: the file is empty; give rows of width,height[,count]")
    columns = [name.lower() for name in rows[0][1]]
    if any(name.isdecimal() for name in columns):
        columns = ["width", "height", "count"]
    elif {"width", "height"} <= set(columns):
        rows = rows[1:]
    else:
        raise ValueError(f"{path}: the header names {', '.join(columns)}, but width and height are needed")
    sizes, faults = [], []
    for line, cells in rows:
        try:
            sizes.append(_size(columns, cells, in_token_limit))
        except ValueError as error:
            faults.append(f"{path}, line {line}: {error}")
    return sizes, faults


def _size(columns: Sequence[str], cells: Sequence[str], in_token_limit: int) -> tuple[int, int, int]:
    if len(cells) > len(columns):
        raise ValueError(f"{len(cells)} fields, at most {len(columns)} are expected")
    fields = {"count": "1"} | dict(zip(columns, cells, strict=False))
    width, height, count = (_whole(name, fields.get(name)) for name in ("width", "height", "count"))
    image_geometry(width, height, in_token_limit=in_token_limit)
    return width, height, count


def _whole(name: str, text: str | None) -> int:
    if text is None:
        raise ValueError(f"no {name}")
    if not (text.isdecimal() and len(text) < 10 and int(text)):
        raise ValueError(f"{name} must be a whole number from 1 to 999999999, got {text[:40]!r}")
    return int(text)
