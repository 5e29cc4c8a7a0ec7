"""The report, on small notebooks: what is executed, kept, shown and said."""

import base64
import contextlib
import io
import sys
from html.parser import HTMLParser

import nbformat
import pytest
import torch
from matplotlib.patches import Rectangle
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook, new_output

from kimivl_lab.measure.records import Recorder
from kimivl_lab.report import __main__ as report
from kimivl_lab.report import execution, ladder
from kimivl_lab.report.contents import anchored, contents
from kimivl_lab.report.page import with_mathml
from kimivl_lab.report.results import NEEDS_GPU, results

PLOT = 'from IPython.display import Image, display\ndisplay(Image(data={png!r}, format="png"))'
RED, BLUE = (b"\x89PNG\r\n\x1a\n" + word for word in (b"red", b"blue"))  # the headline cell shows both, blue last
PNG_OF = {png: base64.b64encode(png).decode() for png in (RED, BLUE)}


def write_notebook(folder, name, title, *code, question="How much?", result="print('7 <\\n8.')\nprint('*always*')"):
    cells = [
        new_markdown_cell(f"# {title}\n\n## The question\n\n{question}"),
        *map(new_code_cell, code),
        new_code_cell(PLOT.format(png=RED)),
        new_code_cell(f"{PLOT.format(png=RED)}\n{PLOT.format(png=BLUE)}", metadata={"tags": ["headline"]}),
        new_markdown_cell("*How to read it:* **blue** is [better](20_fine.ipynb) than `red_one`.\n\nMore: $x^2$."),
        new_markdown_cell(
            "## Part\n\n[solved](solutions/00_good__SOLUTION.ipynb), [parts](#part), [paper](https://example.org), "
            "[term](WORDS.md#host-sync), [there](20_fine.ipynb#The-question)"
        ),
        new_code_cell(result, metadata={"tags": ["result"]}),
    ]
    folder.mkdir(exist_ok=True, parents=True)
    nbformat.write(new_notebook(cells=cells, metadata={"kimivl_lab": {"question": question}}), folder / f"{name}.ipynb")
    return folder / f"{name}.ipynb"


def run(*arguments):
    """(exit code, printed lines)"""
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        code = report.main([*map(str, arguments)])
    return code, printed.getvalue().splitlines()


class Page(HTMLParser):
    """What a test looks for in a page."""

    def __init__(self, path):
        super().__init__()
        self.text, self.images, self.links, self.tags, self.fetched, self.ids = "", [], [], [], [], set()
        self.feed(path.read_text())

    def handle_starttag(self, tag, attrs):
        values = dict(attrs)
        self.tags.append(tag)
        self.ids |= {values["id"]} if "id" in values else set()
        if tag == "img":
            self.images.append(values)
        if tag == "a":
            self.links.append(values["href"])
        source = values.get("src") or (values.get("href") if tag == "link" else None)
        if source and not source.startswith("data:"):
            self.fetched.append((tag, source))

    def handle_data(self, data):
        self.text += data


@pytest.fixture(scope="module", autouse=True)
def still_library(tmp_path_factory):
    """Fingerprints see an empty library, so that an edit of the real one during this run changes nothing here."""
    with pytest.MonkeyPatch.context() as patch:
        empty = tmp_path_factory.mktemp("library")
        patch.setattr(execution, "repository_root", lambda: empty)
        yield


@pytest.fixture(scope="module")
def first_run(tmp_path_factory):
    """A failing notebook between two good ones, run once: (notebooks, out, exit code, printed lines)."""
    folder = tmp_path_factory.mktemp("report")
    notebooks, out = folder / "notebooks", folder / "out"
    write_notebook(notebooks, "00_good", "A `good` one", "from pathlib import Path", "print(Path.cwd().name)")
    write_notebook(notebooks, "10_bad", "A bad one", "print('so far')", "assert 1 + 1 == 3, 'sums\\ndisagree'", "1")
    write_notebook(notebooks, "20_fine", "Another", question="How long?")
    solution = new_notebook(cells=[new_markdown_cell("# A solution\n\nof [this](../00_good.ipynb)")])
    (notebooks / "solutions").mkdir()
    nbformat.write(solution, notebooks / "solutions" / "00_good__SOLUTION.ipynb")
    (notebooks / "WORDS.md").write_text("# Words\n\n### Host sync\n\nSee [one](00_good.ipynb#The-question).\n")
    before = {path: path.read_bytes() for path in notebooks.rglob("*") if path.is_file()}
    code, lines = run("--notebooks", notebooks, "--out", out)
    assert {path: path.read_bytes() for path in notebooks.rglob("*") if path.is_file()} == before, "sources changed"
    return notebooks, out, code, lines


