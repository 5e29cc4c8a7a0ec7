"""Faults that real folders, names, terminals and disks show on the command line: no traceback, no work lost.

The letters are the kinds of `tests/FAULTS.md`.
"""

import errno
import io
import json
import os
import struct
import subprocess
import sys
import zlib
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from PIL import Image
from safetensors import SafetensorError
from safetensors.torch import load, load_file

from kimivl_lab import KimiVLConfig, KimiVLEncoder, KimiVLImageProcessor, MoonVitPretrainedModel
from kimivl_lab.commands import encode as encode_command
from kimivl_lab.commands import feature_file
from kimivl_lab.commands import main as cli
from kimivl_lab.commands.output import on_one_line, shortened
from kimivl_lab.images.files import find_images, readable_name, unique_names

HEIC = b"\0\0\0\x18ftypheic\0\0\0\0mif1heic"
SIDECAR = b"\0\5\x16\7\0\2\0\0Mac OS X        "  # what macOS writes beside a.png on other file systems, as ._a.png


def encode(*arguments):
    weights = [] if {"--checkpoint", "--preset"} & set(arguments) else ["--preset", "tiny"]
    return cli.main(["encode", *weights, "--device", "cpu", *map(os.fsdecode, arguments)])


def plan(*arguments):
    return cli.main(["plan", *map(os.fsdecode, arguments)])


def png(path, size=(28, 28)):
    Image.new("RGB", size, (90, 10, 200)).save(path, "PNG")
    return path


@pytest.fixture
def folder(tmp_path):
    """A folder with one image."""
    (tmp_path / "in").mkdir()
    png(tmp_path / "in" / "a.png")
    return tmp_path / "in"


# S7: names that are not UTF-8

BYTES = [b"caf\xe9.png", b"\xff\xfe.png", b"\xe2\x82.png", b"caf\\xe9.png"]  # the last is text: a backslash and xe9


def test_S7_names_of_any_bytes_give_a_file_that_is_readable(tmp_path, capsys):
    inside = tmp_path / "in"
    inside.mkdir()
    for number, name in enumerate(BYTES, 1):
        png(os.path.join(os.fsencode(inside), name), (28 * number, 28))
    out = tmp_path / "f.safetensors"
    assert encode(inside, "--out", out) == 0
    tensors = load_file(out)
    assert len(tensors) == len(BYTES), "two names that are written alike are two images"
    assert sorted(map(len, tensors.values())) == [1, 2, 3, 4]
    assert set(tensors) == {"caf\\xe9.png", "caf\\xe9-2.png", "\\xff\\xfe.png", "\\xe2\\x82.png"}
    assert "\\xff\\xfe.png" in capsys.readouterr().out


def test_S7_sources_of_a_plan_may_have_any_name(folder, tmp_path, capsys):
    odd = os.path.join(os.fsencode(tmp_path), b"\xe9t\xe9")
    os.rename(folder, odd)
    assert plan("--images", odd, "--json") == 0
    assert json.loads(capsys.readouterr().out)["workload"] == "\\xe9t\\xe9"
    with open(odd + b".csv", "w") as file:
        file.write("28,28\nx,3\n")
    assert plan("--sizes", odd + b".csv") == 0
    output = capsys.readouterr()
    assert output.out.startswith("\\xe9t\\xe9.csv: 1 images") and "\\xe9t\\xe9.csv, line 2" in output.err


def test_S7_any_output_name_is_written(folder, tmp_path):
    out = os.path.join(os.fsencode(tmp_path), b"\xe9", b"\xe8.safetensors")
    assert encode(folder, "--out", out) == 0
    assert load(Path(os.fsdecode(out)).read_bytes()).keys() == {"a.png"}


def test_S7_names_stay_unique():
    paths = [(name, Path(name)) for name in ("a.png", "a-2.png", "a.png", "a.png", "__metadata__", "sub/a.png")]
    assert list(unique_names(paths)) == ["a.png", "a-2.png", "a-3.png", "a-4.png", "__metadata__-2", "sub/a.png"]
    odd = Path(os.fsdecode(b"a.\xe9"))
    assert list(unique_names([(readable_name(odd), odd)] * 2)) == ["a.\\xe9", "a-2.\\xe9"]
    assert readable_name("é.png") == "é.png"
    assert on_one_line("two  spaces\x1b[2J\n b\u202e") == "two  spaces\\x1b[2J b\\u202e"


