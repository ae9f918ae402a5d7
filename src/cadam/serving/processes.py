"""Functions that all processes of a service share."""

from __future__ import annotations

import logging
import os
import signal
import sys
import threading
from collections.abc import Callable

from ..printable import escape_log_record


def prepare_process(name: str) -> None:
    """Set up logging, and ignore Ctrl-C, which the supervisor handles for all processes."""
    logging.basicConfig(stream=sys.stderr, format=f"{name}: %(message)s", level=logging.WARNING)
    for logger in ("cadam.online", "cadam.serving"):
        logging.getLogger(logger).setLevel(logging.INFO)
    for handler in logging.getLogger().handlers:
        handler.addFilter(escape_log_record)
    signal.signal(signal.SIGINT, signal.SIG_IGN)


def watch_parent(end: Callable[[], None]) -> None:
    """Call a function in another thread when standard input is closed, because the supervisor has ended."""

    def wait() -> None:
        while os.read(0, 1024):
            pass
        end()

    threading.Thread(target=wait, name="parent", daemon=True).start()
