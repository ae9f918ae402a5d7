"""Exit codes of the commands, and the handling of errors, signals and unusable output streams."""

from __future__ import annotations

import errno
import io
import os
import select
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import NoReturn

from ..printable import printable

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
TERMINATED = 143
"""The process was ended by SIGTERM. While it learns, `cadam run` saves a checkpoint and exits with 0 instead."""

DISK_IS_FULL = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})
"""Error numbers of writes to a full disk, beyond a quota, and beyond the size that a file may have (`ulimit -f`)."""


def fail(command: str, error: object, code: int) -> int:
    """Print an error of a command to standard error and return the exit code.

    The notes of an exception are texts of the program and are printed with their line breaks. Its message may contain
    text from data, so control characters and line breaks in it are escaped.

    Raises:
        BrokenPipeError: if this is the error, because the reader of standard output has closed it. Commands catch
            OSError for their own files; `cadam.cli.main` handles the closed output of all commands.
    """
    if isinstance(error, BrokenPipeError) and is_stdout_closed():
        raise error
    print(printable(f"cadam {command}: {error}"), *getattr(error, "__notes__", ()), sep="\n", file=sys.stderr)
    return code


# Signals ---------------------------------------------------------------------------------------------------------


class TerminatedError(KeyboardInterrupt):
    """The process received SIGTERM. Commands handle it as they handle Ctrl-C, and end with `TERMINATED`."""


def interrupt_code(error: KeyboardInterrupt) -> int:
    """Return the exit code of a command that was interrupted by SIGINT or SIGTERM."""
    return TERMINATED if isinstance(error, TerminatedError) else INTERRUPTED


@contextmanager
def raise_on_sigterm() -> Iterator[None]:
    """Raise TerminatedError when the process receives SIGTERM, so that commands can clean up.

    A further SIGTERM ends the process at once. Nothing changes if SIGTERM is ignored or already handled.
    """
    is_main = threading.current_thread() is threading.main_thread()
    if not is_main or signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL:
        yield
        return

    def terminate(number: int, frame: FrameType | None) -> NoReturn:
        signal.signal(number, signal.SIG_DFL)
        raise TerminatedError

    signal.signal(signal.SIGTERM, terminate)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


# Output streams --------------------------------------------------------------------------------------------------


def prepare_output() -> None:
    """Make standard output and standard error accept any text.

    Characters that the encoding of a stream does not have are escaped. A stream that the caller has closed is replaced
    by the null device, which also keeps other files from getting its file descriptor.
    """
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is None:
            setattr(sys, name, open(os.devnull, "w", encoding="utf-8"))  # noqa: SIM115
        elif isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


def is_stdout_closed() -> bool:
    """Whether standard output is a pipe that its reader has closed."""
    try:
        number = sys.stdout.fileno()
    except (OSError, ValueError):
        return False  # stdout was replaced by an object without a file descriptor
    poll = select.poll()
    poll.register(number, 0)
    return any(event & (select.POLLERR | select.POLLHUP) for _, event in poll.poll(0))


def stop_printing() -> None:
    """Redirect standard output to the null device.

    Without this, Python would report the failed output again when it flushes standard output at exit.
    """
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, sys.stdout.fileno())
    os.close(null)
