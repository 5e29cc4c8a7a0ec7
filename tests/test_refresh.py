"""`make refresh`: the class of each change of an output; saved notebooks change only when that is asked for."""

import base64
import io
import subprocess

import nbformat
import pytest
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook, new_output
from PIL import Image

from kimivl_lab.lessons.minutes import machine_minutes
from kimivl_lab.report import refresh
from kimivl_lab.report.changes import Change, changes
from kimivl_lab.report.execution import RUN, code_hash

LIVE = "nbval-ignore-output"


def png(*pixels, **options):
    file = io.BytesIO()
    image = Image.new("L", (len(pixels), 1))
    image.putdata(pixels)
    image.save(file, "PNG", **options)
    return base64.b64encode(file.getvalue()).decode()


def printed(text, name="stdout"):
    return new_output("stream", name=name, text=text)


def shown(**data):
    return new_output("display_data", data={mime.replace("_", "/", 1): value for mime, value in data.items()})


def notebook(*outputs, tags=(), source="run()", **metadata):
    cell = new_code_cell(source, outputs=list(outputs), execution_count=1, id="a", metadata={"tags": [*tags]})
    return new_notebook(cells=[new_markdown_cell("# Text", id="t"), cell], metadata=metadata)


TIMES = "packed      1,204.5 ms  2.8x\nper image      90 us    1x\n"
FASTER = "per image   1.1 ms    1x\npacked      904 ms  3.1x\n"  # sorted by time, in another unit
COSMETIC = {
    "white space": ([printed("a  1\n")], [printed("a 1  \n\n")]),
    "an address": ([printed("<T at 0x7f0a12345678>")], [printed("<T at 0x55aa12345678>")]),
    "torch's build": ([printed("torch 2.13.0+cpu")], [printed("torch 2.13.0+cu130")]),
    "bytes of a figure": ([shown(image_png=png(1, 2))], [shown(image_png=png(1, 2, compress_level=0))]),
}
SEMANTIC = {
    "the last digit": ([printed("relative error 1.2345\n")], [printed("relative error 1.2346\n")]),
    "a sign": ([printed("-1")], [printed("1")]),
    "blanks that join words": ([printed("1 2")], [printed("12")]),
    "the order of lines": ([printed("a\nb\n")], [printed("b\na\n")]),
    "a short hexadecimal number": ([printed("0x10")], [printed("0x11")]),
    "a release of torch": ([printed("torch 2.13.0+cpu")], [printed("torch 2.14.0+cpu")]),
    "the size of a figure in words": ([shown(text_plain="<2 Axes>")], [shown(text_plain="<3 Axes>")]),
    "a table in HTML": ([shown(text_html="<td>1</td>")], [shown(text_html="<td>2</td>")]),
    "no output": ([printed("1")], []),
    "a warning": ([printed("1")], [printed("1"), printed("careful", "stderr")]),
    "a figure less": ([shown(image_png=png(1)), shown(image_png=png(1))], [shown(image_png=png(1))]),
}
LIVE_SEMANTIC = {
    "another word": ([printed("packed is faster: 2 ms")], [printed("packed is slower: 3 ms")]),
    "a line again": ([printed("a 2\nb 1\n")], [printed("a 3\nb 1\na 3\n")]),
    "a line more": ([printed(TIMES)], [printed(TIMES + "eager 3 ms\n")]),
    "not a number": ([printed("2 ms")], [printed("nan ms")]),
    "another dtype": ([printed("float32: 2 ms")], [printed("float16: 2 ms")]),
    "an error": ([new_output("error", ename="E", evalue="1")], [new_output("error", ename="E", evalue="2")]),
}


def kinds(before, after, **options):
    return [change.kind for change in changes(notebook(*before, **options), notebook(*after, **options))]


@pytest.mark.parametrize("name", COSMETIC)
def test_what_no_reader_sees_is_cosmetic(name):
    assert kinds(*COSMETIC[name]) == kinds(*COSMETIC[name], tags=[LIVE]) == ["cosmetic"]


@pytest.mark.parametrize("name", SEMANTIC)
def test_another_text_of_a_compared_cell_is_semantic(name):
    assert kinds(*SEMANTIC[name]) == ["semantic"]


@pytest.mark.parametrize("name", LIVE_SEMANTIC)
def test_other_words_of_a_live_cell_are_semantic(name):
    assert kinds(*LIVE_SEMANTIC[name], tags=[LIVE]) == ["semantic"]


def test_numbers_units_and_order_of_a_live_cell_are_timing():
    assert kinds([printed(TIMES)], [printed(FASTER)], tags=[LIVE]) == ["timing"]
    assert kinds([printed(TIMES)], [printed(FASTER)]) == ["semantic"]
    before, after = notebook(printed("1 ms")), notebook(printed("2 ms"), tags=[LIVE])
    assert [change.kind for change in changes(before, after)] == ["semantic"], "a new tag hides no change"


def test_a_figure_is_timing_and_its_share_of_pixels_is_said():
    before, after = notebook(shown(image_png=png(1, 2, 3, 4))), notebook(shown(image_png=png(1, 2, 3, 5)))
    assert changes(before, after) == [Change(1, "timing", "a figure, 25.0% of its pixels")]
    assert kinds([shown(image_png=png(1))], [shown(image_png=png(1, 1))]) == ["timing"]


def test_nothing_is_said_of_what_is_the_same():
    assert changes(notebook(printed("1")), notebook(printed("1"))) == []
    chunks, whole = (printed("a\n"), shown(text_plain="x"), printed("b\n")), (printed("a\nb\n"), shown(text_plain="x"))
    assert changes(notebook(*chunks), notebook(*whole)) == []
    markdown = notebook(printed("1"))
    markdown.cells[0].source = "# Other text"
    assert changes(notebook(printed("1")), markdown) == []


