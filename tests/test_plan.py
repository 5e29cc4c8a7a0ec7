"""`kimivl-lab plan`: the sizes it reads, what it prints, and what it refuses."""

import dataclasses
import json
import re
import shlex
import subprocess
import sys

import pytest
from PIL import Image, ImageFile

from kimivl_lab.commands import main as cli
from kimivl_lab.commands.sources import SHOWN_FAULTS
from kimivl_lab.datasets import load_sizes
from kimivl_lab.geometry import image_geometry
from kimivl_lab.images.files import image_sizes
from kimivl_lab.images.loading import load_image
from kimivl_lab.planner.plan import plan_budgets
from kimivl_lab.planner.workload import read_sizes
from tests.test_faults_images import png_header

ROWS = "640,480,3\n1920,1080\n"


def run(*arguments):
    return cli.main(["plan", *map(str, arguments)])


def written(path, text):
    path.write_text(text, encoding="utf-8")
    return path


@pytest.mark.parametrize(
    "text",
    [
        ROWS,
        "width,height,count\n" + ROWS,
        "\ufeffwidth,height,count\r\n640,480,3\r\n\r\n1920,1080\r\n",
        " Height , WIDTH,camera,count\n 480, 640 ,a,3\n1080,1920,b\n",
        "640;480;3\n1920;1080\n",
        "\ufeffwidth;height;count\r\n640;480;3\r\n1920;1080;1\r\n",
        "width\theight\tcount\n640\t480\t3\n1920\t1080\n",
        'width,height,count,"name; place"\n640,480,3,a;b\n1920,1080,1,c\td\n',
        "name,width,height,name,count\na,640,480,b,3\nc,1920,1080,d,1\n",
    ],
    ids=[
        *("bare", "header", "as spreadsheets write", "any order"),
        *("semicolons", "semicolons, header", "tabs", "another separator in a text", "another column named twice"),
    ],
)
def test_sizes_are_read_with_or_without_a_header(tmp_path, text):
    assert read_sizes(written(tmp_path / "s.csv", text)) == ([(640, 480, 3), (1920, 1080, 1)], [])


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ("0,4", "width.*from 1.*'0'"),
        ("4,-3", "height.*'-3'"),
        ("4,2.5", "height.*'2.5'"),
        ("x,4", "width.*'x'"),
        ("4,,1", "height.*''"),
        ("4", "no height"),
        ("4,3,0", "count.*'0'"),
        ("4,3,2,1", "4 fields, at most 3"),
        ("20000,28", "20000x28.*512"),
        (f"{10**12},4", "width.*'1000000000000'"),
    ],
)
def test_bad_rows_are_named_and_skipped(tmp_path, capsys, row, reason):
    path = written(tmp_path / "s.csv", f"640,480,3\n\n{row}\n1920,1080\n")
    sizes, (fault,) = read_sizes(path)
    assert sizes == [(640, 480, 3), (1920, 1080, 1)]
    assert fault.startswith(f"{path}, line 3: ") and re.search(reason, fault)
    assert run("--sizes", path, "--json") == 0
    output = capsys.readouterr()
    assert json.loads(output.out)["images"] == 4
    assert output.err.splitlines() == [f"kimivl-lab: error: skipped {fault}"]


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"", "empty"),
        (b"\n \n", "empty"),
        (b"\xff\xfe\x00", "not a CSV file"),
        (b"a,b\n1,2\n", "header names a, b"),
        (b"width,height\n", "no image size"),
        (b"width,height,width\n1,2,3\n", "header names width more than once"),
        (b"Height,width,height\n1,2,3\n", "header names height more than once"),
        (b"count,width,height,COUNT\n1,2,3,4\n", "header names count more than once"),
        (b"width;height,count\n1;2,3\n", "comma and semicolon"),
        (b"640,5;480\n", "comma and semicolon"),
        (b"640 480\n", "no separator"),
        (b"width|height\n640|480\n", "no separator"),
        (b",;\t\n", "comma and semicolon and tab"),
        (b"0,4\n1,0\n", "no image size"),
    ],
)
def test_a_file_without_a_usable_row_is_an_error(tmp_path, capsys, content, reason):
    (tmp_path / "s.csv").write_bytes(content)
    assert run("--sizes", tmp_path / "s.csv") == 2
    output = capsys.readouterr()
    assert output.out == ""
    assert reason in output.err.splitlines()[-1] and "s.csv" in output.err.splitlines()[-1]


def test_of_many_bad_rows_the_first_are_named(tmp_path, capsys):
    assert run("--sizes", written(tmp_path / "s.csv", ROWS + "0,0\n" * 50), "--json") == 0
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == SHOWN_FAULTS + 1 and "30 more" in lines[-1]


