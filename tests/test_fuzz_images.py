"""Mutated image files through the processor, `encode` and `plan`: right values, or one line that says why not.

Seeded. 200 files of each format; with `--long` 3,000.
"""

import io
import json
import random
import re
import signal
import warnings
from contextlib import contextmanager

import numpy as np
import pytest
from PIL import Image, ImageOps
from safetensors import safe_open

from kimivl_lab import KimiVLImageProcessor
from kimivl_lab.commands import main as cli
from kimivl_lab.geometry import image_geometry
from kimivl_lab.images.loading import MAX_IMAGE_PIXELS, ImageError
from kimivl_lab.images.opening import IMAGE_FORMATS
from tests.image_files import chunk, png, tiff
from tests.image_oracle import assert_same, noise, oracle, see_through

LIMIT = 64
processor = KimiVLImageProcessor(in_token_limit=LIMIT)
SECONDS = 60  # for one file; a file needs milliseconds

# What the library refuses though Pillow decodes it: sizes, and samples whose meaning is not known.
REFUSED = re.compile(
    r"must stay below 512|is \d+ pixels, max_image_pixels|Pillow's own limit|range of mode I|must lie in 0|"
    r"TIFF with|JPEG 2000 with|PFM file|16-bit colour"
)


def saved(image: Image.Image, file_format: str, **options) -> bytes:
    file = io.BytesIO()
    image.save(file, file_format, **options)
    return file.getvalue()


def originals(file_format: str) -> list[bytes]:
    """A few small files of one format: grey, colour, palette, transparent, animated, deep, turned."""
    colour, grey, clear = noise(41, 30), noise(33, 20, "L"), see_through(30, 22)
    deep = np.random.default_rng(0).integers(0, 65536, (20, 31)).astype(np.uint16)
    exif = Image.Exif()
    exif[0x0112] = 6
    files = [saved(colour, file_format), saved(grey if file_format != "WEBP" else clear, file_format)]
    if file_format in ("PNG", "WEBP", "TIFF", "AVIF", "JPEG2000"):
        files.append(saved(clear, file_format))
    if file_format in ("JPEG", "PNG", "WEBP", "TIFF", "AVIF"):
        files.append(saved(colour, file_format, exif=exif))
    if file_format in ("GIF", "PNG", "WEBP", "TIFF"):
        files.append(saved(colour, file_format, save_all=True, append_images=[noise(41, 30, seed=1)]))
    if file_format in ("GIF", "PNG", "BMP", "TIFF"):
        files.append(saved(colour.quantize(32), file_format))
    if file_format == "JPEG":
        files += [saved(colour, "JPEG", progressive=True), saved(colour.convert("CMYK"), "JPEG")]
        files.append(saved(colour, "MPO", save_all=True, append_images=[noise(41, 30, seed=1)]))
    if file_format == "PNG":
        files += [
            png(deep, 16, 0, (300,)),
            png(np.stack([deep] * 3, axis=2), 16, 2, (1, 2, 3)),
            png(deep >> 14, 2, 0, (1,)),
        ]
    if file_format == "TIFF":
        files += [tiff(deep, [(262, [0])]), tiff(np.stack([deep] * 3, axis=2)), tiff(deep, deflate=True)]
        files.append(saved(colour, "TIFF", compression="tiff_lzw"))
    if file_format == "PPM":
        files += [b"P5 31 20 1023\n" + (deep >> 6).astype(">u2").tobytes(), b"P3 2 2 15\n" + b"1 2 3 " * 4]
        files.append(saved(grey.convert("1"), "PPM"))
    if file_format == "JPEG2000":
        files.append(saved(Image.fromarray(deep), "JPEG2000"))
    return files


def mutated(content: bytes, rng: random.Random) -> bytes:
    """The file with a few changes; of a PNG mostly inside one chunk, whose check sum is made right again."""
    if not content.startswith(b"\x89PNG") or rng.random() < 0.2:
        return changed(content, rng)
    chunks, at = [], 8
    while at < len(content):
        end = at + 12 + int.from_bytes(content[at : at + 4], "big")
        chunks.append((content[at + 4 : at + 8], content[at + 8 : end - 4]))
        at = end
    which = rng.randrange(len(chunks))
    kind, body = chunks[which]
    chunks[which] = kind, changed(body, rng)
    return content[:8] + b"".join(chunk(*one) for one in chunks)


def changed(content: bytes, rng: random.Random) -> bytes:
    """One to three changes: bytes replaced, cut out, doubled, inserted, or the end cut off. Most hit the header."""
    data = bytearray(content)
    for _ in range(rng.randint(1, 3)):
        at = rng.randrange(max(1, min(len(data), rng.choice([64, 64, 512, len(data)]))))
        length = rng.choice([1, 1, 2, 4, 4, 16, 200])
        change = rng.randrange(7)
        if change == 0:
            data[at : at + length] = rng.randbytes(len(data[at : at + length]))
        elif change == 1:
            data[at : at + length] = rng.choice([b"\0", b"\xff", b"\x7f"]) * len(data[at : at + length])
        elif change == 2 and data:
            data[at] ^= 1 << rng.randrange(8)
        elif change == 3:
            del data[at : at + length]
        elif change == 4:
            data[at:at] = data[at : at + length]
        elif change == 5:
            data[at:at] = rng.randbytes(length)
        else:
            del data[rng.randrange(len(data) or 1) :]
    return bytes(data)


