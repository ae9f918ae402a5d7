"""Where results are to be written: whether that can be done is known before there are any."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path


class UnwritableError(OSError):
    """A folder or file that cannot be written."""


def check_folder(folder: Path, what: str) -> None:
    """That files can be put in the folder, or that it can be made. Leaves nothing; `what` says what it is for."""
    there = next(place for place in (folder, *folder.parents) if os.path.lexists(place))
    if not there.is_dir():
        raise UnwritableError(f"{what}: {folder} cannot be written to: {there} is not a folder")
    if not os.access(there, os.W_OK | os.X_OK):
        whose = "" if there == folder else f" in {there}"
        raise UnwritableError(f"{what}: {folder} cannot be written to: permission denied{whose}")
    try:
        with tempfile.TemporaryFile(dir=there):
            pass  # there are folders that take no files whatever their permissions, such as those of /proc
    except OSError as error:
        raise UnwritableError(f"{what}: {folder} cannot be written to: {error.strerror} in {there}") from error


def check_file(file: Path, what: str) -> None:
    """That the file can be written, or written anew."""
    if file.is_dir():
        raise UnwritableError(f"{what}: {file} is a folder, not a file")
    check_folder(file.parent, what)
    if file.exists() and not os.access(file, os.W_OK):
        raise UnwritableError(f"{what}: {file} cannot be written to: permission denied")