def test_a_failure_is_shown_and_the_others_still_run(first_run):
    _, out, code, lines = first_run
    assert code == 1
    index = Page(out / "index.html")
    assert index.text.count("Every cell ran") == 2
    assert index.text.count("Failed") == 1
    assert "cell 3 of 9: AssertionError: sums disagree" in index.text
    page = Page(out / "10_bad.html")
    assert "so far" in page.text and "AssertionError: sums" in page.text
    assert [line.split(":")[0] for line in lines] == ["1/3 00_good", "2/3 10_bad", "3/3 20_fine", "report"]
    assert "FAILED, cell 3 of 9" in lines[1]


def test_a_notebook_runs_in_its_own_folder(first_run):
    notebooks, out, _, _ = first_run
    executed = nbformat.read(out / "notebooks" / "00_good.ipynb", as_version=4)
    assert executed.cells[2].outputs[0].text == "notebooks\n"
    assert [cell.execution_count for cell in executed.cells if cell.cell_type == "code"] == [1, 2, 3, 4, 5]


def test_contents_of_a_notebook(first_run):
    _, out, _, _ = first_run
    good = contents(nbformat.read(out / "notebooks" / "00_good.ipynb", as_version=4))
    assert good.title == "A good one"
    assert good.question == "How much?"
    assert good.picture == PNG_OF[BLUE]
    assert good.picture_alt == "blue is better than red_one."
    assert good.result_html == "<p>7 &lt; 8.</p><p>*always*</p>"
    failed = contents(nbformat.read(out / "notebooks" / "10_bad.ipynb", as_version=4))
    assert (failed.title, failed.picture, failed.result_html) == ("A bad one", "", "")


def test_the_result_may_be_a_text_cell():
    cell = new_markdown_cell("## What to remember\n\n- **one** thing", metadata={"tags": ["result"]})
    html = contents(new_notebook(cells=[cell])).result_html
    assert "<strong>one</strong>" in html and "remember" not in html


def test_the_index_is_one_readable_file(first_run):
    _, out, _, _ = first_run
    index = Page(out / "index.html")
    assert index.fetched == []
    assert index.tags.count("h1") == 1
    assert index.tags.count("article") == index.tags.count("h2") - 1 == 3, "one heading more for the results"
    assert index.text.count("needs a GPU") == sum(line.record == NEEDS_GPU for line in results()) > 0
    front, *headlines = (image["src"].removeprefix("data:image/png;base64,") for image in index.images)
    kept = ladder.ladder_picture()
    assert kept is not None and front == kept.png
    assert headlines == [PNG_OF[BLUE]] * 2
    for page in map(Page, out.glob("*.html")):
        assert all(image["alt"] for image in page.images if image["src"].endswith(PNG_OF[BLUE]))
        for link in page.links:
            file, _, fragment = link.partition("#")
            assert link.startswith("https:") or not file or (out / file).exists(), link
            if not link.startswith("https:") and fragment:
                assert fragment in (Page(out / file).ids if file else page.ids), link
    there = {"20_fine.html", "#part", "https://example.org", "00_good__SOLUTION.html", "WORDS.html#host-sync"}
    assert there | {"20_fine.html#the-question"} <= set(Page(out / "00_good.html").links)
    for words in ("How much?", "How long?", "7 < 8.", "transformers"):
        assert words in index.text


