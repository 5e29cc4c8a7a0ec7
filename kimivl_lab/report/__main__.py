"""`python -m kimivl_lab.report`: executes the notebooks on this machine and writes build/report/index.html.

With `--saved` nothing is executed: the pages show the outputs that the notebooks were saved with.
"""

import argparse
import fnmatch
import sys
from collections.abc import Sequence
from pathlib import Path

import nbformat
from nbformat import NotebookNode
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from ..datasets import repository_root
from .contents import contents
from .execution import execute, fingerprint, saved_execution
from .ladder import ladder_picture
from .page import Card, Page, notebook_page, text_page, write_pages
from .results import results


def main(argv: Sequence[str] | None = None) -> int:
    """0 when every cell of every notebook ran, 1 when one failed, 2 when no notebook was asked for."""
    arguments = _parser().parse_args(argv)
    console = Console(highlight=False)
    found = sorted(arguments.notebooks.glob("*.ipynb"))
    paths = [path for path in found if fnmatch.fnmatch(path.stem, arguments.only)]
    if not paths:
        names = ", ".join(path.stem for path in found) or "none"
        console.print(f"no notebook is called {arguments.only!r}; {arguments.notebooks} holds: {names}", style="red")
        return 2
    (arguments.out / "notebooks").mkdir(parents=True, exist_ok=True)
    texts = sorted(arguments.notebooks.glob("*.md"))
    solutions = [path.parent / "solutions" / f"{path.stem}__SOLUTION.ipynb" for path in paths]
    solutions = [path for path in solutions if path.exists()]
    names = {path.resolve(): path.stem for path in (*paths, *texts, *solutions)}
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TextColumn("cells"))
    quiet = not console.is_terminal
    with Progress(*columns, TimeElapsedColumn(), console=console, transient=True, disable=quiet) as progress:
        pages = [_lesson(path, paths, names, arguments, progress) for path in paths]
    failed = any(page.card and page.card.execution and page.card.execution.error for page in pages)
    pages += [text_page(path, names, arguments.out) for path in texts]
    pages += [notebook_page(path, nbformat.read(path, as_version=4), names, arguments.out) for path in solutions]
    index = write_pages(pages, ladder_picture(), results(), arguments.out)
    console.print(f"report: {index}", soft_wrap=True)
    return 1 if failed else 0


def _lesson(
    path: Path, paths: list[Path], names: dict[Path, str], arguments: argparse.Namespace, progress: Progress
) -> Page:
    """The page of one notebook of `paths`, as saved or as executed here."""
    if arguments.saved:
        notebook = nbformat.read(path, as_version=4)
        card = Card(path.stem, contents(notebook))
    else:
        notebook, card = _run(path, paths, arguments, progress)
    return notebook_page(path, notebook, names, arguments.out, card)


def _run(path: Path, paths: list[Path], arguments: argparse.Namespace, progress: Progress) -> tuple[NotebookNode, Card]:
    """One notebook of `paths`: its kept execution when nothing has changed, else a new one."""
    label = f"{paths.index(path) + 1}/{len(paths)} {path.stem}"
    saved, key = arguments.out / "notebooks" / path.name, fingerprint(path)
    kept = None if arguments.force else saved_execution(saved, key)
    if kept:
        notebook, execution = kept
        outcome = f"cached, measured at {execution.date}"
    else:
        task = progress.add_task(label, total=len(nbformat.read(path, as_version=4).cells))
        notebook, execution = execute(
            path, key, timeout=arguments.timeout, on_cell=lambda index: progress.update(task, completed=index + 1)
        )
        progress.remove_task(task)
        nbformat.write(notebook, saved)
        outcome = f"FAILED, {execution.error}" if execution.error else f"every cell ran, {execution.seconds} s"
    progress.console.print(f"{label}: {outcome}", markup=False, soft_wrap=True)
    return notebook, Card(path.stem, contents(notebook), execution, cached=kept is not None)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m kimivl_lab.report", description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("build") / "report", metavar="DIR")
    parser.add_argument("--only", default="*", metavar="GLOB", help="notebooks to show, such as '10_*' (default: all)")
    parser.add_argument("--force", action="store_true", help="execute notebooks that have not changed as well")
    parser.add_argument("--saved", action="store_true", help="execute nothing: show the outputs saved in the notebooks")
    parser.add_argument("--timeout", type=int, default=600, metavar="S", help="seconds a cell may take (default: 600)")
    parser.add_argument("--notebooks", type=Path, default=repository_root() / "notebooks", metavar="DIR")
    return parser


if __name__ == "__main__":
    sys.exit(main())