def test_what_cannot_be_read_is_named(tmp_path, capsys):
    for option, value, reason in (
        ("--sizes", tmp_path / "none.csv", "none.csv: No such file"),
        ("--images", tmp_path, "no images in this folder"),
        ("--workload", "coco", "unknown workload 'coco'.*"),
    ):
        assert run(option, value) == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert reason.removesuffix(".*") in line


def save(path, orientation=None, size=(60, 30)):
    exif = Image.Exif()
    if orientation is not None:
        exif[0x0112] = orientation
    Image.new("RGB", size).save(path, exif=exif)
    return path


@pytest.mark.parametrize("ending", ["jpg", "png", "tif", "webp"])
@pytest.mark.parametrize("orientation", [None, 1, 3, 5, 6, 8, 9])
def test_an_image_has_the_tokens_that_the_processor_gives_it(tmp_path, ending, orientation):
    path = save(tmp_path / f"a.{ending}", orientation)
    (size,), _, _ = image_sizes([path])
    assert image_geometry(*size).tokens == image_geometry(*load_image(path).size).tokens == 6


def test_A10_headers_are_enough_and_pillows_limit_is_left_alone(tmp_path, monkeypatch, recwarn):
    def load(self):
        raise AssertionError("decoded")

    save(tmp_path / "a.jpg", 6)
    save(tmp_path / "b.png", 6)
    (tmp_path / "huge.png").write_bytes(png_header(12000, 12000))
    (tmp_path / "large.png").write_bytes(png_header(8000, 6000))
    (tmp_path / "long.png").write_bytes(png_header(20000, 28))
    (tmp_path / "vast.png").write_bytes(png_header(30000, 30000))
    (tmp_path / "text.png").write_text("no image")
    monkeypatch.setattr(ImageFile.ImageFile, "load", load)
    before = Image.MAX_IMAGE_PIXELS
    sizes, faults, notes = image_sizes(sorted(tmp_path.iterdir()))
    assert sizes == [(60, 30), (60, 30), (8000, 6000)]
    for fault, (name, reason) in zip(
        faults,
        {"huge": "144000000", "long": "512", "text": "not a", "vast": "900000000"}.items(),
        strict=True,
    ):
        assert fault.startswith(f"{tmp_path / name}.png: ") and reason in fault
    assert before == Image.MAX_IMAGE_PIXELS and not recwarn.list and not notes


def test_a_folder_of_images_is_planned_for(tmp_path, capsys):
    for number in range(3):
        save(tmp_path / f"{number}.png", size=(56 * (number + 1), 28))
    (tmp_path / "notes.txt").write_text("not an image")
    (tmp_path / "empty.png").touch()
    assert run("--images", tmp_path, "--json") == 0
    output = capsys.readouterr()
    document = json.loads(output.out)
    assert (document["images"], document["mean_tokens"]) == (3, 4.0)
    assert document["plans"]["lab"]["budgets"] == [2, 4, 6]
    (line,) = output.err.splitlines()
    assert "empty.png: the file is empty" in line


def test_json_is_what_the_library_plans(capsys):
    assert run("--workload", "receipts", "--images-per-call", "1,2", "--max-graphs", 3, "--json") == 0
    document = json.loads(capsys.readouterr().out)
    for engine, plan in document["plans"].items():
        want = plan_budgets(load_sizes("receipts"), (1, 2), 3, engine=engine)
        assert plan["budgets"] == list(want.budgets)
        assert plan["waste"] == {str(images): ratio for images, ratio in want.waste.items()}
    flag = json.loads(shlex.split(document["vllm_flag"])[1])
    assert flag["encoder_cudagraph_token_budgets"] == document["plans"]["vllm"]["budgets"]


def test_tables_and_what_to_paste(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "100")
    assert run("--workload", "receipts", "--memory-limit-mib", 18) == 0
    output = capsys.readouterr()
    plan = {
        engine: plan_budgets(load_sizes("receipts"), memory_limit=18 * 2**20, engine=engine)
        for engine in ("vllm", "lab")
    }
    assert output.err == ""
    assert "receipts: 626 images" in output.out
    assert plan["vllm"].powers_of_two is not None and f"{plan['vllm'].powers_of_two.waste[1]:.3f}" in output.out
    for one in plan.values():
        assert f"{one.waste[1]:.3f}" in output.out and f"{one.budgets[-1]:,}" in output.out
    assert "without a graph" in output.out and f"{plan['vllm'].eager[1]:.1%}" in output.out
    lines = output.out.splitlines()
    assert (
        json.loads(
            shlex.split(lines[next(at for at, line in enumerate(lines) if line.startswith("for vllm serve")) + 1])[1]
        )["cudagraph_mm_encoder"]
        is True
    )
    assert f"budgets={list(plan['lab'].budgets)}, max_images=1" in lines[lines.index("for this library:") + 1]


