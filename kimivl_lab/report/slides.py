"""Slides of a lesson, made from the cells of its notebook, with the text and the solutions as speaker notes.

    python -m kimivl_lab.report.slides [--only '60_*'] [--out DIR] [--pdf]

One deck is one HTML file, which needs no network. Each figure, each guess and each blank of the lesson becomes a slide;
of the text, formulas, tables, lists, and the sentences with words in bold do. The notes hold the whole text, and the
answers of the solutions. Keys: arrows turn, N shows the notes, F fills the screen. `index.html` lists the decks.

Test: tests/test_slides.py.
"""

import argparse
import fnmatch
import html
import math
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import nbformat
from nbconvert.filters import markdown2html
from nbformat import NotebookNode

from ..datasets import repository_root
from .chromium import find_chromium, headless
from .contents import pictures
from .page import render, with_mathml

WORDS = 75  # of one slide's text; more make a second slide
_SKIPPED = ("Versions and machine", "References")
_TASK = re.compile(r"\*\*(Your [^*]*?)\.?\*\*\s*")
_READING = "*How to read it:*"


@dataclass
class Slide:
    """One slide: its section, its title, what it shows as HTML, and the speaker notes as paragraphs of markdown."""

    section: str
    title: str
    html: str
    kind: str = "text"  # or "first", "picture", "task", "result"
    notes: list[str] = field(default_factory=list)


@dataclass
class _Section:
    """A heading and what stands below it: paragraphs of markdown, and code cells."""

    over: str  # the heading of the second level above it
    title: str
    blocks: list[str | NotebookNode]

    @property
    def texts(self) -> list[str]:
        return [block for block in self.blocks if isinstance(block, str)]


def deck(notebook: NotebookNode, solution: NotebookNode | None = None) -> list[Slide]:
    """The slides of a lesson."""
    found: list[Slide] = []
    words = {id(output): text for _, output, text in pictures(notebook)}
    for section in _sections(notebook):
        if section.title in _SKIPPED:
            continue
        if not found:
            links = " · "  # of the line that leads to the other lessons
            found.append(Slide("", section.title, "", "first", [text for text in section.texts if links not in text]))
        elif section.title == "The question":
            found[0].html += _html(" ".join(section.texts))
        elif section.title == "Needs":
            found[-1].notes += section.texts
        elif section.title == "Exercises":
            found.append(Slide("", "Exercises", "", notes=section.texts))
        elif section.over == "Exercises":
            found[-1].html += _html(section.title)
            found[-1].notes += [f"**{section.title}**", *section.texts, *_answer_of_exercise(section.title, solution)]
        else:
            found += _slides_of(section, solution, words)
    return found


def _sections(notebook: NotebookNode) -> Iterator[_Section]:
    section = _Section("", "", [])
    for cell in notebook.cells:
        for block in _paragraphs(cell.source) if cell.cell_type == "markdown" else [cell]:
            heading = re.match(r"(#+) +(.+)", block) if isinstance(block, str) else None
            if heading is None:
                section.blocks.append(block)
                continue
            if section.title:
                yield section
            over = heading[2] if len(heading[1]) < 3 else section.over
            section = _Section(over, heading[2], [])
    yield section


def _paragraphs(markdown: str) -> list[str]:
    """Split at empty lines outside fenced code; links become their words."""
    text = re.sub(r"(?<!!)\[([^\]]*)\]\([^)]*\)", r"\1", markdown)
    parts = re.findall(r"(?:```.*?```|[^\n]+(?:\n|$))+", text, re.DOTALL)
    return [part.strip() for part in parts]


# --- one section -----------------------------------------------------------------------------------------------------