# S8: images left out without a word


@pytest.fixture
def mixed(folder):
    """A folder with an image, and beside it all that is not taken."""
    (folder / "b.HEIC").write_bytes(HEIC)
    (folder / "c.heic").write_bytes(HEIC)
    (folder / "scan").write_bytes((folder / "a.png").read_bytes())
    (folder / "data.xyz").write_bytes(b"\xff\xd8\xff\xe0" + bytes(20))
    (folder / "gone.png").symlink_to(folder / "nowhere.png")
    (folder / "sub").mkdir()
    png(folder / "sub" / "a.png")
    (folder / ".hidden").mkdir()
    (folder / "._a.png").write_bytes(SIDECAR)
    (folder / ".DS_Store").write_bytes(b"\0\0\0\1Bud1")
    (folder / "table.tga").write_bytes(bytes(18))
    for name in ("notes.txt", "labels.jsonl", "features.safetensors", "unknown.what"):
        (folder / name).write_text("not an image")
    return folder


def left_out(line):
    return set(line.removeprefix("kimivl-lab: note: left out: ").split(", "))


NOT_ENTERED = "sub-folders without --recursive (2)"
KINDS = {".heic (2)", "files without an ending (1)", ".xyz (1)", ".tga (1)", "dead links (1)", NOT_ENTERED}


def test_S8_one_line_counts_what_was_left_out_by_kind(mixed, tmp_path, capsys):
    assert encode(mixed, "--out", tmp_path / "f.safetensors") == 0
    (line,) = capsys.readouterr().err.splitlines()
    assert left_out(line) == KINDS
    assert set(load_file(tmp_path / "f.safetensors")) == {"a.png"}
    assert plan("--images", mixed, "--json") == 0
    output = capsys.readouterr()
    assert left_out(output.err.splitlines()[0]) == KINDS and json.loads(output.out)["images"] == 1


def test_S8_strict_fails_on_images_that_are_left_out(mixed, tmp_path, capsys):
    out = tmp_path / "f.safetensors"
    assert encode(mixed, "--out", out, "--strict") == 2
    lines = capsys.readouterr().err.splitlines()
    assert not out.exists()
    for name in ("b.HEIC", "c.heic", "scan", "data.xyz", "gone.png"):
        assert any(f"{mixed / name}: " in line for line in lines)
        (mixed / name).unlink()
    assert not any("notes.txt" in line or "._a.png" in line for line in lines)
    assert encode(mixed, "--out", out, "--strict") == 0


@pytest.mark.parametrize(
    ("name", "begin", "looks"),
    [
        ("a.jxl", b"\xff\x0a" + bytes(20), True),
        ("a.dng", b"II*\0" + bytes(20), True),
        ("a.cr3", b"\0\0\0\x18ftypcrx " + bytes(8), True),
        ("a.psd", b"8BPS\0\1" + bytes(20), True),
        ("a.photo", b"\0\0\0\x1cftypavis" + bytes(8), True),
        ("a.bin", b"RIFF\x10\0\0\0WEBPVP8 ", True),
        ("a.bin", b"BM" + struct.pack("<IHH", 70, 0, 0) + bytes(8), True),
        ("a.txt", b"BMW and others", False),
        ("a.wav", b"RIFF\x10\0\0\0WAVEfmt ", False),
        ("a.mp4", b"\0\0\0\x18ftypisom" + bytes(8), False),
        ("a.txt", b"", False),
    ],
)
def test_S8_images_are_known_by_their_first_bytes(folder, name, begin, looks):
    (folder / name).write_bytes(begin)
    lines = find_images([folder]).unread
    assert len(lines) == looks and all(line.startswith(f"{folder / name}: ") for line in lines)


def test_S8_sub_folders_are_entered_when_asked_for(mixed, tmp_path, capsys):
    (mixed / "sub" / "deep").mkdir()
    png(mixed / "sub" / "deep" / "d.png", (56, 28))
    (mixed / "sub" / "round").symlink_to(mixed)
    out = tmp_path / "f.safetensors"
    assert encode(mixed, "--out", out, "--recursive") == 0
    assert set(load_file(out)) == {"a.png", "sub/a.png", "sub/deep/d.png"}
    (line,) = capsys.readouterr().err.splitlines()
    assert left_out(line) == {*(KINDS - {NOT_ENTERED}), "hidden or linked sub-folders (2)"}
    assert plan("--images", mixed, "--recursive", "--json") == 0
    assert json.loads(capsys.readouterr().out)["images"] == 3
    with pytest.raises(SystemExit, match="2"):
        cli.main(["info", "--recursive"])
    assert plan("--workload", "receipts", "--recursive") == 2