def test_the_options_reach_the_plan(capsys):
    options = ("--images-per-call", "2", "--max-images", "1", "--in-token-limit", "1024", "--json")
    assert run("--workload", "device_screens", *options) == 0
    lab = json.loads(capsys.readouterr().out)["plans"]["lab"]
    want = plan_budgets(load_sizes("device_screens"), (2,), max_images=1, in_token_limit=1024)
    assert (lab["budgets"], lab["max_images"]) == (list(want.budgets), 1)


def test_the_server_reaches_the_plan(capsys):
    options = ("--images-per-call", "4,8", "--ranks", "4", "--gpu", "RTX 4090", "--json")
    assert run("--workload", "clipart", *options) == 0
    document = json.loads(capsys.readouterr().out)
    plan = plan_budgets(load_sizes("clipart"), (4, 8), engine="vllm", replay_cost=31, max_batched_tokens=2048, ranks=4)
    assert document["plans"]["vllm"] == json.loads(json.dumps(dataclasses.asdict(plan)))
    assert document["server"]["gpu"] == "RTX 4090" and document["server"]["batched_tokens"] == 2048
    assert run("--workload", "clipart", *options[:-1], "--max-num-batched-tokens", "4096") == 0
    output = capsys.readouterr().out
    assert "--max-num-batched-tokens 4096 (given)" in output and "--mm-encoder-tp-mode data" in output


def test_a_plan_that_takes_more_time_than_vllms_own_gives_no_flag(capsys):
    assert run("--workload", "clipart", "--max-graphs", 1) == 0
    assert "keep vLLM's own budgets" in capsys.readouterr().out
    assert run("--workload", "clipart") == 0
    assert "keep vLLM's own budgets" not in capsys.readouterr().out


def test_a_log_is_planned_for_and_says_how_many_images_come_together(tmp_path, capsys):
    lines = [
        '{"width": 640, "height": 480}',
        '{"images": [{"width": 28, "height": 28}, {"width": 28, "height": 28}]}',
        "{}",
    ]
    path = written(tmp_path / "log.jsonl", "\n".join(lines))
    assert run("--log", path, "--json") == 0
    output = capsys.readouterr()
    document = json.loads(output.out)
    assert document["images"] == 3 and document["images_in_a_line"] == {"1": 1, "2": 1}
    assert document["plans"]["lab"]["budgets"] == [1, 414]
    assert "1 of 3 lines" in output.err


def test_rounded_sizes_are_shown(capsys):
    assert run("--workload", "cameras", "--round-to", 224, "--json") == 0
    rounding = json.loads(capsys.readouterr().out)["rounding"]
    assert rounding["lengths"][1] < rounding["lengths"][0] and 0 < rounding["pixels_lost"] < 1
    assert run("--workload", "cameras", "--round-to", 100) == 2
    assert "multiple of 28" in capsys.readouterr().err


def test_a_plot_is_written(tmp_path, capsys):
    assert run("--workload", "cameras", "--plot", tmp_path / "plan.png", "--json") == 0
    with Image.open(tmp_path / "plan.png") as image:
        assert image.width > 1000
    capsys.readouterr()
    assert run("--workload", "cameras", "--plot", tmp_path / "plan.xyz") == 2
    assert "xyz" in capsys.readouterr().err
    assert run("--workload", "cameras", "--plot", tmp_path / "none" / "plan.png") == 2
    assert "none/plan.png: No such file" in capsys.readouterr().err


@pytest.mark.parametrize(
    "arguments",
    [
        [],
        ["--sizes", "a.csv", "--workload", "cameras"],
        ["--workload", "cameras", "--images-per-call", "1,,2"],
        ["--workload", "cameras", "--images-per-call", "0"],
        ["--workload", "cameras", "--max-graphs", "0"],
        ["--workload", "cameras", "--memory-limit-mib", "-1"],
    ],
)
def test_arguments_that_make_no_sense_are_refused(arguments):
    with pytest.raises(SystemExit, match="2"):
        run(*arguments)


def test_a_limit_that_holds_no_image_is_an_error(capsys):
    assert run("--workload", "receipts", "--memory-limit-mib", 1) == 2
    assert "no budget" in capsys.readouterr().err


def test_planning_needs_no_torch():
    program = "import sys\nfrom kimivl_lab import cli\ncli.main(sys.argv[1:])\nprint('torch' in sys.modules)"
    arguments = ["plan", "--workload", "cameras", "--json"]
    done = subprocess.run([sys.executable, "-c", program, *arguments], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "False" and done.stderr == ""
