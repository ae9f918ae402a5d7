"""Atomic file writes: a crash leaves the old file or the new one, never a part of either.

The content is written to a temporary file in the same folder, flushed to disk, and then renamed.
"""

from __future__ import annotations

import fcntl
import os
import re
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path


def replace_file(path: Path, content: bytes, temporary: str | None = None) -> None:
    """Write content to a file atomically.

    Args:
        path: the file. A device or a pipe cannot be replaced, so it is written to directly.
        content: the new content.
        temporary: see `write_with`.
    """
    if path.exists() and not path.is_file():
        path.write_bytes(content)
    else:
        write_with(path, lambda new: new.write_bytes(content), temporary)


def write_with(path: Path, write: Callable[[Path], object], temporary: str | None = None) -> None:
    """Write a file atomically with a function that writes to a path.

    Symbolic links are followed: the target is replaced.

    Args:
        path: the file to create or replace.
        write: called with the path of the temporary file, which it writes.
        temporary: the name of the temporary file. A fixed name lets the next write overwrite the file that a killed
            process left behind; use it only if no other process writes the same file. By default the name is random,
            and the next write deletes such files unless a running process is writing them.
    """
    path = Path(os.path.realpath(path))
    if temporary is None:
        _remove_leftovers(path)
    new = path.with_name(temporary or f".{path.stem}.{uuid.uuid4().hex}.new")
    # The lock marks the file as being written. It ends with the process, however that ends.
    with nullcontext() if temporary else open(new, "xb") as file:
        try:
            if file is not None:
                fcntl.flock(file, fcntl.LOCK_EX)
            write(new)
            flush_and_rename(new, path)
        finally:
            new.unlink(missing_ok=True)


def _remove_leftovers(path: Path) -> None:
    """Delete temporary files of a path that killed processes have left behind, but none that is being written."""
    name = re.compile(rf"\.{re.escape(path.stem)}\.[0-9a-f]{{32}}\.new")
    for leftover in path.parent.iterdir() if path.parent.is_dir() else ():
        if name.fullmatch(leftover.name):
            with suppress(OSError), open(leftover, "rb") as file:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                leftover.unlink(missing_ok=True)


@contextmanager
def wait_for_folder(folder: Path) -> Iterator[None]:
    """Exclude other processes that wait for the same folder. The lock ends with the process, however that ends."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        with suppress(OSError):  # a file system without locks
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def flush_and_rename(new: Path, path: Path) -> None:
    """Flush a written file or folder to disk and rename it to its final path."""
    _flush(new)
    new.replace(path)
    _flush(path.parent)


def _flush(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