def _slides_of(section: _Section, solution: NotebookNode | None, words: dict[int, str]) -> list[Slide]:
    """The slides of one section; text that makes no slide goes into the notes of the slide before it, or after it."""
    found: list[Slide] = []
    run: list[str] = []
    over = section.over if section.over != section.title else ""

    def end_of_text() -> None:
        """Makes slides of the paragraphs since the last slide, if they hold a point."""
        texts, early = list(run), not found
        run.clear()
        pages = _pages(_points(texts))
        if pages:
            new = [Slide(over, section.title, page) for page in pages]
            new[0].notes = texts
            found.extend(new)
        elif early:
            run.extend(texts)  # notes of the slide that follows
        else:
            found[-1].notes += texts

    for place, block in enumerate(section.blocks):
        if isinstance(block, str) and (task := _TASK.match(block)):
            end_of_text()
            cell = next((one for one in section.blocks[place:] if not isinstance(one, str)), None)
            shown = (_starter(cell) if cell else "") or _asked_about(section.blocks[:place])
            shown = _html(block[task.end() :]) + shown
            answer = _answer(cell, solution) if cell else []
            found.append(Slide(section.title, task[1], shown, "task", [*run, *answer]))
            run.clear()
        elif isinstance(block, str) and block.startswith(_READING) and found and found[-1].kind == "picture":
            found[-1].notes.append(block)
        elif isinstance(block, str):
            run.append(block)
        else:
            images = [output for output in block.outputs if "image/png" in output.get("data", {})]
            if images:
                end_of_text()
            for output in images:
                found.append(Slide(over, section.title, _picture(output, words[id(output)]), "picture", list(run)))
                run.clear()
            if "result" in block.metadata.get("tags", []):
                end_of_text()
                printed = " ".join("".join(output.get("text", "") for output in block.outputs).split())
                found.append(Slide(over, section.title, f"<p>{html.escape(printed)}</p>", "result", list(run)))
    end_of_text()
    if run:  # a section of plain sentences; one that ends with a colon leads to a cell, which is not shown
        first = [one for one in _sentences(run[0])[:2] if not one.endswith(":")]
        found.append(Slide(over, section.title, "".join(map(_html, first)), notes=list(run)))
    return found


def _points(texts: Iterable[str]) -> list[str]:
    """What a slide shows of paragraphs: formulas, tables, fenced code, list items, and each sentence with words in bold
    with the sentence before it, to which its "this" may belong."""
    found = []
    for text in texts:
        if re.match(r"\$\$|\||```", text):
            found.append(text)
        elif re.match(r"(-|\d+\.) ", text):
            found += re.split(r"\n(?=(?:-|\d+\.) )", text)
        elif not text.startswith(_READING):
            parts = _sentences(text)
            shown = [
                place for place, one in enumerate(parts) if any("**" in other for other in parts[place : place + 2])
            ]
            if shown:
                found.append(" ".join(parts[place] for place in shown))
    return found


def _sentences(text: str) -> list[str]:
    """The sentences of a paragraph; a lead in bold stays with the sentence that follows."""
    parts = re.split(r"(?<=[.!?])\s+(?=[A-Z`*$(\"])", " ".join(text.split()))
    found: list[str] = []
    for part in parts:
        lead = found and re.fullmatch(r"\*\*[^*]+[.!?:]\*\*", found[-1])
        found = [*found[:-1], f"{found[-1]} {part}"] if lead else [*found, part]
    whole = " ".join(found)
    return found if all(one.count("**") % 2 == 0 for one in found) else [whole]


def _pages(points: Sequence[str]) -> list[str]:
    """The HTML of one slide, or of several with about the same number of words: `WORDS`, where a point allows."""
    lengths = [len(point.split()) for point in points]
    count = math.ceil(sum(lengths) / WORDS)
    pages: list[list[str]] = []
    before = 0
    for point, length in zip(points, lengths, strict=True):
        if not pages or before + length / 2 > sum(lengths) * len(pages) / count:
            pages.append([])
        pages[-1].append(point)
        before += length
    return ["".join(_html(point) for point in page) for page in pages]


# --- tasks and their answers -----------------------------------------------------------------------------------------


def _names(cell: NotebookNode) -> list[str]:
    """What the learner fills in: functions, variables that are None, guesses."""
    return re.findall(r"^(?:def (?=\w+\())?(\w+)(?=\(.*:$| = None\b| = guess\()", cell.source, re.MULTILINE)


def _starter(cell: NotebookNode) -> str:
    """The function to fill in, as code; nothing for a guess."""
    code = cell.source.split("\n\n\n")[0]
    return _html(f"```python\n{code}\n```") if re.search(r"^    .*\.\.\.", code, re.MULTILINE) else ""


def _asked_about(before: Sequence[str | NotebookNode]) -> str:
    """The code that a guess is about: the last cell, where only one paragraph lies between and it is no other task."""
    cells = [block for block in before[-2:] if not isinstance(block, str)]
    if (
        not cells
        or len(cells[-1].source.splitlines()) > 16
        or re.search(r"guess\(|compare\(|check|import ", cells[-1].source)
    ):
        return ""
    return _html(f"```python\n{cells[-1].source}\n```")


