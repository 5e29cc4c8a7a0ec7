"""The requests of a load test, drawn before it starts: when each arrives, and which images it holds.

Arrivals are an open loop: their times are fixed beforehand and do not wait for answers, as users do not. Each image has
pixels that no other has, because a server keeps the features of an image that it has seen.

Test: tests/test_ttft.py.
"""

import base64
import io
import random
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from PIL import Image

from ..checks import as_positive
from ..geometry import IN_TOKEN_LIMIT, image_geometry

Size = tuple[int, int]  # (width, height) in pixels


@dataclass(frozen=True)
class Request:
    """One request.

    Attributes:
        arrival: seconds from the start of the test to the time when a user would send it.
        sizes: (width, height) of its images, in pixels.
        seed: of the pixels.
    """

    index: int
    arrival: float
    sizes: tuple[Size, ...]
    seed: int

    def image_tokens(self, in_token_limit: int = IN_TOKEN_LIMIT) -> int:
        return sum(image_geometry(*size, in_token_limit=in_token_limit).tokens for size in self.sizes)


def draw_requests(
    requests: int,
    rate: float,
    sizes: Sequence[tuple[int, int, int]],
    images: Sequence[int] = (1,),
    arrivals: str = "poisson",
    seed: int = 0,
) -> list[Request]:
    """`requests` requests in the order of their arrival; the same for the same arguments.

    Args:
        rate: requests a second, on average.
        sizes: (width, height, count); a size is drawn in proportion to its count.
        images: each request holds one of these numbers of images, drawn with equal chances.
        arrivals: "poisson" (independent users) or "constant".

    Raises:
        ValueError: a rate that is not above 0, no sizes, an unknown kind of arrivals.
    """
    as_positive("requests", requests)
    if not 0 < rate < float("inf"):
        raise ValueError(f"rate must be above 0 requests a second, got {rate}")
    if arrivals not in ("poisson", "constant"):
        raise ValueError(f'arrivals must be "poisson" or "constant", got {arrivals!r}')
    if not sizes or not images or any(number < 0 for number in images):
        raise ValueError(f"sizes and images must not be empty, images of a request not below 0: {images!r}")
    chance = random.Random(f"{seed} arrivals")
    gaps = [chance.expovariate(rate) if arrivals == "poisson" else 1 / rate for _ in range(requests)]
    times = np.cumsum([0.0, *gaps[1:]]).tolist()
    draw = random.Random(f"{seed} images")
    pool, counts = [size[:2] for size in sizes], [size[2] for size in sizes]
    made = []
    for index, arrival in enumerate(times):
        own = tuple(draw.choices(pool, counts, k=draw.choice(list(images))))
        made.append(Request(index, arrival, own, draw.getrandbits(48)))
    return made


def message(request: Request, question: str, salt: int = 0) -> dict:
    """The user's message: the images as data in JPEG, then the question.

    Args:
        salt: another number gives other pixels, so that a second run meets no cache of the first.
    """
    chance = np.random.default_rng([request.seed, salt])
    content: list[dict] = [
        {"type": "image_url", "image_url": {"url": _data_url(new_image(*size, chance))}} for size in request.sizes
    ]
    return {"role": "user", "content": [*content, {"type": "text", "text": question}]}


def new_image(width: int, height: int, chance: np.random.Generator) -> Image.Image:
    """Random colours, smooth over the image: new for each state of `chance`, and small as a file."""
    coarse = chance.integers(0, 256, (8, 8, 3), dtype=np.uint8)
    return Image.fromarray(coarse).resize((width, height), Image.Resampling.BILINEAR)


def _data_url(image: Image.Image) -> str:
    file = io.BytesIO()
    image.save(file, "JPEG", quality=60)
    return "data:image/jpeg;base64," + base64.b64encode(file.getvalue()).decode()
