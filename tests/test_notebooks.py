"""What every notebook keeps to: its skeleton, its size, outputs saved in order, one source, and how nbval compares."""

import re
import statistics
import subprocess
import sys
from pathlib import Path

import jupytext
import nbformat
import pytest
from jupyter_client.kernelspec import KernelSpecManager
from nbformat.v4 import new_code_cell, new_notebook, new_output
from nbval.plugin import get_sanitize_patterns

from kimivl_lab.lessons.checks import NOT_ANSWERED
from kimivl_lab.lessons.guesses import NO_GUESS

ROOT = Path(__file__).resolve().parents[1]
NOTEBOOKS = ROOT / "notebooks"
MAIN = sorted(NOTEBOOKS.glob("*.ipynb"))
SOLUTIONS = sorted((NOTEBOOKS / "solutions").glob("*.ipynb"))
OPENING = ["The question", "You will be able to", "Needs", "Versions and machine"]
MIDDLE = ["Predict: ", "Build: ", "Check equality: ", "Measure: "]
CLOSING = ["What to remember", "On Monday", "Exercises", "References"]
TAGS = {"nbval-ignore-output", "headline", "result"}
MACHINE_PATH = re.compile(r"(?<![\w.:/])/(home|root|tmp|work|Users|mnt|opt|usr|var)/|\b[A-Z]:\\")
SANITIZE = ROOT / "tests" / "nbval_sanitize.cfg"

each_notebook = pytest.mark.parametrize("path", [*MAIN, *SOLUTIONS], ids=lambda path: path.stem)
each_main = pytest.mark.parametrize("path", MAIN, ids=lambda path: path.stem)


def read(path):
    return nbformat.read(path, as_version=4)


def code_cells(path):
    return [cell for cell in read(path).cells if cell.cell_type == "code"]


def tagged(path, tag):
    return [cell for cell in read(path).cells if tag in cell.metadata.get("tags", [])]


def sections(path):
    """Heading of the second level -> the cells' text below it; the first cell's title stands under ""."""
    found, heading = {"": ""}, ""
    for cell in read(path).cells:
        for line in cell.source.splitlines():
            if cell.cell_type == "markdown" and line.startswith("## "):
                heading = line.removeprefix("## ")
                assert heading not in found, f"{heading!r} stands twice"
                found[heading] = ""
            else:
                found[heading] += line + "\n"
    return found


def test_every_notebook_has_its_solutions():
    assert [path.stem for path in SOLUTIONS] == [f"{path.stem}__SOLUTION" for path in MAIN]
    assert len(MAIN) >= 2 and all(re.fullmatch(r"\d\d_[a-z0-9_]+", path.stem) for path in MAIN)


@each_notebook
def test_the_text_is_the_source_of_the_notebook(path):
    text = NOTEBOOKS / "text" / path.relative_to(NOTEBOOKS).with_suffix(".py")
    source, built = jupytext.read(text), read(path)
    assert source.metadata["kimivl_lab"] == built.metadata["kimivl_lab"]
    assert built.metadata["kernelspec"]["name"] == "python3"
    cells = [[(c.cell_type, c.source, c.metadata.get("tags", [])) for c in one.cells] for one in (source, built)]
    assert cells[0] == cells[1], "run `make notebooks`"


def test_every_text_has_its_notebook():
    texts = {path.relative_to(NOTEBOOKS / "text").with_suffix("") for path in (NOTEBOOKS / "text").rglob("*.py")}
    assert texts == {path.relative_to(NOTEBOOKS).with_suffix("") for path in [*MAIN, *SOLUTIONS]}


@each_notebook
def test_outputs_were_saved_by_one_run_from_top_to_bottom(path):
    cells = code_cells(path)
    assert [cell.execution_count for cell in cells] == list(range(1, len(cells) + 1))


@each_notebook
def test_no_error_and_no_stderr_is_saved(path):
    outputs = [output for cell in code_cells(path) for output in cell.outputs]
    assert outputs
    assert [output for output in outputs if output.output_type == "error" or output.get("name") == "stderr"] == []


@each_notebook
def test_no_machine_path_is_saved(path):
    for cell in read(path).cells:
        texts = [cell.source]
        for output in cell.get("outputs", []):
            texts += [output.get("text", "")]
            texts += [str(value) for mime, value in output.get("data", {}).items() if not mime.startswith("image/")]
        assert [text for text in texts if MACHINE_PATH.search(text)] == []


@each_notebook
def test_half_of_the_code_cells_have_at_most_8_lines(path):
    assert statistics.median(len(cell.source.splitlines()) for cell in code_cells(path)) <= 8


@each_notebook
def test_few_outputs_are_not_compared(path):
    used = [tag for cell in read(path).cells for tag in cell.metadata.get("tags", [])]
    assert set(used) <= TAGS
    assert used.count("nbval-ignore-output") <= 4
    assert not any(re.search("#.*NBVAL_", cell.source) for cell in code_cells(path)), "tags, not comments"


