"""Image files written by hand, byte by byte: depths and tags that Pillow does not write."""

import io
import struct
import zlib

import numpy as np
from PIL import Image


def tiff(samples: np.ndarray, tags=(), *, bits=None, order="<", deflate=False) -> bytes:
    """A TIFF of one strip. `samples` (H, W) or (H, W, C) hold what is stored; `tags` are (number, values) beside the
    necessary ones and replace them. Values are SHORT, or FLOAT where one is a float."""
    height, width = samples.shape[:2]
    channels = samples.shape[2] if samples.ndim == 3 else 1
    depth = bits or 8 * samples.dtype.itemsize
    if bits is not None and bits < 8 * samples.dtype.itemsize:
        rows = ["".join(f"{int(value):0{bits}b}" for value in row) for row in samples.reshape(height, -1)]
        rows = [row + "0" * (-len(row) % 8) for row in rows]
        data = b"".join(int(row, 2).to_bytes(len(row) // 8, "big") for row in rows)
    else:
        data = samples.astype(samples.dtype.newbyteorder(order)).tobytes()
    data = zlib.compress(data) if deflate else data
    fields = {
        256: [width],
        257: [height],
        258: [depth] * channels,
        259: [8 if deflate else 1],
        262: [2 if channels >= 3 else 1],
        273: [8],
        277: [channels],
        278: [height],
        279: [len(data)],
        284: [1],
    } | {number: list(values) for number, values in tags}
    entries, extra = b"", b""
    start = 8 + len(data) + len(data) % 2
    after = start + 2 + 12 * len(fields) + 4
    for number, values in sorted(fields.items()):
        if any(isinstance(value, float) for value in values):
            kind, packed = 11, struct.pack(f"{order}{len(values)}f", *values)
        elif max(values) > 65535:
            kind, packed = 4, struct.pack(f"{order}{len(values)}I", *values)
        else:
            kind, packed = 3, struct.pack(f"{order}{len(values)}H", *values)
        if len(packed) > 4:
            packed, extra = struct.pack(f"{order}I", after + len(extra)), extra + packed
        entries += struct.pack(f"{order}HHI", number, kind, len(values)) + packed.ljust(4, b"\0")
    head = (b"II*\0" if order == "<" else b"MM\0*") + struct.pack(f"{order}I", start)
    directory = struct.pack(f"{order}H", len(fields)) + entries + b"\0\0\0\0"
    return head + data + b"\0" * (len(data) % 2) + directory + extra


def chunk(kind: bytes, body: bytes) -> bytes:
    return struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))


def png(samples: np.ndarray, depth: int, colour: int, key: tuple[int, ...] = (), before=b"", after=b"") -> bytes:
    """A PNG of samples (H, W) or (H, W, C), `depth` bits each. `key`: the tRNS colour. `before` and `after` are chunks
    before and behind the pixels."""
    height, width = samples.shape[:2]
    if depth == 16:
        rows = [row.astype(">u2").tobytes() for row in samples]
    elif depth == 8:
        rows = [row.astype(np.uint8).tobytes() for row in samples]
    else:
        bits = ["".join(f"{int(value):0{depth}b}" for value in row) for row in samples]
        rows = [int(row + "0" * (-len(row) % 8), 2).to_bytes(-(-len(row) // 8), "big") for row in bits]
    transparency = chunk(b"tRNS", struct.pack(f">{len(key)}H", *key)) if key else b""
    return (
        b"\x89PNG\r\n\x1a\n"
        + chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, depth, colour, 0, 0, 0))
        + before
        + transparency
        + chunk(b"IDAT", zlib.compress(b"".join(b"\0" + row for row in rows)))
        + after
        + chunk(b"IEND", b"")
    )


def opened(content: bytes) -> Image.Image:
    return Image.open(io.BytesIO(content))
