"""Computing the items of an iterator in a second thread, before they are requested."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import suppress
from dataclasses import dataclass
from queue import Empty, Queue
from threading import Event, Thread
from typing import TypeVar

Item = TypeVar("Item")


@dataclass(frozen=True)
class _End:
    """The end of an iterator, and the error that ended it."""

    error: BaseException | None = None


def prefetch(items: Generator[Item], ahead: int = 1) -> Generator[Item]:
    """Yield the items of a generator, which a second thread computes while the consumer uses the earlier ones.

    The generator must depend on nothing that the consumer changes. In this way a source can read and convert ahead and
    still know its position, which it advances as the items are consumed. Neither thread waits actively. If no thread
    can be started, the items are computed when they are requested.

    Args:
        items: The generator. It is closed in the second thread when the consumer stops early.
        ahead: The number of finished items that wait for the consumer; one more may be in progress.

    Raises:
        BaseException: The error that the generator raised, after the items before it.

    Example:
        >>> list(prefetch(number * number for number in range(4)))
        [0, 1, 4, 9]
    """
    queue: Queue[Item | _End] = Queue(ahead)
    is_stopped = Event()

    def compute() -> None:
        end = _End()
        try:
            for item in items:
                queue.put(item)
                if is_stopped.is_set():
                    break
        except BaseException as error:  # It is raised where the consumer requests the next item.
            end = _End(error)
        finally:
            items.close()
            if not is_stopped.is_set():
                queue.put(end)

    # The interpreter does not wait for this thread if it exits before the consumer has closed the iterator.
    thread = Thread(target=compute, name="cadam prefetch", daemon=True)
    try:
        thread.start()
    except RuntimeError:  # the system has no threads left
        yield from items
        return
    try:
        while not isinstance(item := queue.get(), _End):
            yield item
        if item.error is not None:
            raise item.error
    finally:
        is_stopped.set()
        with suppress(Empty):
            while True:  # makes room for an item that the thread may be waiting to add
                queue.get_nowait()
        thread.join()