def _answer(cell: NotebookNode, solution: NotebookNode | None) -> list[str]:
    """The cells of the solutions that fill in what `cell` leaves open, each with the text above it."""
    found: list[str] = []
    if solution is None:
        return found
    for above, one in zip([None, *solution.cells], solution.cells, strict=False):
        given = [name for name in _names(cell) if re.search(rf"^(?:def )?{name}(?:\(| = )", one.source, re.M)]
        if one.cell_type != "code" or not given:
            continue
        if above is not None and above.cell_type == "markdown":
            found += [part for part in _paragraphs(above.source) if not part.startswith("#")]
        lines = [line for line in one.source.splitlines() if re.match(rf"(?:{'|'.join(given)}) = ", line)]
        code = "\n".join(lines) if lines else one.source
        found.append(f"```python\n{code}\n```")
    return ["**Answer.**", *found] if found else []


def _answer_of_exercise(title: str, solution: NotebookNode | None) -> list[str]:
    """The text and the first code cell below the heading of the same words in the solutions."""
    if solution is None:
        return []
    for section in _sections(solution):
        if section.title == title:
            code = [f"```python\n{one.source}\n```" for one in section.blocks if not isinstance(one, str)]
            return ["**Answer.**", *section.texts, *code]
    return []


# --- HTML ------------------------------------------------------------------------------------------------------------


def _html(markdown: str) -> str:
    return markdown2html(with_mathml(markdown))


def _picture(output: NotebookNode, words: str) -> str:
    png = output.data["image/png"].replace("\n", "")
    return f'<img src="data:image/png;base64,{png}" alt="{html.escape(words)}">'


def write_deck(path: Path, solution: Path | None, folder: Path) -> tuple[Path, list[Slide]]:
    """Writes `<name>.html` of one notebook; its path and slides."""
    answers = nbformat.read(solution, as_version=4) if solution else None
    slides = deck(nbformat.read(path, as_version=4), answers)
    shown = [(slide, "".join(map(_html, slide.notes))) for slide in slides]
    file = folder / f"{path.stem}.html"
    file.write_text(
        render("slides.html.j2", ("slides.css",), "slides.js", number=path.stem[:2], slides=shown), encoding="utf-8"
    )
    return file, slides


def print_pdf(program: str, deck_file: Path) -> Path:
    """The deck as a PDF beside it, one slide a page, printed by Chromium."""
    pdf = deck_file.with_suffix(".pdf")
    with tempfile.TemporaryDirectory() as profile:
        command = [*headless(program, Path(profile)), "--no-pdf-header-footer", f"--print-to-pdf={pdf}"]
        subprocess.run([*command, deck_file.resolve().as_uri()], check=True, capture_output=True, timeout=120)
    return pdf


def main(argv: Sequence[str] | None = None) -> int:
    """0, or 2 when no notebook was asked for."""
    parser = argparse.ArgumentParser(
        prog="python -m kimivl_lab.report.slides", description=(__doc__ or "").split("\n")[0]
    )
    parser.add_argument("--out", type=Path, default=Path("build") / "slides", metavar="DIR")
    parser.add_argument("--only", default="*", metavar="GLOB", help="notebooks to show, such as '10_*' (default: all)")
    parser.add_argument("--pdf", action="store_true", help="print each deck to a PDF too, where Chromium is installed")
    parser.add_argument("--notebooks", type=Path, default=repository_root() / "notebooks", metavar="DIR")
    options = parser.parse_args(argv)
    found = sorted(options.notebooks.glob("*.ipynb"))
    paths = [path for path in found if fnmatch.fnmatch(path.stem, options.only)]
    if not paths:
        names = ", ".join(path.stem for path in found) or "none"
        print(f"no notebook is called {options.only!r}; {options.notebooks} holds: {names}", file=sys.stderr)
        return 2
    options.out.mkdir(parents=True, exist_ok=True)
    program = find_chromium() if options.pdf else None
    if options.pdf and program is None:
        print("no PDF: Chromium is not installed; a browser prints each deck")
    decks = []
    for path in paths:
        solution = path.parent / "solutions" / f"{path.stem}__SOLUTION.ipynb"
        file, slides = write_deck(path, solution if solution.exists() else None, options.out)
        pdf = f", {print_pdf(program, file).name}" if program else ""
        print(f"{file}{pdf}: {len(slides)} slides")
        decks.append((path.stem, slides[0].title, len(slides), program is not None))
    index = options.out / "index.html"
    index.write_text(render("decks.html.j2", ("style.css",), "slides.js", decks=decks), encoding="utf-8")
    print(index)
    return 0


if __name__ == "__main__":
    sys.exit(main())
