"""Image sizes from a server's or proxy's log: a file of JSON lines, one request in a line.

In each line, at any depth, an image is an object with whole numbers `width` and `height`, or a text that holds an image
in base64, as chat requests carry it ("data:image/png;base64,..."), of which only the header is read. An object with
both numbers is one image, and nothing inside it is looked at, so that an image is not counted twice. An image that is
an address has no size here, because nothing is fetched.

Test: tests/test_traffic_log.py.
"""

import base64
import io
import json
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..geometry import IN_TOKEN_LIMIT, image_geometry
from ..images.opening import open_image

_DATA_URI = re.compile(r"data:image/[\w.+-]+(?:;[\w.=+-]+)*;base64,([\w+/=-]+)")


@dataclass
class LogSizes:
    """What a log says about images.

    Attributes:
        sizes: (width, height, count), each size once, in the order of their first line.
        images_in_a_line: how many images -> how many lines have so many, lines without an image left out.
        lines: all that are not empty.
        faults: one line of text for each line of the log that is not JSON and each image that cannot be used.
    """

    sizes: list[tuple[int, int, int]] = field(default_factory=list)
    images_in_a_line: Counter[int] = field(default_factory=Counter)
    lines: int = 0
    faults: list[str] = field(default_factory=list)


def read_log(path: Path, in_token_limit: int = IN_TOKEN_LIMIT) -> LogSizes:
    """Reads every line of the file. OSError if it cannot be read.

    Example: the line `{"prompt": "Read it.", "image": {"width": 640, "height": 480}}` gives (640, 480, 1).
    """
    found, counts = LogSizes(), Counter[tuple[int, int]]()
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            if not line.strip():
                continue
            found.lines += 1
            try:
                images = list(_images(json.loads(line)))
            except (ValueError, RecursionError):
                found.faults.append(f"{path}, line {number}: not JSON")
                continue
            usable = 0
            for image in images:
                try:
                    width, height = image if isinstance(image, tuple) else _size_of_base64(image)
                    image_geometry(width, height, in_token_limit=in_token_limit)
                except ValueError as error:
                    found.faults.append(f"{path}, line {number}: {error}")
                else:
                    usable += 1
                    counts[width, height] += 1
            if usable:
                found.images_in_a_line[usable] += 1
    found.sizes = [(*size, count) for size, count in counts.items()]
    return found


def _images(value: Any) -> Iterator[tuple[int, int] | str]:
    """(width, height) or base64 text of each image in a JSON value, in order."""
    if isinstance(value, dict):
        size = value.get("width"), value.get("height")
        if all(type(side) is int for side in size):
            yield size
            return
        value = list(value.values())
    if isinstance(value, list):
        for part in value:
            yield from _images(part)
    elif isinstance(value, str):
        for match in _DATA_URI.finditer(value):
            yield match[1]


def _size_of_base64(text: str) -> tuple[int, int]:
    """ValueError where the text holds no image."""
    try:
        content = base64.b64decode(text.replace("-", "+").replace("_", "/") + "=" * (-len(text) % 4))
        with open_image(io.BytesIO(content)) as image:
            return image.size
    except Exception as error:  # decoders raise OSError, SyntaxError, struct.error, zlib.error and more
        raise ValueError(f"an image in base64 that cannot be read ({type(error).__name__})") from error