def test_every_page_lists_the_headings_of_all(first_run):
    _, out, _, _ = first_run
    assert {path.stem for path in out.glob("*.html")} == {
        *("index", "00_good", "10_bad", "20_fine", "00_good__SOLUTION", "WORDS")
    }
    for path in out.glob("*.html"):
        page = Page(path)
        own = "" if path.stem == "20_fine" else "20_fine.html"
        assert f"{own}#the-question" in page.links
        assert page.text.count("Host sync") == 1 + (path.stem == "WORDS")


def test_headings_of_the_same_words_have_different_anchors():
    body, headings = anchored("<h2>A <code>b</code>: &amp; c?</h2><p>x</p><h3>A b: &amp; c?</h3>\n<h2>D</h2>")
    assert [(one.level, one.text) for one in headings] == [(2, "A b: & c?"), (3, "A b: & c?"), (2, "D")]
    assert [one.anchor for one in headings] == ["a-b--c", "a-b--c-1", "d"]
    assert '<h3 id="a-b--c-1">' in body and "<p>x</p>" in body


def test_saved_outputs_are_shown_and_nothing_is_executed(tmp_path, monkeypatch):
    monkeypatch.setattr(report, "execute", lambda *arguments, **more: pytest.fail("executed"))
    path = write_notebook(tmp_path / "notebooks", "00_good", "A good one")
    notebook = nbformat.read(path, as_version=4)
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    code[0].outputs = [new_output("stream", text="A processor, 4 cores\n{'torch': '2'}\n")]
    code[1].outputs = [new_output("display_data", {"image/png": PNG_OF[BLUE]})]
    code[2].outputs = [new_output("stream", text="42 times\n")]
    nbformat.write(notebook, path)
    assert run("--notebooks", path.parent, "--out", tmp_path / "out", "--saved")[0] == 0
    index = Page(tmp_path / "out" / "index.html")
    assert "42 times" in index.text and "Saved outputs of A processor, 4 cores" in index.text
    assert PNG_OF[BLUE] in index.images[-1]["src"]
    assert "Every cell ran" not in index.text and "s on this machine" not in index.text
    assert "A processor, 4 cores" in Page(tmp_path / "out" / "00_good.html").text


def test_formulas_are_in_the_page_and_nothing_is_fetched(first_run):
    _, out, _, _ = first_run
    page = Page(out / "00_good.html")
    assert page.fetched == []
    assert "math" in page.tags


def test_code_keeps_its_dollars():
    assert with_mathml("cost `$HOME` is\n```\n$a$\n```\n") == "cost `$HOME` is\n```\n$a$\n```\n"
    assert with_mathml("a $x_1$ b").count("<math") == 1
    assert 'display="block"' in with_mathml("$$\\frac{a}{b}$$")
    assert "<mn>1,234,567</mn>" in with_mathml("$n = 1{,}234{,}567$")


def test_an_unchanged_notebook_is_not_executed_again(first_run, monkeypatch):
    notebooks, out, _, _ = first_run
    executed = []
    real = report.execute
    monkeypatch.setattr(
        report, "execute", lambda path, *rest, **more: executed.append(path.stem) or real(path, *rest, **more)
    )
    code, lines = run("--notebooks", notebooks, "--out", out)
    assert (code, executed) == (1, ["10_bad"])  # a failure is never kept
    assert "cached, measured at 20" in lines[0]
    assert "cached, measured at" in Page(out / "index.html").text

    executed.clear()
    code, _ = run("--notebooks", notebooks, "--out", out, "--only", "0*", "--force")
    assert (code, executed) == (0, ["00_good"])
    assert Page(out / "index.html").tags.count("article") == 1


def test_a_cell_that_takes_too_long_is_a_failure(tmp_path):
    write_notebook(tmp_path / "notebooks", "00_slow", "Slow", "import time", "time.sleep(60)")
    code, lines = run("--notebooks", tmp_path / "notebooks", "--out", tmp_path / "out", "--timeout", 1)
    assert code == 1
    assert "cell 3 of 8: CellTimeoutError: A cell timed out" in lines[0]