def test_S8_a_folder_with_nothing_but_other_files_says_which(tmp_path, capsys):
    (tmp_path / "a.heic").write_bytes(HEIC)
    for command in (lambda: encode(tmp_path, "--out", tmp_path / "f"), lambda: plan("--images", tmp_path)):
        assert command() == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert "no images" in line and ".heic (1)" in line


# W4 on the command line: numbers that are none


@pytest.mark.parametrize("value", ["0", "-1", "2.5", "True", "", "1e3", "9" * 5000])
@pytest.mark.parametrize("option", ["--max-graphs", "--images-per-call", "--max-images", "--in-token-limit"])
def test_W4_counts_are_whole_numbers(option, value, capsys):
    with pytest.raises(SystemExit, match="2"):
        plan("--workload", "receipts", f"{option}={value}")
    assert len(capsys.readouterr().err) < 3000


@pytest.mark.parametrize("seed", ["1.0", "True", str(2**64), str(-(2**63) - 1)])
def test_W4_a_seed_that_torch_would_refuse_is_refused(folder, seed):
    with pytest.raises(SystemExit, match="2"):
        encode(folder, "--out", "f", f"--seed={seed}")


# W6: terminals, pipes and disks


@contextmanager
def replaced(name, stream):
    before = getattr(sys, name)
    setattr(sys, name, stream)
    try:
        yield
    finally:
        setattr(sys, name, before)


def ascii_stream():
    return io.TextIOWrapper(io.BytesIO(), encoding="ascii")


def text_of(stream):
    return stream.buffer.getvalue().decode("ascii")


def closed_pipe():
    reading, writing = os.pipe()
    os.close(reading)
    return os.fdopen(writing, "w")


def full_disk():
    return open("/dev/full", "w")


COMMANDS = {
    "plan": lambda folder: plan("--workload", "receipts"),
    "advise": lambda folder: cli.main(["advise", "--workload", "cameras", "--gpu", "H100"]),
    "plan --json": lambda folder: plan("--workload", "receipts", "--json"),
    "info": lambda folder: cli.main(["info"]),
    "encode": lambda folder: encode(folder, "--out", folder.parent / "f.safetensors"),
}


@pytest.mark.parametrize("command", COMMANDS.values(), ids=COMMANDS)
@pytest.mark.parametrize("stream", [ascii_stream, closed_pipe], ids=["ascii", "closed pipe"])
def test_W6_stdout_that_shows_less_ends_no_command(folder, command, stream, capsys):
    png(folder / "straße [red] 日本.png")
    with replaced("stdout", stream()):
        assert command(folder) == 0
    assert capsys.readouterr().err == ""


def test_W6_names_are_printed_as_they_are_or_with_question_marks(folder, monkeypatch):
    monkeypatch.setenv("COLUMNS", "120")
    png(folder / "straße [red] :smile:.png")
    stream = ascii_stream()
    with replaced("stdout", stream):
        assert encode(folder, "--out", folder.parent / "f.safetensors") == 0
    assert "stra?e [red] :smile:.png" in text_of(stream)
    assert "straße [red] :smile:.png" in load_file(folder.parent / "f.safetensors")


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs /dev/full")
@pytest.mark.parametrize("command", COMMANDS.values(), ids=COMMANDS)
def test_W6_a_full_disk_behind_stdout_is_one_line(folder, command, capsys):
    with replaced("stdout", full_disk()):
        assert command(folder) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line == f"kimivl-lab: error: cannot write to stdout: {os.strerror(errno.ENOSPC)}"


@pytest.mark.parametrize("stream", [closed_pipe, full_disk, ascii_stream], ids=["closed pipe", "full", "ascii"])
def test_W6_messages_are_lost_where_stderr_is_and_nothing_else(folder, stream, capsys):
    (folder / "straße.png").touch()
    with replaced("stderr", stream()):
        assert encode(folder, "--out", folder.parent / "f.safetensors") == 2
        assert plan("--images", folder) == 0
        assert plan("--sizes", folder / "straße.csv") == 2
    assert set(load_file(folder.parent / "f.safetensors")) == {"a.png"}
    assert "1 images in" in capsys.readouterr().out


