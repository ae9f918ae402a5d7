"""Checks that results can be written, made before they are computed."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path


class UnwritableError(OSError):
    """A folder or file cannot be written."""


def check_folder(folder: Path, purpose: str) -> None:
    """Check that files can be created in a folder, or that the folder can be created.

    Nothing is left behind on disk.

    Args:
        folder: the folder, which need not exist.
        purpose: what the folder is for, such as the option that names it. The error message starts with it.

    Raises:
        UnwritableError: the folder cannot be written.
    """
    existing = next(path for path in (folder, *folder.parents) if os.path.lexists(path))
    if not existing.is_dir():
        raise UnwritableError(f"{purpose}: {folder} cannot be written to: {existing} is not a folder")
    if not os.access(existing, os.W_OK | os.X_OK):
        parent = "" if existing == folder else f" in {existing}"
        raise UnwritableError(f"{purpose}: {folder} cannot be written to: permission denied{parent}")
    try:
        # Some folders, such as those of /proc, accept no files although their permissions allow it.
        with tempfile.TemporaryFile(dir=existing):
            pass
    except OSError as error:
        raise UnwritableError(f"{purpose}: {folder} cannot be written to: {error.strerror} in {existing}") from error


def check_file(file: Path, purpose: str) -> None:
    """Check that a file can be created or replaced.

    Args:
        file: the file, which need not exist.
        purpose: what the file is for. The error message starts with it.

    Raises:
        UnwritableError: the file cannot be written.
    """
    if file.is_dir():
        raise UnwritableError(f"{purpose}: {file} is a folder, not a file")
    check_folder(file.parent, purpose)
    if file.exists() and not os.access(file, os.W_OK):
        raise UnwritableError(f"{purpose}: {file} cannot be written to: permission denied")
