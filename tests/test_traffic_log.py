"""Image sizes from JSON lines: found at any depth, counted once, and nothing else taken for an image."""

import base64
import io
import json
import re

import pytest
from PIL import Image

from kimivl_lab.planner.traffic_log import read_log


def data_uri(size, kind="png"):
    stream = io.BytesIO()
    Image.new("RGB", size).save(stream, kind)
    return f"data:image/{kind};base64," + base64.b64encode(stream.getvalue()).decode()


def chat(*urls):
    parts = [{"type": "image_url", "image_url": {"url": url}} for url in urls]
    return {"messages": [{"role": "user", "content": [{"type": "text", "text": "Read it."}, *parts]}]}


def log(path, *lines):
    path.write_bytes(
        b"".join((line if isinstance(line, bytes) else json.dumps(line).encode()) + b"\n" for line in lines)
    )
    return path


def test_sizes_lie_anywhere_in_a_line(tmp_path):
    lines = (
        {"width": 640, "height": 480},
        {"event": "request", "detail": {"images": [{"height": 480, "width": 640}, {"width": 28, "height": 56}]}},
        chat(data_uri((60, 30)), data_uri((30, 60), "jpeg"), "https://example.org/a.png"),
        {"body": json.dumps(chat(data_uri((60, 30))))},
    )
    found = read_log(log(tmp_path / "a.jsonl", *lines))
    assert found.sizes == [(640, 480, 2), (28, 56, 1), (60, 30, 2), (30, 60, 1)]
    assert found.images_in_a_line == {1: 2, 2: 2} and found.lines == 4 and found.faults == []


def test_an_object_with_both_numbers_is_one_image(tmp_path):
    image = {"width": 60, "height": 30, "url": data_uri((60, 30)), "thumbnail": {"width": 6, "height": 3}}
    assert read_log(log(tmp_path / "a.jsonl", [image])).sizes == [(60, 30, 1)]


def test_what_is_no_image_is_passed_over(tmp_path):
    lines = (
        {"width": "100%", "height": 30},
        {"width": 5},
        {"width": True, "height": 3},
        {"width": 2.5, "height": 3},
        "data:text/plain;base64,AAAA",
        None,
        7,
    )
    found = read_log(log(tmp_path / "a.jsonl", b"", *lines))
    assert found.sizes == [] and found.faults == [] and found.lines == 7 and not found.images_in_a_line


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        (b"INFO: 200 OK", "not JSON"),
        (b"\xff\xfe", "not JSON"),
        (b"[" * 100_000, "not JSON"),
        ({"width": 0, "height": 4}, "width.*0"),
        ({"width": 20000, "height": 28}, "512"),
        (chat("data:image/png;base64,AAAA"), "base64.*UnidentifiedImageError"),
    ],
)
def test_what_cannot_be_used_is_named_with_its_line(tmp_path, line, reason):
    path = log(tmp_path / "a.jsonl", {"width": 28, "height": 28}, line)
    found = read_log(path)
    (fault,) = found.faults
    assert found.sizes == [(28, 28, 1)] and found.images_in_a_line == {1: 1}
    assert fault.startswith(f"{path}, line 2: ")
    assert re.search(reason, fault)
