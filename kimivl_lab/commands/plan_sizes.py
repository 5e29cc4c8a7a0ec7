"""Where the image sizes of a plan come from: a CSV file, a folder of pictures, or a workload of this repository."""

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from ..datasets import load_sizes
from ..planner.workload import Size, read_sizes


def plan_sizes(
    *,
    csv_file: Path | None = None,
    folder: Path | None = None,
    workload: str | None = None,
    in_token_limit: int,
    track: Callable[[Sequence[Path]], Iterable[Path]] = iter,
) -> tuple[str, Sequence[Size], list[str]]:
    """A name, the image sizes of one of the three sources, and one line for each row or picture that is left out:
    which, and why.

    Args:
        track: wraps the paths of pictures while they are read (progress).

    Raises:
        ValueError: a file that is no CSV, a folder without pictures, an unknown workload.
        OSError: it cannot be read.
    """
    if workload is not None:
        return workload, load_sizes(workload), []
    sizes: Sequence[Size]
    if csv_file is not None:
        source = csv_file
        sizes, faults = read_sizes(csv_file, in_token_limit)
    else:
        from ..images.files import picture_sizes
        from .encode import picture_paths

        assert folder is not None
        source = folder
        sizes, faults = picture_sizes(track(list(picture_paths([folder]))), in_token_limit)
    return source.resolve().name, sizes, faults
