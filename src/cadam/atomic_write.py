"""Files that are whole or not there: written beside their place, flushed to the disk, then given their name."""

from __future__ import annotations

import os
import uuid
from collections.abc import Callable
from pathlib import Path


def replace_file(path: Path, content: bytes, temporary: str | None = None) -> None:
    """Write a file so that at any moment either the old or the new one is there, whole."""
    if path.exists() and not path.is_file():  # a device or a pipe, which nothing may replace
        path.write_bytes(content)
    else:
        write_with(path, lambda new: new.write_bytes(content), temporary)


def write_with(path: Path, write: Callable[[Path], object], temporary: str | None = None) -> None:
    """The same with what `write` puts in the file it is given. A link stays one: what it points to is replaced.

    `temporary` names the unfinished file where no other process writes the same: what a killed process left behind is
    then overwritten.
    """
    path = Path(os.path.realpath(path))
    new = path.with_name(temporary or f".{path.stem}.{uuid.uuid4().hex}.new")
    try:
        write(new)
        settle(new, path)
    finally:
        new.unlink(missing_ok=True)


def settle(new: Path, path: Path) -> None:
    """Give a written file, or a folder, its name, once all of it is on the disk."""
    _flush(new)
    new.replace(path)
    _flush(path.parent)


def _flush(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
