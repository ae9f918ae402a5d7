"""The command `cadam`, outside the package: importing that takes seconds, in which Ctrl-C is to be understood too."""

from __future__ import annotations

import os
import signal
from types import FrameType


def main() -> int:
    usual = signal.getsignal(signal.SIGINT)
    if usual is signal.default_int_handler:
        signal.signal(signal.SIGINT, _leave)
    from cadam import cli

    signal.signal(signal.SIGINT, usual)
    return cli.main()


def _leave(number: int, frame: FrameType | None) -> None:
    """End at once: compiled code that is being imported may swallow an exception."""
    os.write(2, b"cadam: interrupted before anything was done\n")
    os._exit(130)