def test_W6_streams_may_be_closed_from_the_start(folder):
    with replaced("stdout", None), replaced("stderr", None):
        assert [command(folder) for command in COMMANDS.values()] == [0, 0, 0, 0, 0]
        assert encode(folder / "none.png", "--out", folder.parent / "g.safetensors") == 2


@pytest.mark.parametrize("arguments", ["plan --workload receipts", "plan --help"])
@pytest.mark.parametrize(
    ("redirection", "status", "message"),
    [("| head -1", 0, ""), (">/dev/full", 2, "No space left"), (">&-", 0, ""), ("2>&- | true", 0, "")],
)
def test_W6_the_end_of_the_process_is_quiet(arguments, redirection, status, message):
    """Also Python's last flush of its streams, which only a process of its own shows."""
    line = f"set -o pipefail; {sys.executable} -m kimivl_lab.cli {arguments} {redirection}"
    environment = os.environ | {"PYTHONIOENCODING": "ascii"}
    done = subprocess.run(["bash", "-c", line], capture_output=True, text=True, env=environment)
    assert done.returncode == status
    assert message in done.stderr and done.stderr.count("\n") == bool(message)


@pytest.mark.parametrize(
    "error",
    [
        OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)),
        OSError(errno.EDQUOT, os.strerror(errno.EDQUOT)),
        SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)"),
    ],
)
@pytest.mark.parametrize("shard", [1, 2])
def test_W6_a_disk_that_fills_leaves_the_old_files_and_one_line(folder, error, shard, monkeypatch, capsys):
    out = folder.parent / "out" / "f.safetensors"
    for name in ("x.png", "y.png"):
        png(folder / name, (448, 448))
    assert encode(folder, "--out", out, "--max-shard-mib", "2") == 0
    before = {file: file.read_bytes() for file in out.parent.iterdir()}
    save = feature_file.save_file
    monkeypatch.setattr(MoonVitPretrainedModel, "forward", lambda self, pixels, grids: torch.ones(513, 4, 288))
    calls = []

    def filling(tensors, path, metadata):
        calls.append(path)
        if len(calls) == shard:
            raise error
        save(tensors, path, metadata)

    monkeypatch.setattr(feature_file, "save_file", filling)
    capsys.readouterr()
    assert encode(folder, "--out", out, "--max-shard-mib", "2") == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"kimivl-lab: error: cannot write {out}: ")
    assert {file: file.read_bytes() for file in out.parent.iterdir()} == before


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs /dev/full")
def test_W6_a_device_is_not_replaced_by_a_file(folder, capsys):
    before = os.stat("/dev/full")
    assert encode(folder, "--out", "/dev/full") == 2
    assert "cannot write /dev/full" in capsys.readouterr().err
    assert os.stat("/dev/full").st_rdev == before.st_rdev


def test_W6_a_plot_that_cannot_be_written_costs_only_the_plot(tmp_path, monkeypatch, capsys):
    from matplotlib.figure import Figure

    def full(self, file):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(Figure, "savefig", full)
    assert plan("--workload", "cameras", "--json", "--plot", tmp_path / "plan.png") == 2
    output = capsys.readouterr()
    assert json.loads(output.out)["images"] == 88
    (line,) = output.err.splitlines()
    assert str(tmp_path / "plan.png") in line and os.strerror(errno.ENOSPC) in line


def test_W6_an_image_that_the_encoder_cannot_hold_costs_only_itself(folder, monkeypatch, capsys):
    png(folder / "b.png", (56, 56))
    png(folder / "c.png")
    forward = MoonVitPretrainedModel.forward

    def small_machine(self, pixels, grids):
        if len(pixels) > 8:
            raise RuntimeError("[enforce fail] not enough memory: you tried to allocate 9 bytes.\nand more")
        return forward(self, pixels, grids)

    monkeypatch.setattr(MoonVitPretrainedModel, "forward", small_machine)
    monkeypatch.setattr(encode_command, "BATCH_PATCHES", 4)
    out = folder.parent / "f.safetensors"
    assert encode(folder, "--out", out) == 2
    assert set(load_file(out)) == {"a.png", "c.png"}
    (line,) = capsys.readouterr().err.splitlines()
    assert f"{folder / 'b.png'}: not encoded" in line and "9 bytes" in line