def test_ids_counts_and_metadata_are_cosmetic():
    changed = notebook(printed("1"), language_info={"name": "python", "version": "3.13"})
    changed.cells[1].id = "b"
    assert [(one.cell, one.kind) for one in changes(notebook(printed("1")), changed)] == [
        (1, "cosmetic"),
        (0, "cosmetic"),
    ]
    changed = notebook(printed("1"))
    changed.cells[1].execution_count = 7
    assert [one.kind for one in changes(notebook(printed("1")), changed)] == ["cosmetic"]


def test_the_worst_change_of_a_cell_counts_and_both_texts_are_shown():
    before = notebook(printed(f"{'x' * 200} 1652 tokens\na\n"), shown(image_png=png(1)))
    after = notebook(printed(f"{'x' * 200} 1653 tokens\nb\n"), shown(image_png=png(2)))
    (change,) = changes(before, after)
    assert change.kind == "semantic" and len(change.text) < 140
    assert "1652 tokens" in change.text and "1653 tokens" in change.text and "1 more line" in change.text


def test_of_a_live_cell_the_changed_words_are_shown():
    before, after = "p = 127 GFLOP/s\nfurthest: gelu\n", "p = 50 GFLOP/s\nfurthest: norms\n"
    (change,) = changes(notebook(printed(before), tags=[LIVE]), notebook(printed(after), tags=[LIVE]))
    assert change == Change(1, "semantic", "'furthest: gelu' -> 'furthest: norms'")


def test_cells_are_compared_with_those_of_the_same_code():
    cells = [new_code_cell(f"{name}()", outputs=[printed(name)], execution_count=None) for name in "abcd"]
    before, after = new_notebook(cells=cells[:3]), new_notebook(cells=[cells[0], cells[3], cells[1], cells[2]])
    (added,) = changes(before, after)
    assert (added.cell, added.kind) == (2, "semantic") and "no output -> stdout" in added.text
    (removed,) = changes(after, before)
    assert removed.kind == "semantic" and "stdout -> no output" in removed.text
    edited = new_notebook(cells=[cells[0], new_code_cell("b()  # again", outputs=cells[1].outputs), cells[2]])
    assert [one.kind for one in changes(before, edited)] == ["cosmetic"], "another id, and the same output"


def test_minutes_of_the_machine_are_rounded_up_and_may_be_noisy():
    assert [list(machine_minutes(seconds)) for seconds in (0.5, 40, 55, 65, 100, 200)] == [
        [1],
        [1],
        [1, 2],
        [1, 2],
        [2, 3],
        [3, 4, 5],
    ]


HEADER = "# ---\n# jupyter:\n#   kimivl_lab:\n#     minutes_cpu: {minutes}\n# ---\n\n"


@pytest.fixture
def course(tmp_path, monkeypatch):
    """A repository with the text of one small notebook: (folder, write, run)."""
    folder = tmp_path / "notebooks"
    (folder / "text").mkdir(parents=True)
    monkeypatch.setenv("GIT_CONFIG_GLOBAL", "/dev/null")

    def git(*words):
        identity = ["-c", "user.name=A", "-c", "user.email=a@example.org"]
        subprocess.run(["git", "-C", str(tmp_path), *identity, *words], check=True, capture_output=True)

    def write(*code, minutes=1):
        cells = "\n\n".join(f"# %%\n{cell}" for cell in code)
        (folder / "text" / "10_one.py").write_text(HEADER.format(minutes=minutes) + cells + "\n")

    def run(*options):
        return refresh.main(["--notebooks", str(folder), "--out", str(tmp_path / "build"), *options])

    git("init", "-q")
    return folder, git, write, run


def test_saved_notebooks_change_only_when_that_is_asked_for(course, capsys):
    folder, git, write, run = course
    path = folder / "10_one.ipynb"
    write("print(1652)")
    assert run() == 1 and not path.exists() and "a new notebook" in capsys.readouterr().out
    assert run("--accept") == 0 and "running" not in capsys.readouterr().out
    saved = nbformat.read(path, as_version=4)
    assert saved.metadata[RUN]["code"] == code_hash(saved) and 0 < saved.metadata[RUN]["seconds"] < 60
    assert [cell.execution_count for cell in saved.cells] == [1] and "kimivl_lab_execution" not in saved.metadata
    git("add", ".")
    git("commit", "-q", "-m", "one")
    assert run() == 0 and "0 timing, 0 cosmetic, 0 semantic" in capsys.readouterr().out

    committed = path.read_bytes()
    path.write_bytes(committed.replace(b"1652", b"1600"))  # an output that nobody committed
    write("print(1653)", minutes=9)
    assert run() == 1 and path.read_bytes() != committed
    said = capsys.readouterr().out
    assert "'1652' -> '1653'" in said and "is 9, and should be 1" in said and "1 semantic" in said
    assert run("--accept") == 0
    again = nbformat.read(path, as_version=4)
    assert again.cells[0].outputs[0].text == "1653\n" and again.cells[0].id == saved.cells[0].id
    (replaced,) = (folder.parent / "build" / "replaced").iterdir()
    assert "1600" in replaced.read_text()

    before = path.read_bytes()
    write("print(1653)", "1 / 0")
    assert run("--accept") == 1 and "ZeroDivisionError" in capsys.readouterr().out
    assert path.read_bytes() == before


def test_a_name_that_no_notebook_has_is_refused(course, capsys):
    _, _, write, run = course
    write("1")
    assert run("--only", "99_*") == 2
    assert "99_*" in (said := capsys.readouterr().out) and "10_one" in said
