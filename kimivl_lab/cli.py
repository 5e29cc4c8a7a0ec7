"""`python -m kimivl_lab.cli`: the command line, from `kimivl_lab.commands.main`."""

import sys

from .commands.main import main

__all__ = ["main"]

if __name__ == "__main__":
    sys.exit(main())
