"""Loading a checkpoint's folder for a command: quiet, and any failure becomes one line.

Test: tests/test_cli.py, tests/test_chat_command.py.
"""

import os
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

import torch
from transformers.utils import logging

from .output import CommandError


def device_of(name: str) -> torch.device:
    """The device of `--device`. CommandError for "cuda" where torch finds no GPU."""
    if name == "cuda" and not torch.cuda.is_available():
        raise CommandError("--device cuda: torch finds no CUDA device here")
    return torch.device("cuda" if name != "cpu" and torch.cuda.is_available() else "cpu")


@contextmanager
def loading(folder: Path, progress: bool = False) -> Generator[None]:
    """Silences transformers while something is loaded from `folder`; what it raises becomes a CommandError.

    Args:
        progress: leave its progress bar on.
    """
    if not os.path.isfile(folder / "config.json"):  # unlike Path.is_file, False for a name that is too long
        raise CommandError(f"--checkpoint {folder}: no config.json there")
    verbosity, shown = logging.get_verbosity(), logging.is_progress_bar_enabled()
    if not progress:
        logging.disable_progress_bar()
    logging.set_verbosity_error()  # its report would list what this model does not use of the checkpoint
    try:
        yield
    except Exception as error:  # damaged files make transformers raise almost anything
        named = "" if str(folder) in str(error) else f"{folder}: "
        raise CommandError(f"--checkpoint {named}{error}") from error
    finally:
        logging.set_verbosity(verbosity)
        if shown:
            logging.enable_progress_bar()