def test_another_environment_changes_neither_kernel_nor_figures(tmp_path, foreign_environment):
    """What ran is this interpreter with inline figures, whatever JUPYTER_PATH and MPLBACKEND say."""
    figure = "import matplotlib.pyplot as plt\nfig, ax = plt.subplots()\nplt.show()"
    path = write_notebook(tmp_path, "00_good", "Good", "import sys\nprint(sys.executable)", figure)
    notebook, execution = report.execute(path, "key", timeout=60, on_cell=lambda index: None)
    assert execution.error == ""
    assert notebook.cells[1].outputs[0].text.strip() == sys.executable
    assert "image/png" in notebook.cells[2].outputs[0].data


def test_no_notebook_of_that_name(tmp_path):
    write_notebook(tmp_path / "notebooks", "00_good", "Good")
    code, lines = run("--notebooks", tmp_path / "notebooks", "--out", tmp_path / "out", "--only", "99*")
    assert code == 2
    assert "99*" in lines[0] and "00_good" in " ".join(lines)
    assert not (tmp_path / "out").exists()


def test_a_fingerprint_covers_all_that_the_outputs_depend_on(tmp_path, monkeypatch):
    (tmp_path / "kimivl_lab").mkdir()
    (tmp_path / "data" / "images").mkdir(parents=True)
    module, picture = tmp_path / "kimivl_lab" / "geometry.py", tmp_path / "data" / "images" / "one.png"
    module.write_text("PATCH = 14")
    picture.write_bytes(b"one")
    monkeypatch.setattr(execution, "repository_root", lambda: tmp_path)
    path = write_notebook(tmp_path / "notebooks", "00_good", "Good", "1")
    seen = {execution.fingerprint(path)}

    notebook = nbformat.read(path, as_version=4)
    notebook.cells[1].execution_count = 7
    nbformat.write(notebook, path)
    assert execution.fingerprint(path) in seen, "saved outputs do not count"

    changes = [
        lambda: write_notebook(tmp_path / "notebooks", "00_good", "Good", "2"),
        lambda: module.write_text("PATCH = 16"),
        lambda: picture.write_bytes(b"two"),
        lambda: monkeypatch.setattr(execution, "versions", lambda: {"torch": "0"}),
        lambda: monkeypatch.setattr(execution, "device_name", lambda: "another machine"),
        lambda: monkeypatch.setattr(execution, "BACKEND", "agg"),
        lambda: monkeypatch.setattr(torch, "get_num_threads", lambda: 77),
        lambda: monkeypatch.setattr(sys, "executable", "/another/python"),
    ]
    for number, change in enumerate(changes):
        change()
        key = execution.fingerprint(path)
        assert key not in seen, number
        seen.add(key)


def test_a_ladder_record_becomes_the_front_picture(tmp_path, monkeypatch):
    monkeypatch.setattr(ladder, "DEFAULT_DIRECTORY", tmp_path / "measurements")
    monkeypatch.setattr(ladder, "repository_root", lambda: tmp_path)
    assert ladder.ladder_picture() is None
    columns = ["case", "variant", "patches", "latency_ms_p50", "latency_ms_p20", "latency_ms_p80", "relative_error"]
    folder, settings = tmp_path / "measurements", {"preset": "lab"}
    with Recorder("ladder", "float32", columns, directory=folder, settings=settings) as recorder:
        for variant, latency in {"before": 40.0, "per image": 20.0, "slower": 25.0}.items():
            row = ("photos", variant, 40, latency, latency - 1, latency + 2, 1e-6)
            recorder.add(dict(zip(columns, row, strict=True)))
    picture = ladder.ladder_picture()
    assert picture is not None
    assert "before to slower" in picture.alt
    fig, ax = ladder.ladder_waterfall(recorder.rows, "here, today")
    widths = [bar.get_width() for bar in ax.patches if isinstance(bar, Rectangle)]
    assert widths == [40, 0, 20, 20, 20, 5]
    assert [label.get_text() for label in ax.get_yticklabels()] == ["before", "per image", "slower"]
    assert any("1.6 times" in text.get_text() for text in fig.texts)

    write_notebook(tmp_path / "notebooks", "00_good", "Good")
    run("--notebooks", tmp_path / "notebooks", "--out", tmp_path / "out")
    sources = [image["src"] for image in Page(tmp_path / "out" / "index.html").images]
    assert sources[0].removeprefix("data:image/png;base64,") == picture.png
    assert len(sources) == 2