@each_main
def test_the_question_is_one_sentence_and_the_metadatas(path):
    question = " ".join(sections(path)["The question"].split())
    assert question == read(path).metadata["kimivl_lab"]["question"]
    assert question.endswith("?") and not re.search(r"[.?!] ", question)


@each_main
def test_three_verbs_name_what_one_will_be_able_to_do(path):
    items = re.findall(r"^- (.*)", sections(path)["You will be able to"], re.MULTILINE)
    assert len(items) == 3
    assert all(re.match(r"\*\*[a-z]+\*\* ", item) for item in items)


@each_main
def test_metadata_say_what_it_needs(path):
    needs = read(path).metadata["kimivl_lab"]
    assert set(needs) == {"question", "minutes_cpu", "gpu", "data"}
    assert isinstance(needs["minutes_cpu"], int) and needs["minutes_cpu"] >= 1
    assert needs["gpu"] in {"optional", "required"}
    assert re.search(r"CPU", sections(path)["Needs"]) and re.search(r"GPU", sections(path)["Needs"])


@each_notebook
def test_the_first_code_cell_prints_machine_and_versions(path):
    first = code_cells(path)[0]
    assert "device_name(" in first.source and "versions()" in first.source
    assert "torch" in "".join(output.get("text", "") for output in first.outputs)
    assert "nbval-ignore-output" in first.metadata.tags


@each_main
def test_headline_and_result_for_the_report(path):
    (headline,) = tagged(path, "headline")
    assert any("image/png" in output.get("data", {}) for output in headline.outputs)
    (result,) = tagged(path, "result")
    assert result.cell_type == "markdown" or "".join(output.get("text", "") for output in result.outputs).strip()


@each_main
def test_every_picture_is_followed_by_a_sentence_of_reading(path):
    cells = read(path).cells
    for cell, following in zip(cells, [*cells[1:], None], strict=True):
        if any("image/png" in output.get("data", {}) for output in cell.get("outputs", [])):
            assert following is not None and following.cell_type == "markdown", cell.source


# --- the form of a lesson --------------------------------------------------------------------------------------------


@each_main
def test_the_form_of_a_lesson(path):
    found = sections(path)
    headings = list(found)[1:]
    middle = headings[len(OPENING) : -len(CLOSING)]
    assert headings[: len(OPENING)] == OPENING and headings[-len(CLOSING) :] == CLOSING
    starts = [start for heading in middle for start in MIDDLE if heading.startswith(start)]
    assert list(dict.fromkeys(starts)) == MIDDLE, "one of each, first in this order"
    assert all(": " in heading for heading in middle), "a heading says its topic"
    assert all(text.strip() for text in found.values())


@each_main
def test_a_lesson_is_left_by_links_at_both_ends(path):
    title, navigation = read(path).cells[0].source.split("\n\n")[:2]
    assert re.fullmatch(r"# \S.*", title)
    assert "(GLOSSARY.md)" in navigation and "(NOTATION.md)" in navigation
    last = sections(path)["References"].strip().splitlines()[-1]
    others = [other.name for other in MAIN if other != path]
    assert any(f"({name})" in last for name in others), "the last line leads on"


@each_notebook
def test_cells_are_20_lines_and_lines_100_characters(path):
    for cell in read(path).cells:
        lines = cell.source.splitlines()
        assert cell.cell_type != "code" or len(lines) <= 20, lines[0]
        long = [line for line in lines if len(line) > 100 and not re.search(r"\]\(|^\||^\$\$", line)]
        assert long == []


@each_main
def test_a_lesson_has_20_to_65_cells(path):
    assert 20 <= len(read(path).cells) <= 65


@each_main
def test_terms_lead_to_the_glossary(path):
    text = "\n".join(cell.source for cell in read(path).cells if cell.cell_type == "markdown")
    linked = re.findall(r"\]\(GLOSSARY\.md#([^)]+)\)", text)
    terms = {re.sub(r"[^\w -]", "", term.lower()).replace(" ", "-") for term in glossary()}
    assert len(set(linked)) >= 5
    assert set(linked) <= terms


@each_main
def test_a_lesson_lets_the_learner_guess_and_write_in_the_middle(path):
    found = sections(path)
    middle = "".join(text for heading, text in found.items() if ": " in heading)
    assert len(re.findall(r"\bguess\(", middle)) >= 2
    assert len(re.findall(r"\bcheck(?:_function)?\(", middle)) >= 2


@each_main
def test_five_exercises_one_for_operators_and_one_starred(path):
    exercises = sections(path)["Exercises"]
    assert f"(solutions/{path.stem}__SOLUTION.ipynb)" in exercises
    titles = re.findall(r"^### (\d)\. (.*)", exercises, re.MULTILINE)
    assert [int(number) for number, _ in titles] == list(range(1, len(titles) + 1)) and len(titles) >= 5
    assert any(title.endswith("(operator)") for _, title in titles)
    assert any(title.startswith("★ ") for _, title in titles)
    assert len(re.findall(r"\bcheck(?:_function)?\(", exercises)) >= len(titles)


