"""Atomic file writes: a crash leaves the old file or the new one, never a part of either.

The content is written to a temporary file in the same folder, flushed to disk, and then renamed.
"""

from __future__ import annotations

import os
import uuid
from collections.abc import Callable
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
            process left behind; use it only if no other process writes the same file. By default the name is random.
    """
    path = Path(os.path.realpath(path))
    new = path.with_name(temporary or f".{path.stem}.{uuid.uuid4().hex}.new")
    try:
        write(new)
        flush_and_rename(new, path)
    finally:
        new.unlink(missing_ok=True)


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
