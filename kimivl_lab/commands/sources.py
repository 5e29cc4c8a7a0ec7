"""The image sizes that `plan` and `advise` work on: from a CSV file, a log, a folder of images, or a kept workload.

Test: tests/test_plan.py, tests/test_advise.py, tests/test_faults_commands.py.
"""

import argparse
from collections import Counter
from collections.abc import Callable, Generator, Iterable, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from ..datasets import load_sizes
from ..images.files import find_images, image_sizes, readable_name
from ..planner.traffic_log import read_log
from ..planner.workload import Size, TokenCounts, count_tokens, read_sizes
from .output import CommandError, on_one_line, tell

SHOWN_FAULTS = 20  # of the lines or images that are left out; the others are counted


@dataclass
class Sizes:
    """Image sizes under the name of their source; of a log also how many images its lines have."""

    name: str
    sizes: Sequence[Size]
    workload: TokenCounts
    images_in_a_line: Counter[int] = field(default_factory=Counter)

    @property
    def summary(self) -> list[str]:
        """What the source holds, in one line, and of a log a second one."""
        least, most = self.workload.tokens[0], self.workload.tokens[-1]
        lines = [
            f"{on_one_line(self.name)}: {self.workload.images:,} images, "
            f"{least:,} to {most:,} merged tokens, mean {self.workload.mean:,.0f}"
        ]
        if total := self.images_in_a_line.total():
            shares = (f"{images} in {count / total:.0%}" for images, count in sorted(self.images_in_a_line.items())[:8])
            lines.append(f"images in a line of the log that has some: {', '.join(shares)}")
        return lines


def read_source(arguments: argparse.Namespace, track: Callable[[Sequence[Path]], Iterable[Path]]) -> Sizes:
    """The sizes that the arguments name. What is left out is told on stderr; CommandError if nothing remains."""
    if arguments.recursive and arguments.images is None:
        raise CommandError("--recursive needs --images")
    limit, images_in_a_line, faults = arguments.in_token_limit, Counter[int](), []
    sizes: Sequence[Size]
    if arguments.workload is not None:
        name, sizes = arguments.workload, load_sizes(arguments.workload)
    elif arguments.sizes is not None:
        name = readable_name(arguments.sizes.resolve().name)
        sizes, faults = read_sizes(arguments.sizes, limit)
    elif arguments.log is not None:
        name, found = readable_name(arguments.log.resolve().name), read_log(arguments.log, limit)
        sizes, faults, images_in_a_line = found.sizes, found.faults, found.images_in_a_line
        if none := found.lines - images_in_a_line.total():
            tell("note", f"{none:,} of {found.lines:,} lines have no image that is used")
    else:
        name, files = (
            readable_name(arguments.images.resolve().name),
            find_images([arguments.images], arguments.recursive),
        )
        if files.left_out:
            tell("note", f"left out: {files}")
        sizes, faults, notes = image_sizes(track([path for _, path in files.files]), limit)
        tell("warning", *notes)
    tell("error", *(f"skipped {fault}" for fault in faults[:SHOWN_FAULTS]))
    if len(faults) > SHOWN_FAULTS:
        tell("error", f"skipped {len(faults) - SHOWN_FAULTS:,} more")
    if not sizes:
        raise CommandError(f"{name}: no image size could be used")
    return Sizes(name, sizes, count_tokens(sizes, limit), images_in_a_line)


@contextmanager
def failures_as_messages() -> Generator[None]:
    """Turns what a user can mend into a `CommandError`: a bad value, a file that cannot be read."""
    try:
        yield
    except ValueError as error:
        raise CommandError(str(error)) from error
    except OSError as error:
        named = error.filename and error.strerror
        raise CommandError(f"{error.filename}: {error.strerror}" if named else str(error)) from error