@each_main
def test_blanks_and_guesses_are_left_open_and_the_solutions_answer_all_of_them(path):
    (solution,) = (other for other in SOLUTIONS if other.stem == f"{path.stem}__SOLUTION")
    printed = {}
    for one in (path, solution):
        outputs = [output for cell in code_cells(one) for output in cell.outputs]
        printed[one] = "".join(output.get("text", "") for output in outputs if output.output_type == "stream")
    blanks = printed[path].count(NOT_ANSWERED), printed[path].count(NO_GUESS)
    source = "\n".join(cell.source for cell in code_cells(path))
    assert blanks == (len(re.findall(r"\bcheck(?:_function)?\(", source)), len(re.findall(r"\bguess\(", source)))
    assert NOT_ANSWERED not in printed[solution] and NO_GUESS not in printed[solution]
    right = printed[solution].count(": right"), printed[solution].count("your guess is")
    assert right >= blanks, "the solutions answer every blank and every guess"


def glossary():
    """Term -> its sentences."""
    parts = re.split(r"^### (.*)\n", (NOTEBOOKS / "GLOSSARY.md").read_text(), flags=re.MULTILINE)[1:]
    return dict(zip(parts[::2], parts[1::2], strict=True))


def test_the_glossary_is_in_order_and_short():
    terms = list(glossary())
    assert terms == sorted(terms, key=str.lower) and len(terms) == len(set(terms)) >= 50
    for term, text in glossary().items():
        assert 5 <= len(text.split()) <= 50, term
        assert len(re.findall(r"[.?](?:\s|$)", text)) <= 3, term


def test_each_letter_of_the_notation_has_one_meaning():
    cells = [
        line.split("|")[1] for line in (NOTEBOOKS / "NOTATION.md").read_text().splitlines() if line.startswith("| $")
    ]
    letters = re.findall(r"\$(.+?)\$", " ".join(cells))
    assert len(letters) == len(set(letters)) >= 20


def test_every_sanitize_rule_is_parsed_and_does_something():
    text = SANITIZE.read_text()
    rules = dict(get_sanitize_patterns(text))
    assert len(rules) == len(re.findall(r"^regex:", text, re.MULTILINE)) == len(re.findall(r"^replace:", text, re.M))
    examples = {
        "<Thing at 0x7f0a12345678>": "<Thing at ADDRESS>",
        "torch 2.13.0+cpu, 2.13.0+cu130": "torch 2.13.0, 2.13.0",
    }
    assert len(rules) == len(examples)
    for (pattern, replacement), (before, after) in zip(rules.items(), examples.items(), strict=True):
        assert re.sub(pattern, replacement, before) == after


def makefile(name):
    """The words of a variable of the Makefile."""
    (value,) = re.findall(rf"^{name} := ((?:.*\\\n)*.*)$", (ROOT / "Makefile").read_text(), re.MULTILINE)
    return value.replace("\\\n", " ").split()


FIGURE = "import matplotlib.pyplot as plt\nfig, ax = plt.subplots(figsize=(1, 1))\nplt.show()"
SHOWN = {"text/plain": "<Figure size 100x100 with 1 Axes>", "image/png": "b2xk"}


def test_nbval_as_make_test_calls_it_compares_text_and_figures_but_not_their_pixels(tmp_path, foreign_environment):
    saved = {
        "same": [new_output("stream", name="stdout", text="1\n")],
        "other_text": [new_output("stream", name="stdout", text="2\n")],
        "nothing": [],
    }
    shown = {"text/plain": "a table", "text/html": "<b>new</b>", "image/png": "bmV3", "image/svg+xml": "<svg/>"}
    stale = shown | {"text/html": "<b>old</b>", "image/png": "b2xk", "image/svg+xml": "<svg></svg>"}
    display = f"from IPython.display import display\ndisplay({shown!r}, raw=True)"
    for name, outputs in saved.items():
        cells = [
            new_code_cell("print(1)", execution_count=1, outputs=outputs),
            new_code_cell(display, execution_count=2, outputs=[new_output("display_data", data=stale)]),
        ]
        if name == "same":
            cells.append(new_code_cell(FIGURE, execution_count=3, outputs=[new_output("display_data", data=SHOWN)]))
        nbformat.write(new_notebook(cells=cells), tmp_path / f"{name}.ipynb")
    command = [sys.executable, "-m", "pytest", "-p", "conftest", "-p", "no:cacheprovider", *makefile("NBVAL")]
    done = subprocess.run([*command, "-rA", str(tmp_path)], cwd=ROOT, capture_output=True, text=True)
    lines = re.findall(r"^(PASSED|FAILED) \S*?(\w+\.ipynb::Cell \d)", done.stdout, re.MULTILINE)
    verdicts = {cell: verdict for verdict, cell in lines}
    failed = {"other_text.ipynb::Cell 0", "nothing.ipynb::Cell 0"}
    assert len(verdicts) == 7 and {cell for cell, verdict in verdicts.items() if verdict == "FAILED"} == failed, (
        done.stdout
    )


def test_another_environment_is_what_jupyter_would_take(foreign_environment):
    """The fixture does what it says: without our kernel the foreign one would run."""
    assert KernelSpecManager().get_kernel_spec("python3").argv == ["false"]
