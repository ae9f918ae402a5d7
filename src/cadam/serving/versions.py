"""Versions of the model: checkpoints that are kept longer, so that a service can go back to them."""

from __future__ import annotations

import json
import os
import re
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from ..atomic_write import replace_file
from ..online.models.model_file import UsageError
from .event_log import Rollback, open_log

if TYPE_CHECKING:
    from ..online.learner import Learner

VERSIONS_FOLDER = "versions"
NAME = re.compile(r"\d+(-r\d+)?")
KEPT_LAST = 3
KEPT_PER_PERIOD = ((600, 12), (3600, 24), (86400, 7))
"""How many versions are kept: the newest ones, and the newest of each ten minutes, of each hour and of each day."""


@dataclass(frozen=True)
class Version:
    """A kept version.

    Args:
        name: its name, which `/model` and predictions report.
        position: the number of the last log entry that it has learned.
        time: when it was saved, in seconds since 1970.
        events: the number of events that the learner had seen.
        learned: the number of events that the model was trained on.
        log_loss: the log loss since the stream began.
        tags: names that users gave. A version with a tag is never deleted.
    """

    name: str
    position: int
    time: float
    events: int
    learned: int
    log_loss: float | None
    tags: list[str] = field(default_factory=list)

    @property
    def generation(self) -> int:
        """The number of rollbacks before it."""
        return int(self.name.partition("-r")[2] or 0)


def version_name(position: int, generation: int) -> str:
    """Return the name of the version that has learned the log up to a position, after a number of rollbacks."""
    return f"{position}-r{generation}" if generation else str(position)


class Versions:
    """The versions in the folder of a service.

    Args:
        folder: the folder of the service.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder / VERSIONS_FOLDER

    def add(self, checkpoint: Path, position: int, generation: int, learner: Learner) -> None:
        """Keep a checkpoint as a version, and delete versions that are no longer kept."""
        self.folder.mkdir(exist_ok=True)
        name = version_name(position, generation)
        path = self.path(name)
        if path.exists():
            return
        loss = learner.log_loss.mean if learner.log_loss.count else None
        version = Version(name, position, time.time(), learner.events, learner.learned, loss)
        os.link(checkpoint, path)  # both names refer to one file, so this takes no space until the checkpoint is gone
        self._write(version)
        for old in self.list()[:-1]:
            if not old.tags and old.name not in {kept.name for kept in kept_versions(self.list())}:
                self._description(old.name).unlink(missing_ok=True)
                self.path(old.name).unlink(missing_ok=True)

    def list(self) -> list[Version]:
        """List the versions, oldest first."""
        versions = []
        for path in self.folder.glob("*.json"):
            try:
                version = Version(**json.loads(path.read_text()))
            except (OSError, ValueError, TypeError):
                continue  # it was deleted in the meantime, or it is not the description of a version
            if self.path(version.name).exists():
                versions.append(version)
        # Not by time, because the clock may have been set back.
        return sorted(versions, key=lambda version: (version.generation, version.position))

    def get(self, name: str) -> Version:
        """Return the version with a name or a tag.

        Raises:
            UsageError: if there is none.
        """
        versions = self.list()
        for version in versions:
            if name == version.name or name in version.tags:
                return version
        names = ", ".join(version.name for version in versions[-10:]) or "there are none yet"
        raise UsageError(f"there is no version {name!r}; the newest versions: {names}")

    def newest_before(self, position: int) -> Version | None:
        """Return the newest version that has learned nothing after a position in the log, None if there is none."""
        return next((version for version in reversed(self.list()) if version.position <= position), None)

    def find(self, name: str) -> Path:
        """Return the checkpoint of a version."""
        return self.path(self.get(name).name)

    def tag(self, name: str, tag: str) -> Version:
        """Give a version a tag, which moves if another version has it.

        Raises:
            UsageError: if there is no such version, or if the tag could be mistaken for a version.
        """
        if not re.fullmatch(r"[A-Za-z_][\w.-]{0,99}", tag, re.ASCII):
            raise UsageError(f"a tag consists of letters, digits, -, _ and ., and begins with a letter; got {tag!r}")
        version = self.get(name)
        for other in self.list():
            if tag in other.tags:
                other.tags.remove(tag)
                self._write(other)
        version.tags[:] = sorted({*version.tags, tag})
        self._write(version)
        return version

    def path(self, name: str) -> Path:
        """Return the path of a version's checkpoint."""
        if not NAME.fullmatch(name):
            raise UsageError(f"{name!r} is not the name of a version")
        return self.folder / f"{name}.safetensors"

    def _description(self, name: str) -> Path:
        return self.folder / f"{name}.json"

    def _write(self, version: Version) -> None:
        replace_file(self._description(version.name), json.dumps(asdict(version)).encode())


def kept_versions(versions: list[Version], now: float | None = None) -> list[Version]:
    """Choose the versions that are kept: the last ones, and the newest of each of the last periods."""
    now = time.time() if now is None else now
    kept = {version.name: version for version in versions[-KEPT_LAST:]}
    for seconds, count in KEPT_PER_PERIOD:
        newest = {int(version.time // seconds): version for version in versions}
        kept |= {version.name: version for slot, version in newest.items() if slot > now // seconds - count}
    return [version for version in versions if version.name in kept]


def request_rollback(folder: Path, name: str, *, forgets_events: bool = False) -> Rollback:
    """Let the learner of a service continue from a version or tag.

    The learner reads the events after the version from the log again, so that they wait for their labels.

    Args:
        folder: the folder of the service.
        name: the version or tag.
        forgets_events: whether the rollback is allowed if the log no longer has all entries after the version.

    Raises:
        UsageError: if there is no such version, or if entries after it were deleted.
        LogUnavailableError: if the log cannot be written.
    """
    versions = Versions(folder)
    version = versions.get(name)
    log = open_log(folder)
    try:
        first = log.read(0, limit=1)
        oldest = first[0].number - 1 if first else 0
        if version.position < oldest and not forgets_events:
            usable = [each.name for each in versions.list() if each.position >= oldest]
            raise UsageError(
                f"entries of the log after version {version.name} were deleted because of --retain or --retain-size, "
                "and events among them that wait for their labels would be forgotten. The oldest version with all "
                f"entries is {usable[0] if usable else 'none'}. To forget these events, "
                f"`cadam rollback {folder} {name} --force`"
            )
        return log.add_rollback(version.name, version.position)
    finally:
        log.close()
