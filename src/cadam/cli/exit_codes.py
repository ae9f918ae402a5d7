"""Exit codes of the commands, the report of errors, and how printing stops when the output is closed."""

from __future__ import annotations

import os
import sys

DONE = 0
FAILED = 1
USAGE = 2
"""The command line is invalid."""
NO_DATA = 3
"""Data or a device is missing."""
NOTHING = 4
"""There are no results to report yet."""
NO_PACKAGE = 5
"""A Python package is missing."""
INTERRUPTED = 130
"""The process received SIGINT. Shells report 128 plus the number of the signal."""
UNREAD = 141
"""The reader of standard output has closed it. Shells report this code for SIGPIPE."""


def fail(command: str, error: object, code: int) -> int:
    """Print an error of a command to standard error and return the exit code."""
    print(f"cadam {command}: {error}", file=sys.stderr)
    return code


def stop_printing() -> None:
    """Redirect standard output to the null device.

    Without this, Python would report the closed pipe again when it flushes standard output at exit.
    """
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, sys.stdout.fileno())
    os.close(null)
