"""Prints results to stdout and messages to stderr, so that no output can end a command in a traceback.

A closed pipe ends the output quietly, another failure (a full disk) is one line, and characters that the terminal
cannot show are replaced.

Test: tests/test_faults_commands.py.
"""

import contextlib
import os
import re
import sys
from typing import TYPE_CHECKING, TextIO

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.progress import Progress

MOST_CHARACTERS = 1000  # of one message
_LONG_WORD = re.compile(r"\S{301,}")  # a name in a message; longer than any name of a file, so it is no name


class CommandError(Exception):
    """A failure that the user can mend; its message becomes one line on stderr, and the exit status 2."""


def show(*blocks: "RenderableType", plain: bool = False, end: str = "\n") -> None:
    """Prints texts and tables to stdout.

    Args:
        plain: print texts exactly as they are, without the terminal's width and without importing rich.
        end: what follows each text that is printed plain.

    Raises:
        CommandError: stdout cannot be written. A closed pipe is no error: nothing more is printed.
    """
    text = "".join(f"{block}{end}" for block in blocks) if plain else _rendered(blocks)
    try:
        _write(sys.stdout, text)
    except BrokenPipeError:
        _silence(sys.stdout)
    except OSError as error:
        _silence(sys.stdout)
        raise CommandError(f"cannot write to stdout: {error.strerror or error}") from error


def tell(kind: str, *messages: str) -> None:
    """Prints a short line to stderr for each message, `kimivl-lab: KIND: message`, where stderr can be written."""
    try:
        for message in messages:
            _write(sys.stderr, f"kimivl-lab: {kind}: {shortened(on_one_line(message))}\n")
    except OSError:
        _silence(sys.stderr)


def shortened(message: str) -> str:
    """A message without its longest parts, such as an image in base64 that was given as a path."""
    message = _LONG_WORD.sub(lambda word: _cut(word.group(), 100), message)
    return message if len(message) <= MOST_CHARACTERS else _cut(message, MOST_CHARACTERS)


def on_one_line(text: str) -> str:
    """A text without line ends and without characters that would move the cursor or hide text on a terminal."""
    text = " ".join(line.strip() for line in text.splitlines())
    text = os.fsencode(text).decode("utf-8", "backslashreplace")  # names of files may be any bytes
    return "".join(one if one.isprintable() else one.encode("unicode_escape").decode() for one in text)


def progress_bar() -> "Progress":
    """A progress bar on stderr, which shows nothing where stderr is no terminal."""
    from rich.console import Console
    from rich.progress import Progress

    on_terminal = sys.stderr is not None and sys.stderr.isatty()
    return Progress(console=Console(stderr=True), transient=True, disable=not on_terminal)


def _cut(text: str, length: int) -> str:
    return f"{text[: length - 20]}...{text[-20:]} ({len(text):,} characters)"


def _rendered(blocks: tuple["RenderableType", ...]) -> str:
    from rich.console import Console

    # Names of files are printed as they are: [red] and :smile: in them are no markup.
    console = Console(markup=False, emoji=False, highlight=False)
    with console.capture() as captured:
        for block in blocks:
            # A text is not wrapped: what is to be pasted into a shell must stay one line.
            console.print(block, soft_wrap=isinstance(block, str))
    return captured.get()


def _write(stream: TextIO | None, text: str) -> None:
    if stream is None:  # closed before Python started: `kimivl-lab info >&-`
        return
    encoding = stream.encoding or "utf-8"
    stream.write(text.encode(encoding, "replace").decode(encoding))  # "?" for what this terminal cannot show
    stream.flush()  # here, where a failure is caught, and not when Python ends


def _silence(stream: TextIO) -> None:
    """Sends the stream to the null device: Python would print an error if it could not flush the stream at its end."""
    with contextlib.suppress(OSError), open(os.devnull, "w", encoding="utf-8") as null:
        os.dup2(null.fileno(), stream.fileno())
