"""WORKSHOP.md: its plans add up, name parts that are there, and give each part the minutes that are estimated."""

import re
import subprocess
import sys
from pathlib import Path

import nbformat
import pytest

from kimivl_lab.lessons.minutes import part_minutes

NOTEBOOKS = Path(__file__).resolve().parents[1] / "notebooks"
TEXT = (NOTEBOOKS / "WORKSHOP.md").read_text()
SECTIONS = dict(re.findall(r"^## (.*)\n((?:(?!## ).*\n)*)", TEXT, re.MULTILINE))
LESSONS = {path.stem[:2]: path for path in NOTEBOOKS.glob("[0-9]*.ipynb")}
PLANS = [title for title in SECTIONS if title.endswith("minutes")]
NAME = re.compile(r"`([a-z_]+)`")


def rows(section):
    lines = [line for line in SECTIONS[section].splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[2:]]


def code(lesson):
    cells = nbformat.read(LESSONS[lesson], as_version=4).cells
    return "\n".join(cell.source for cell in cells if cell.cell_type == "code")


def test_there_are_two_plans():
    assert len(PLANS) == 2


@pytest.mark.parametrize("plan", PLANS)
def test_the_minutes_of_a_plan_add_up_to_its_title(plan):
    at = 0
    for start, minutes, *_ in rows(plan):
        assert start == f"{at // 60}:{at % 60:02d}"
        at += int(minutes)
    assert at == int(re.findall(r"(\d+) minutes$", plan)[0])


@pytest.mark.parametrize("plan", PLANS)
def test_parts_are_in_the_lesson_in_this_order_and_take_the_minutes_of_their_line(plan):
    last = {}
    for _, minutes, lesson, parts, words in rows(plan):
        if not lesson:
            continue
        ((number, target),) = re.findall(r"^\[(\d\d)\]\((.*)\)$", lesson)
        assert target == LESSONS[number].name
        estimates = part_minutes(LESSONS[number])
        for part in parts.split("<br>"):
            place = list(estimates).index(part)
            assert place > last.get(number, 0), part
            last[number] = place
        estimate = sum(estimates[part] for part in parts.split("<br>"))
        assert estimate - 0.5 <= int(minutes) <= estimate + 3, f"{parts}: {minutes} planned, {estimate:.1f} estimated"
        assert [name for name in NAME.findall(words) if name not in code(number)] == []


def test_answers_to_questions_stand_where_it_says():
    questions = rows("Questions to ask, and where the answers are")
    assert len(questions) >= 10
    for question, place in questions:
        assert question.endswith((".", "?"))
        lesson, part = place.split(": ", 1)
        assert part in part_minutes(LESSONS[lesson]), place


def test_the_places_where_people_get_stuck_are_in_the_lessons():
    for where, *_ in rows("Where people get stuck, and what to say"):
        lesson = where[:2]
        assert lesson in LESSONS or where == "everywhere"
        assert [name for name in NAME.findall(where) if f"def {name}(" not in code(lesson)] == []


def test_links_and_make_commands_exist():
    for target in re.findall(r"\]\((?!https?:)([^)]+)\)", TEXT):
        assert (NOTEBOOKS / target).exists(), target
    targets = re.findall(r"^([.a-z-]+):.*## ", (NOTEBOOKS.parent / "Makefile").read_text(), re.MULTILINE)
    named = re.findall(
        r"^make (?:[A-Z]+=\S+ )?(\.?[a-z-]+)|`(?:[A-Z_]+=\S+ )*make (?:[A-Z]+=\S+ )?(\.?[a-z-]+)", TEXT, re.M
    )
    assert {".venv", "run", "lab"} <= {one or other for one, other in named} <= set(targets)


def test_the_check_of_a_laptop_runs_as_written():
    (module,) = re.findall(r"^\.venv/bin/python -m (kimivl_lab\S+)", TEXT, re.MULTILINE)
    done = subprocess.run([sys.executable, "-m", module], cwd=NOTEBOOKS.parent, capture_output=True, text=True)
    assert done.returncode == 0 and done.stderr == ""
    lines = done.stdout.splitlines()
    assert lines[-1] == "ready" or any(line.startswith("FAIL") for line in lines)
