"""Slides: what becomes one, what the notes hold, and, in a headless Chromium, that every slide shows all of itself."""

import base64
import re

import nbformat
import pytest
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook, new_output

from kimivl_lab.datasets import repository_root
from kimivl_lab.report import slides
from kimivl_lab.report.chromium import find_chromium
from kimivl_lab.report.slides import WORDS, deck, main, print_pdf, write_deck

from .browser import browser

__all__ = ["browser"]

LESSONS = sorted((repository_root() / "notebooks").glob("*.ipynb"))
PNG = base64.b64encode(b"\x89PNG\r\n\x1a\npicture").decode()


def lesson(*cells):
    opening = ["# A lesson\n\n[other](x.ipynb) · links\n\nAfter the last one.\n\n## The question\n\nHow much?"]
    return new_notebook(cells=[*map(new_markdown_cell, opening), *cells])


def solution(*cells):
    return new_notebook(cells=[new_markdown_cell("# Solutions\n\n## In the text"), *cells])


def words(slide):
    return " ".join(re.sub(r"<[^>]*>", " ", slide.html).split())


def test_the_first_slide_asks_the_question():
    (first,) = deck(lesson())
    assert (first.title, words(first), first.notes) == ("A lesson", "How much?", ["After the last one."])


def test_points_of_a_text_are_shown_and_all_of_it_is_in_the_notes():
    text = "Plain. This is **bold**. Not shown.\n\n$$a = b$$\n\n- one\n- two\n\nNothing here."
    _, slide = deck(lesson(new_markdown_cell(f"## Topic\n\n{text}")))
    assert slide.title == "Topic" and "Plain. This is bold ." in words(slide)
    assert "Not shown" not in words(slide) and "Nothing here" not in words(slide)
    assert slide.html.count("<math") == 1 and slide.html.count("<li>") == 2
    assert slide.notes == text.split("\n\n")


def test_a_long_text_becomes_slides_of_about_the_same_length():
    items = "\n".join(f"- item {number} " + "word " * 28 for number in range(5))
    _, *pages = deck(lesson(new_markdown_cell(f"## Topic\n\n{items}")))
    lengths = [len(words(page).split()) for page in pages]
    assert len(pages) == 3 and max(lengths) <= WORDS and max(lengths) - min(lengths) <= 35
    assert [page.notes != [] for page in pages] == [True, False, False]


def test_a_picture_has_its_reading_in_the_notes():
    output = new_output("display_data", {"image/png": PNG})
    reading = "*How to read it:* upwards is **more**."
    cells = [new_code_cell("plot()", outputs=[output, output]), new_markdown_cell(reading)]
    _, one, two = deck(lesson(new_markdown_cell("## Topic\n\n### Part\n\nBefore it."), *cells))
    assert (one.section, one.title, one.kind) == ("Topic", "Part", "picture")
    assert PNG in one.html and 'alt="upwards is more."' in one.html
    assert (one.notes, two.notes) == (["Before it."], [reading])


def test_a_task_has_the_answer_of_the_solutions_in_its_notes():
    blank = "def double(x):\n    return ...\n\n\ncheck(double)"
    cells = [
        new_markdown_cell("## Topic\n\n**Your guess.** How many?"),
        new_code_cell('count_guess = guess("count", None)'),
        new_markdown_cell("**Your code: twice.** Write it."),
        new_code_cell(blank),
    ]
    answers = solution(
        new_markdown_cell("**The guess.** Three, as there are three."),
        new_code_cell('other = 1\ncount_guess = guess("count", 3)'),
        new_markdown_cell("Add it to itself."),
        new_code_cell("def double(x):\n    return x + x"),
    )
    _, guess, code = deck(lesson(*cells), answers)
    assert (guess.kind, guess.title, words(guess)) == ("task", "Your guess", "How many?")
    assert guess.notes == [
        "**Answer.**",
        "**The guess.** Three, as there are three.",
        '```python\ncount_guess = guess("count", 3)\n```',
    ]
    assert code.title == "Your code: twice" and words(code) == "Write it. def double ( x ): return ..."
    assert "return x + x" in code.notes[-1] and "x + x" not in code.html
    _, _, alone = deck(lesson(*cells))
    assert alone.notes == []


def test_exercises_are_listed_with_their_answers_in_the_notes():
    text = "## Exercises\n\nSolve.\n\n### 1. First\n\nHow?\n\n### 2. Second\n\nWhy?"
    answers = solution(new_markdown_cell("## Exercises\n\n### 2. Second\n\nBecause."), new_code_cell("answer_2 = 5"))
    _, slide = deck(lesson(new_markdown_cell(text)), answers)
    assert words(slide) == "First Second" and 'start="2"' in slide.html
    assert slide.notes[-4:] == ["Why?", "**Answer.**", "Because.", "```python\nanswer_2 = 5\n```"]
    assert "How?" in slide.notes