@pytest.mark.parametrize(("error", "status"), [(KeyboardInterrupt, 130), (MemoryError, 2)])
def test_W6_an_interruption_is_one_line_and_leaves_nothing(folder, error, status, monkeypatch, capsys):
    def stop(self, pixels, grids):
        raise error

    monkeypatch.setattr(MoonVitPretrainedModel, "forward", stop)
    assert encode(folder, "--out", folder.parent / "f.safetensors") == status
    assert len(capsys.readouterr().err.splitlines()) == 1
    assert list(folder.parent.iterdir()) == [folder]


# W5: damaged checkpoints


def edited(path, **changes):
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


DAMAGE = {
    "cut weights": lambda folder: os.truncate(folder / "model.safetensors", 1000),
    "a pointer for weights": lambda folder: (folder / "model.safetensors").write_text("version https://git-lfs"),
    "a list as configuration": lambda folder: (folder / "config.json").write_text("[]"),
    "a number as vision_config": lambda folder: edited(folder / "config.json", vision_config=3),
    "no heads": lambda folder: edited(folder / "config.json", vision_config={"num_attention_heads": 0}),
    "a list as settings": lambda folder: (folder / "preprocessor_config.json").write_text("[]"),
    "a setting that is no number": lambda folder: edited(folder / "preprocessor_config.json", in_token_limit="x"),
    "patches of another size": lambda folder: edited(folder / "preprocessor_config.json", patch_size=7),
}


@pytest.mark.parametrize("damage", DAMAGE.values(), ids=DAMAGE)
def test_W5_a_damaged_checkpoint_is_an_error_and_no_traceback(damage, folder, tmp_path, capsys):
    checkpoint = tmp_path / "checkpoint"
    KimiVLEncoder(KimiVLConfig.preset("tiny")).save_pretrained(checkpoint)
    KimiVLImageProcessor().save_pretrained(checkpoint)
    damage(checkpoint)
    capsys.readouterr()
    assert encode(folder, "--out", tmp_path / "f.safetensors", "--checkpoint", checkpoint) == 2
    lines = capsys.readouterr().err.splitlines()
    assert all(line.startswith("kimivl-lab: error: ") for line in lines)
    assert 1 <= len(lines) <= 2 and str(folder if "not encoded" in lines[0] else checkpoint) in lines[0]
    assert not (tmp_path / "f.safetensors").exists()


def test_M7_a_letter_that_no_font_has_is_a_warning_with_the_name_of_the_plot(tmp_path, capsys):
    for name in ("\u65e5\u672c.csv", "$x^$.csv"):  # the second would be a broken formula
        (tmp_path / name).write_text("28,28\n")
        assert plan("--sizes", tmp_path / name, "--plot", tmp_path / "plan.png") == 0
        lines = capsys.readouterr().err.splitlines()
        assert all(line.startswith(f"kimivl-lab: warning: {tmp_path / 'plan.png'}: ") for line in lines)
        assert (tmp_path / "plan.png").is_file()


# M2: an image given as text

TEXTS = {
    "base64": "iVBORw0KGgo" * 9000,
    "data URI": "data:image/png;base64," + "iVBORw0KGgo" * 9000,
    "short data URI": "data:image/png;base64,iVBORw0KGgo=",
    "long path": "/".join(["folder"] * 2000) + "/b.png",
    "address": "https://example.org/" + "a" * 3000 + ".png",
}


@pytest.mark.parametrize("text", TEXTS.values(), ids=TEXTS)
def test_M2_text_that_is_no_path_is_named_in_short(text, folder, capsys):
    for command in (
        lambda: encode(text, folder, "--out", folder.parent / "f.safetensors"),
        lambda: plan("--images", text),
        lambda: plan("--sizes", text),
        lambda: plan("--workload", text),
        lambda: encode(folder, "--out", folder.parent / "f.safetensors", "--checkpoint", text),
        lambda: encode(folder, "--out", folder.parent / "f.safetensors", "--preset", text),
    ):
        assert command() == 2
        lines = capsys.readouterr().err.splitlines()
        assert 1 <= len(lines) <= 2 and max(map(len, lines)) < 1100
    assert set(load_file(folder.parent / "f.safetensors")) == {"a.png"}


