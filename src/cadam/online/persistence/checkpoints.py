"""The folder in which a learner keeps its checkpoints."""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from ...checkpoint_files import (
    SAFETENSORS_REQUIRED,
    DamagedCheckpointError,
    check_no_checkpoints,
    describe_fallback,
    lock_folder,
    read_header,
    read_tree,
    rename_damaged,
    write_tree,
)

logger = logging.getLogger("cadam.online")

CHECKPOINT_NAME = re.compile(r"checkpoint-[0-9]{12,}\.safetensors")
"""Names that `Checkpoints.save` gives. Other files, such as checkpoint-backup.safetensors, are left alone."""
TEMPORARY_FILE = re.compile(r"\..*\.new|\.tmp[A-Za-z0-9]{6}")
"""Names of temporary files of `write_tree` and of safetensors, which remain if a process is killed while it writes."""


class Checkpoints:
    """The checkpoints of one learner in a folder, which is locked until `close`.

    Args:
        folder: the folder, which is created if necessary.
        keep: how many of the newest checkpoints are kept.
    """

    def __init__(self, folder: Path | str, keep: int = 3) -> None:
        if keep < 1:
            raise ValueError(f"keep must be at least 1, got {keep}")
        if find_spec("safetensors") is None:
            raise ImportError(SAFETENSORS_REQUIRED)
        self.folder, self.keep = Path(folder), keep
        self.folder.mkdir(parents=True, exist_ok=True)
        self._lock = lock_folder(self.folder)
        for path in self.folder.iterdir():
            if TEMPORARY_FILE.fullmatch(path.name):
                path.unlink()

    def files(self) -> list[Path]:
        """List the checkpoints, oldest first."""
        return list_checkpoints(self.folder)

    def save(self, number: int, tree: Any) -> Path:
        """Save a tree as checkpoint `number` and delete old checkpoints."""
        path = self.folder / f"checkpoint-{number:012d}.safetensors"
        write_tree(path, tree)
        for old in self.files()[: -self.keep]:
            old.unlink(missing_ok=True)
        return path

    def load_newest(self) -> tuple[Path, Any] | None:
        """Load the newest checkpoint that is not damaged, and rename damaged newer ones.

        Returns:
            The path and the tree of the checkpoint, or None if there are no checkpoints.

        Raises:
            DamagedCheckpointError: if all checkpoints are damaged.
        """
        files = self.files()
        damaged: list[Path] = []
        for path in reversed(files):
            try:
                tree = read_tree(path)
            except DamagedCheckpointError as error:
                logger.error("damaged checkpoint, %s: %s", describe_fallback(path, files), error)
                damaged.append(path)
                continue
            rename_damaged(damaged)
            return path, tree
        check_no_checkpoints(self.folder, files)
        return None

    def close(self) -> None:
        """Release the lock of the folder."""
        self._lock.release()


def list_checkpoints(folder: Path) -> list[Path]:
    """List the checkpoints of a folder, damaged or not, oldest first."""
    return sorted(path for path in folder.glob("checkpoint-*") if CHECKPOINT_NAME.fullmatch(path.name))


def read_newest(folder: Path) -> tuple[Path, Any]:
    """Read the newest good checkpoint of a folder that a learner may be writing to.

    Unlike `Checkpoints.load_newest`, this function neither locks the folder nor renames damaged checkpoints.

    Raises:
        DamagedCheckpointError: if there is no checkpoint that can be read.
    """
    while True:
        files = list_checkpoints(folder)
        for path in reversed(files):
            try:
                return path, read_tree(path)
            except DamagedCheckpointError:
                continue
        # A running learner deletes old checkpoints, so files may have disappeared since they were listed.
        if files == list_checkpoints(folder):
            raise DamagedCheckpointError(f"none of the {len(files)} checkpoints in {folder} can be read")


def read_newest_header(folder: Path) -> Mapping[str, Any]:
    """Read the newest checkpoint of a folder without its tensors and arrays; empty if no header can be read."""
    for path in reversed(list_checkpoints(folder)):
        try:
            header = read_header(path)
        except DamagedCheckpointError:
            continue
        return header if isinstance(header, Mapping) else {}
    return {}