@pytest.mark.parametrize("path", LESSONS, ids=lambda path: path.stem)
def test_a_deck_holds_its_lesson(path):
    """Each figure once, an answer for each task, and each paragraph in the notes."""
    notebook, answers = (
        nbformat.read(one, as_version=4) for one in (path, path.parent / "solutions" / f"{path.stem}__SOLUTION.ipynb")
    )
    shown = deck(notebook, answers)
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", [])]
    figures = [
        output.data["image/png"].replace("\n", "") for output in outputs if "image/png" in output.get("data", {})
    ]
    pictures = [slide for slide in shown if slide.kind == "picture"]
    assert len(figures) == len(pictures) and all(png in one.html for png, one in zip(figures, pictures, strict=True))
    tasks = [slide for slide in shown if slide.kind == "task"]
    assert len(tasks) >= 3 and all("**Answer.**" in slide.notes for slide in tasks)
    notes = [note for slide in shown for note in slide.notes]
    for section in slides._sections(notebook):
        if section.title not in ("The question", *slides._SKIPPED):
            missing = [text for text in section.texts if text not in notes and not text.startswith("**Your ")]
            assert [text for text in missing if " · " not in text] == []
    assert sum(slide.kind == "result" for slide in shown) == 1


def test_no_notebook_of_that_name(tmp_path, capsys):
    assert main(["--only", "99*", "--out", str(tmp_path / "out")]) == 2
    assert "99*" in capsys.readouterr().err and not (tmp_path / "out").exists()


# --- in a browser ----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def decks(browser, tmp_path_factory):
    out = tmp_path_factory.mktemp("slides")
    assert main(["--out", str(out)]) == 0
    return sorted(out.glob("[0-9]*.html"))


OUTSIDE = """slides.flatMap((slide, index) => {
  const shown = slide.querySelector(".shown");
  const inside = [slide, shown, ...slide.querySelectorAll("pre, .formula")];
  const wide = inside.filter((e) => e.scrollWidth > e.clientWidth + 1);
  const cut = [...wide, ...[slide, shown].filter((e) => e.scrollHeight > e.clientHeight + 1)];
  const small = Number(slide.style.getPropertyValue("--fit")) < 0.6;
  return cut.length || small ? [`${index + 1} ${cut.map((e) => e.className || e.tagName)}`] : [];
})"""


def test_the_index_leads_to_every_deck(browser, decks):
    browser.open(decks[0].with_name("index.html"), width=390)
    links = browser.value("[...document.querySelectorAll('a')].map(a => a.getAttribute('href'))")
    assert links == [deck.name for deck in decks] and browser.problems == []
    assert browser.value("document.documentElement.scrollWidth") <= 390


@pytest.mark.parametrize("size", [(1280, 720), (1024, 768)], ids=["16:9", "4:3"])
def test_every_slide_of_every_lesson_shows_all_of_itself(browser, decks, size):
    assert len(decks) == len(LESSONS)
    for page in decks:
        browser.open(page, width=size[0], height=size[1])
        assert browser.problems == [] and browser.requests == [page.resolve().as_uri()]
        assert browser.value(OUTSIDE) == [], page.name
        browser.press("n", "n")
        assert browser.value("document.documentElement.scrollWidth") <= size[0]


def test_what_is_too_much_for_a_slide_is_seen(browser, tmp_path):
    path = tmp_path / "00_long.ipynb"
    code = "\n".join(f"line_{number} = {number}" for number in range(80))
    nbformat.write(lesson(new_markdown_cell(f"## Topic\n\n```python\n{code}\n```")), path)
    file, _ = write_deck(path, None, tmp_path)
    browser.open(file)
    assert len(browser.value(OUTSIDE)) == 1


def test_keys_turn_the_slides_and_show_the_notes(browser, decks):
    browser.open(decks[0])
    state = "[now, document.querySelectorAll('.slide.current').length, document.querySelector('progress').value]"
    count = browser.value("slides.length")
    for key, place in {
        "ArrowRight": 1,
        "PageDown": 2,
        "ArrowLeft": 1,
        "End": count - 1,
        "ArrowDown": count - 1,
    }.items():
        browser.press(key)
        assert browser.value(state) == [place, 1, place + 1], key
    browser.press("Home")
    notes = "[...document.querySelectorAll('aside')].filter(e => e.offsetHeight).map(e => notes.indexOf(e))"
    assert browser.value(state) == [0, 1, 1] and browser.value(notes) == []
    browser.press("n", "n")
    browser.press("ArrowRight")
    assert browser.value(notes) == [1], "the notes of this slide alone"
    browser.press("n", "n")
    assert browser.value(notes) == []
    browser.open(decks[0], "#5")
    assert browser.value("now") == 4


def test_a_deck_is_printed_one_slide_a_page(browser, decks):
    program = find_chromium()
    assert program is not None
    pdf = print_pdf(program, decks[0]).read_bytes()
    browser.open(decks[0])
    assert len(re.findall(rb"/Type\s*/Page\b", pdf)) == browser.value("slides.length")
    assert set(re.findall(rb"/MediaBox\s*\[([^\]]*)\]", pdf)) == {b"0 0 960 540"}


def test_notes_that_are_shown_are_printed_behind_each_slide(browser, decks):
    def pages():
        printed = browser.call("Page.printToPDF", preferCSSPageSize=True, printBackground=True)["data"]
        return len(re.findall(rb"/Type\s*/Page\b", base64.b64decode(printed)))

    browser.open(decks[0])
    slides, notes = browser.value("[slides.length, notes.filter(e => e.textContent.trim()).length]")
    assert pages() == slides
    browser.press("n", "n")
    assert pages() >= slides + notes
    browser.press("n", "n")
