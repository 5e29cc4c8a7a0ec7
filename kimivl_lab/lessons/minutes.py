"""How long a notebook takes: a person, and the machine that executed it.

A person: 150 words or 8 lines of code a minute, and 8 minutes an exercise. The machine: `kimivl_lab.report.refresh`
writes the seconds of each execution into the notebook, and `minutes_cpu` of its text must agree with them.
`python -m kimivl_lab.lessons.minutes` prints the README's table of notebooks.

Test: tests/test_readme.py, tests/test_workshop.py, tests/test_refresh.py.
"""

import re
from pathlib import Path

import nbformat

from ..datasets import repository_root
from .course import LINKS, lessons, title

WORDS_A_MINUTE = 150
LINES_A_MINUTE = 8
MINUTES_AN_EXERCISE = 8
ROUNDED_TO = 5  # minutes
MINUTES_A_BLANK = 5  # in a group: code or an answer in the middle of a lesson
MINUTES_A_GUESS = 1
MACHINE_NOISE = 1.25  # the same notebook took up to so many times as long on another day
_EXERCISE = re.compile(r"^### \d+\.", re.MULTILINE)
_HEADING = re.compile(r"#{2,3} (.*)")
_NUMBERED = re.compile(r"\d+\. ")  # the heading of an exercise
_GUESS, _BLANK = re.compile(r"\bguess\("), re.compile(r"\bcheck(?:_function)?\(")


def human_minutes(notebook: Path) -> int:
    """Minutes to read `notebook` and do its exercises, rounded up to a multiple of 5; its lines of links are not read.

    1,500 words, 160 lines of code and 5 exercises give 10 + 20 + 40 = 70.
    """
    cells = nbformat.read(notebook, as_version=4).cells
    prose = LINKS.sub("", "\n".join(cell.source for cell in cells if cell.cell_type == "markdown"))
    lines = sum(bool(line.strip()) for cell in cells if cell.cell_type == "code" for line in cell.source.splitlines())
    exercises = len(_EXERCISE.findall(prose.partition("## Exercises")[2]))
    minutes = len(prose.split()) / WORDS_A_MINUTE + lines / LINES_A_MINUTE + exercises * MINUTES_AN_EXERCISE
    return -int(-minutes // ROUNDED_TO) * ROUNDED_TO


def part_minutes(notebook: Path) -> dict[str, float]:
    """Minutes of a group for each part of `notebook`, from one heading of level 2 or 3 to the next.

    The time to read, and 1 minute for a guess, 5 for a blank, 8 for an exercise. Example: 300 words, 16 lines of code
    and one blank take 2 + 2 + 5 = 9 minutes.
    """
    parts, heading = {"": 0.0}, ""
    for cell in nbformat.read(notebook, as_version=4).cells:
        if cell.cell_type == "code":
            lines = sum(bool(line.strip()) for line in cell.source.splitlines())
            parts[heading] += lines / LINES_A_MINUTE + len(_GUESS.findall(cell.source)) * MINUTES_A_GUESS
            parts[heading] += 0 if _NUMBERED.match(heading) else len(_BLANK.findall(cell.source)) * MINUTES_A_BLANK
        elif cell.cell_type == "markdown":
            for line in cell.source.splitlines():
                if title := _HEADING.match(line):
                    heading = title[1]
                    parts[heading] = MINUTES_AN_EXERCISE if _NUMBERED.match(heading) else 0
                parts[heading] += len(line.split()) / WORDS_A_MINUTE
    return parts


def machine_minutes(seconds: float) -> range:
    """The whole minutes that a notebook of `seconds` may claim: rounded up, for all times that noise would make of it.

    50 s give range(1, 3): 40 s to 62.5 s are 1 or 2 minutes.
    """
    least, most = (-int(-one // 60) for one in (seconds / MACHINE_NOISE, seconds * MACHINE_NOISE))
    return range(max(1, least), max(1, most) + 1)


def table_rows() -> list[list[str]]:
    """The README's lines: link, question, minutes to do, minutes to run, GPU."""
    rows = []
    for path in sorted((repository_root() / "notebooks").glob("*.ipynb")):
        needs = nbformat.read(path, as_version=4).metadata["kimivl_lab"]
        link = f"[{path.stem}](notebooks/{path.name})"
        rows.append([link, needs["question"], str(human_minutes(path)), str(needs["minutes_cpu"]), needs["gpu"]])
    return rows


def course_map() -> str:
    """A markdown table of the lessons and pages, with links that work inside the folder of the notebooks."""
    lines = {row[0]: f"{row[1]} | {row[2]} | {row[3]}" for row in table_rows()}
    table = ["| lesson | question | minutes to do | minutes to run |", "|---|---|---|---|"]
    for path in lessons(repository_root() / "notebooks"):
        words = lines.get(f"[{path.stem}](notebooks/{path.name})", f"{title(path)[3:]}, a page to look things up | |")
        table.append(f"| [{path.stem}]({path.name}) | {words} |")
    return "\n".join(table)


if __name__ == "__main__":
    for row in table_rows():
        print(f"| {' | '.join(row)} |")