@contextmanager
def within(seconds: int):
    def stop(*_):
        raise TimeoutError(f"more than {seconds} s")

    before = signal.signal(signal.SIGALRM, stop)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def plain_image(path):
    """What Pillow makes of the file, as an upright image of mode L, RGB or RGBA; None where Pillow's result is known to
    be another than the file says (deep or signed samples, scaled keys). Raises what Pillow raises."""
    with warnings.catch_warnings(action="ignore"), Image.open(path, formats=IMAGE_FORMATS) as image:
        width, height = image.size
        if width * height > MAX_IMAGE_PIXELS:
            raise ValueError("too large")
        args = image.tile[0].args if image.tile else ""
        rawmode = str(args if isinstance(args, str) else (args or ("",))[0])
        image.load()
        try:
            orientation = image.getexif().get(0x0112)
        except Exception:
            orientation = None
        shallow = ";2" in rawmode or ";4" in rawmode
        if image.mode[0] in "IF" or ";16" in rawmode or (shallow and "transparency" in image.info):
            return None
        upright = ImageOps.exif_transpose(image) if orientation in range(2, 9) else image
        if upright.has_transparency_data:
            return (upright.convert("LA") if upright.mode == "La" else upright).convert("RGBA")
        return upright if upright.mode in ("L", "RGB") else upright.convert("L" if upright.mode == "1" else "RGB")


def check(path) -> bool:
    """Whether the processor takes the file; fails unless it is right to do what it does."""
    try:
        want = plain_image(path)
        works = True
    except Exception:
        want, works = None, False
    with warnings.catch_warnings(action="ignore"):
        try:
            batch = processor(path)
        except ImageError as error:
            message = str(error)
            assert message.startswith(f"image 0 ({path}): ") and "\n" not in message and len(message) < 600, message
            assert not works or REFUSED.search(message), f"Pillow decodes it: {message}"
            return False
        assert works, "Pillow does not decode it"
        if want is None:
            with Image.open(path, formats=IMAGE_FORMATS) as lazy:
                again = processor(lazy)
            want_values, want_grids = again.pixel_values, again.image_grid_hws.tolist()
        else:
            want_values, want_grids = oracle([want], LIMIT)
    assert_same(batch, want_values, want_grids)
    return True


@pytest.mark.parametrize("file_format", IMAGE_FORMATS)
def test_the_processor_decodes_a_mutated_file_as_pillow_does_or_says_why_not(tmp_path, file_format, is_long):
    files = originals(file_format)
    for number, content in enumerate(files):
        (tmp_path / f"whole-{number}").write_bytes(content)
        assert check(tmp_path / f"whole-{number}"), f"{file_format} {number} is not mutated"
    taken = 0
    for seed in range(3000 if is_long else 200):
        rng = random.Random(f"{file_format} {seed}")
        path = tmp_path / f"mutated-{seed}"
        path.write_bytes(mutated(rng.choice(files), rng))
        try:
            with within(SECONDS):
                taken += check(path)
        except Exception as error:
            raise AssertionError(f"{file_format}, seed {seed}: {path.read_bytes()[:2000]!r}") from error
    assert taken, "no mutated file is an image any more: the mutations are too strong"


def test_commands_take_the_files_that_the_processor_takes(tmp_path, capsys, is_long):
    folder = tmp_path / "images"
    folder.mkdir()
    endings = {"JPEG2000": "jp2", "TIFF": "tif", "JPEG": "jpg"}
    for file_format in IMAGE_FORMATS:
        files = originals(file_format)
        for seed in range(300 if is_long else 30):
            rng = random.Random(f"{file_format} {seed}")
            name = f"{file_format}-{seed}.{endings.get(file_format, file_format.lower())}"
            (folder / name).write_bytes(mutated(rng.choice(files), rng))
    taken, grids = {}, {}
    for path in sorted(folder.iterdir()):
        with warnings.catch_warnings(action="ignore"):
            try:
                ((h, w),) = processor(path).image_grid_hws.tolist()
            except ImageError:
                continue
        taken[path.name], grids[path.name] = path, [h, w]

    features = tmp_path / "features.safetensors"
    options = ["--preset", "tiny", "--in-token-limit", str(LIMIT), "--out", str(features)]
    with within(1000):
        assert cli.main(["encode", str(folder), *options]) == 2
    lines = capsys.readouterr().err.splitlines()
    with safe_open(features, framework="np") as file:
        assert sorted(file.keys()) == sorted(taken)
        assert json.loads(file.metadata()["grids"]) == grids
        for name, (h, w) in grids.items():
            values = file.get_tensor(name)
            assert values.shape == (h * w // 4, 4, 288) and np.isfinite(values).all()
    refused = {path.name for path in folder.iterdir()} - set(taken)
    named = {match[1] for line in lines if (match := re.match(rf"kimivl-lab: error: {folder}/(\S+): \S", line))}
    assert named == refused and all(len(line) < 1000 for line in lines)

    with within(1000):
        status = cli.main(["plan", "--images", str(folder), "--in-token-limit", str(LIMIT), "--json"])
    planned = json.loads(capsys.readouterr().out)
    assert status == 0 and len(taken) <= planned["images"] <= len(taken) + len(refused)
    for path in taken.values():  # every header that belongs to readable pixels is read
        with warnings.catch_warnings(action="ignore"), Image.open(path, formats=IMAGE_FORMATS) as image:
            assert image_geometry(*image.size, in_token_limit=LIMIT).tokens > 0