def test_M2_it_says_that_paths_are_read(folder, capsys):
    for text in ("base64", "data URI", "short data URI"):
        assert encode(TEXTS[text], "--out", folder.parent / "f.safetensors") == 2
        assert "only paths are read" in capsys.readouterr().err


def test_M2_an_option_is_not_repeated_whole(capsys):
    for option in ("--max-graphs", "--sizes=x --no-such-option", "--engine"):
        with pytest.raises(SystemExit, match="2"):
            plan(*option.split(" "), "9" * 100_000)
        assert len(capsys.readouterr().err) < 4000
    assert shortened("a " + "b" * 400 + " c").endswith(" c") and len(shortened("b c" * 9000)) < 1100


# M7: warnings and refusals name the image, and both commands judge it alike


def corrupt_exif(path):
    exif = b"Exif\0\0II*\0\x08\0\0\0\x05\0\x12\x01\x03\0\x01\0\0\0\x06\0\0\0"  # five entries announced, one there
    Image.new("RGB", (60, 30)).save(path, "JPEG", exif=exif)


def malformed_mpo(path):
    stream = io.BytesIO()
    Image.new("RGB", (60, 30)).save(stream, "JPEG")
    index = b"MPF\0II*\0\x08\0\0\0\0\0"
    start, rest = stream.getvalue()[:2], stream.getvalue()[2:]
    path.write_bytes(start + b"\xff\xe2" + struct.pack(">H", len(index) + 2) + index + rest)


@pytest.mark.parametrize("make", [corrupt_exif, malformed_mpo])
def test_M7_a_warning_carries_the_name_of_each_image(make, folder, capsys):
    for name in ("b.jpg", "c.jpg"):
        make(folder / name)
    for command in (lambda: encode(folder, "--out", folder.parent / "f.safetensors"), lambda: plan("--images", folder)):
        assert command() == 0
        lines = capsys.readouterr().err.splitlines()
        assert len(set(lines)) == len(lines)
        for name in ("b.jpg", "c.jpg"):
            assert any(line.startswith(f"kimivl-lab: warning: {folder / name}: ") for line in lines)
        assert all(line.startswith("kimivl-lab: warning: ") and ".py" not in line for line in lines)


def chunk(kind, data):
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


def long_text_behind(path):
    png(path)
    text = chunk(b"zTXt", b"Comment\0\0" + zlib.compress(bytes(2**21)))
    path.write_bytes(path.read_bytes()[:-12] + text + chunk(b"IEND", b""))


def long_text_before(path):
    png(path)
    text = chunk(b"zTXt", b"Comment\0\0" + zlib.compress(bytes(2**21)))
    content = path.read_bytes()
    path.write_bytes(content[:33] + text + content[33:])


def postscript(path):
    path.write_bytes(b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 28 28\n%%EndComments\nshowpage\n%%EOF\n")


ODD = {
    "text behind the pixels": long_text_behind,
    "text before the pixels": long_text_before,
    "PostScript": postscript,
    "no bytes": lambda path: path.touch(),
    "text": lambda path: path.write_text("not an image"),
    "too wide": lambda path: png(path, (20000, 28)),
    "GIF": lambda path: Image.new("P", (28, 28)).save(path, "GIF"),
    "icon": lambda path: Image.new("RGB", (32, 32)).save(path, "ICO"),
    "16-bit grey": lambda path: Image.new("I;16", (28, 28)).save(path, "PNG"),
    "palette": lambda path: Image.new("P", (28, 28)).save(path, "PNG", transparency=bytes([0, 128])),
    "corrupt EXIF": corrupt_exif,
}


@pytest.mark.parametrize("make", ODD.values(), ids=ODD)
def test_M7_plan_takes_an_image_if_encode_does(make, folder, capsys):
    make(folder / "odd.png")
    status = encode(folder, "--out", folder.parent / "f.safetensors")
    taken = "odd.png" in load_file(folder.parent / "f.safetensors")
    assert taken == (status == 0)
    capsys.readouterr()
    assert plan("--images", folder, "--json") == 0
    output = capsys.readouterr()
    assert json.loads(output.out)["images"] == 1 + taken
    assert taken or f"{folder / 'odd.png'}: " in output.err
