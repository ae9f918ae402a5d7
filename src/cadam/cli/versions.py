"""The commands `cadam versions` and `cadam rollback`."""

from __future__ import annotations

import argparse
from datetime import UTC, datetime

from ..online.models.model_file import UsageError
from ..serving.config import locate
from ..serving.versions import Versions, request_rollback
from .exit_codes import DONE, FAILED, NOTHING, USAGE, fail


def list_versions(options: argparse.Namespace) -> int:
    """List the versions of a service, or tag one, and return the exit code."""
    versions = Versions(locate(options.folder)[0])
    try:
        if options.tag:
            tagged = versions.tag(*options.tag)
            print(f"version {tagged.name}: {', '.join(tagged.tags)}")
            return DONE
    except UsageError as error:
        return fail("versions", error, USAGE)
    saved_versions = versions.list()
    if not saved_versions:
        return fail("versions", f"{options.folder} has no versions yet: the first one follows a checkpoint", NOTHING)
    print(f"{'version':>12}  {'saved (UTC)':19}  {'events':>12}  {'learned':>12}  {'log loss':>8}  tags")
    for version in saved_versions:
        saved = datetime.fromtimestamp(version.time, UTC).strftime("%Y-%m-%d %H:%M:%S")
        loss = "" if version.log_loss is None else f"{version.log_loss:.4f}"
        tags = ", ".join(version.tags)
        print(f"{version.name:>12}  {saved}  {version.events:12,}  {version.learned:12,}  {loss:>8}  {tags}".rstrip())
    return DONE


def roll_back(options: argparse.Namespace) -> int:
    """Let a service continue from an earlier version, and return the exit code."""
    folder, _ = locate(options.folder)
    try:
        rollback = request_rollback(folder, options.version, forgets_events=options.force)
    except UsageError as error:
        return fail("rollback", error, USAGE)
    except (OSError, ValueError, ImportError) as error:
        return fail("rollback", error, FAILED)
    print(
        f"the service continues from version {rollback.version}; labels of the log entries "
        f"{rollback.position + 1:,} to {rollback.until:,} are not learned"
    )
    return DONE
