"""With which codes commands end, and how one ends that nobody reads. What they mean in detail, each command says."""

from __future__ import annotations

import os
import sys

DONE = 0
FAILED = 1
USAGE = 2
"""Invalid usage."""
NO_DATA = 3
"""Data, or a device, is missing."""
NOTHING = 4
"""There is nothing to report yet."""
NO_PACKAGE = 5
INTERRUPTED = 130
"""As shells say it of SIGINT."""
UNREAD = 141
"""As shells say it of SIGPIPE: whoever read the output has closed it."""


def stop_printing() -> None:
    """Whatever is printed from now on goes nowhere: else Python complains of a closed pipe again when it ends."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, sys.stdout.fileno())
    os.close(nowhere)
