"""Stopping a learner with SIGTERM or SIGINT."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Protocol


class Stoppable(Protocol):
    """An object that can be asked to stop, such as a `Learner`."""

    def stop(self) -> None:
        """Ask the object to stop. It is called from a signal handler."""


@contextmanager
def stop_on_signals(learner: Stoppable) -> Iterator[None]:
    """Stop a learner after its current batch when the process receives SIGTERM or SIGINT.

    A second signal has its usual effect, so that a learner that hangs can still be interrupted.

    Args:
        learner: the learner, whose `stop` is called.

    Example:
        ```python
        with stop_on_signals(learner):
            learner.run(source)
        ```
    """
    handlers = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}

    def restore() -> None:
        for number, handler in handlers.items():
            signal.signal(number, handler)

    def stop(number: int, frame: FrameType | None) -> None:
        restore()
        learner.stop()
        # os.write instead of print, because the signal may have interrupted a print.
        os.write(2, f"\n{signal.Signals(number).name}: finishing the batch\n".encode())

    for number in handlers:
        signal.signal(number, stop)
    try:
        yield
    finally:
        restore()
