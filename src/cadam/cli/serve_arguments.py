"""Arguments of `cadam serve`, `cadam versions`, `cadam rollback` and `cadam migrate`."""

from __future__ import annotations

import argparse
import math
import re
from dataclasses import dataclass
from pathlib import Path

from .arguments import add_model_arguments, add_waiting_arguments, positive_int

SERVE_DETAILS = """
from nothing:
  cadam serve --schema schema.json --model deepfm
from a finished or running cadam run:
  cadam serve runs/clicks
The same command continues after a stop or a crash. Events and labels are in events.db in the folder of the service,
which is runs/serve, or the folder serve inside the folder of the run.

SIGTERM or SIGINT: the service answers its last requests, writes a checkpoint and exits with code 0.

exit codes:
  0    the service was stopped
  2    the command is invalid or does not fit the folder, or the address is in use
  5    a package is missing
"""

SECONDS_OF_UNIT = {"ms": 0.001, "s": 1, "m": 60, "h": 3600, "d": 86400}
BYTES_OF_UNIT = {"": 1, "k": 1 << 10, "m": 1 << 20, "g": 1 << 30, "t": 1 << 40}


@dataclass(frozen=True)
class Refresh:
    """How often snapshots are published: after a time, or after a number of training steps."""

    seconds: float
    steps: int | None = None


def refresh(text: str) -> Refresh:
    """Parse --refresh: 500ms, 2s or 100steps, as an argparse type."""
    if match := re.fullmatch(r"([1-9]\d{0,8}) ?steps?", text):
        return Refresh(0.1, int(match[1]))
    return Refresh(duration(text))


def duration(text: str) -> float:
    """Parse a duration such as 500ms, 2s, 12h or 7d, as an argparse type. A number alone is in seconds."""
    match = re.fullmatch(r"(\d{1,9}(?:\.\d{1,9})?)(ms|s|m|h|d)?", text)
    if match is None:
        raise argparse.ArgumentTypeError(f"must be a duration such as 500ms, 2s, 12h or 7d, got {text!r}")
    return float(match[1]) * SECONDS_OF_UNIT[match[2] or "s"]


def guard(text: str) -> float | None:
    """Parse --guard: a duration, or off, as an argparse type."""
    return None if text == "off" else positive_duration(text)


def positive_duration(text: str) -> float:
    """Parse a duration above 0, as an argparse type."""
    if not (seconds := duration(text)):
        raise argparse.ArgumentTypeError(f"must be above 0, got {text!r}")
    return seconds


def size(text: str) -> int:
    """Parse a number of bytes such as 500000, 64M or 10G, as an argparse type."""
    match = re.fullmatch(r"([1-9]\d{0,15})([kmgt]?)b?", text.lower())
    if match is None:
        raise argparse.ArgumentTypeError(f"must be a size such as 500000, 64M or 10G, got {text!r}")
    return int(match[1]) * BYTES_OF_UNIT[match[2]]


def add_serve_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `cadam serve`."""
    parser.epilog = SERVE_DETAILS
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    add = parser.add_argument
    add(
        "folder",
        type=Path,
        nargs="?",
        metavar="FOLDER",
        help="the folder of a run or of a service (default: runs/serve)",
    )
    add_model_arguments(parser)
    add("--address", default="8000", metavar="[HOST:]PORT", help="where to listen (default: 127.0.0.1:8000)")
    add("--token-file", type=Path, metavar="FILE", help="a file with the token that requests must carry")
    add(
        "--log",
        metavar="URI",
        help="keep the event log in Redis, as in redis://HOST/STREAM (default: events.db in the folder of the service)",
    )
    add(
        "--workers",
        type=positive_int,
        default=1,
        metavar="N",
        help="number of processes that answer requests (default: 1)",
    )
    add(
        "--refresh",
        type=refresh,
        default=Refresh(0.5),
        metavar="TIME",
        help="how often predictions switch to the newest model, as in 500ms or 100steps (default: 500ms)",
    )
    add(
        "--optimizer",
        metavar="NAME",
        help="an optimizer of cadam, with options as in `cadam run` (default: the optimizer of the run, or CAdam)",
    )
    add(
        "--lr",
        type=float,
        help="a fixed learning rate (default: the rate of the run, else 0.003, or 0.001 for your own model)",
    )
    add(
        "--challenger",
        action="append",
        default=[],
        metavar="NAME",
        help="another optimizer that learns the same events and is compared with --optimizer, as in cadam:lr=0.01 "
        "(repeat the option for several)",
    )
    add(
        "--promote",
        choices=("auto", "manual"),
        default="manual",
        help="auto: serve a challenger as soon as it is better; manual: only after POST /promote (default: manual)",
    )
    add("--seed", type=int, default=0, help="seed of the initial weights (default: 0)")
    add("--threads", type=positive_int, default=1, metavar="N", help="threads of the learner (default: 1)")
    add(
        "--horizon",
        type=float,
        default=math.inf,
        help="how long an event waits for its label, in seconds (default: without end)",
    )
    add_waiting_arguments(parser)
    add(
        "--guard",
        type=guard,
        default=3600.0,
        metavar="TIME",
        help="when the log loss rises, serve an older version for at least this time, or never if off (default: 1h)",
    )
    add(
        "--retain",
        type=duration,
        metavar="TIME",
        help="delete entries of the event log that are older, as in 7d (default: keep all)",
    )
    add(
        "--retain-size",
        type=size,
        metavar="SIZE",
        help="delete the oldest entries of the event log beyond this size, as in 10G",
    )
    limits = parser.add_argument_group("limits of requests")
    limits.add_argument(
        "--max-body", dest="body", type=size, default=1 << 20, metavar="SIZE", help="largest body (default: 1M)"
    )
    limits.add_argument(
        "--max-events",
        dest="events",
        type=positive_int,
        default=1000,
        metavar="N",
        help="most events or labels in a request (default: 1000)",
    )
    limits.add_argument(
        "--max-waiting",
        dest="waiting",
        type=positive_int,
        default=2000,
        metavar="N",
        help="events and labels that may wait; further requests get status 503 (default: 2000)",
    )
    limits.add_argument(
        "--timeout",
        dest="seconds",
        type=positive_duration,
        default=5.0,
        metavar="TIME",
        help="longest time until the body of a request has arrived (default: 5s)",
    )


def add_versions_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `cadam versions`."""
    parser.add_argument("folder", type=Path, metavar="FOLDER", help="the folder of the service, as for `cadam serve`")
    parser.add_argument(
        "--tag", nargs=2, metavar=("VERSION", "TAG"), help="give a version a tag; it is then kept forever"
    )


def add_rollback_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `cadam rollback`."""
    parser.add_argument("folder", type=Path, metavar="FOLDER", help="the folder of the service, as for `cadam serve`")
    parser.add_argument("version", metavar="VERSION", help="the name or tag of a version, as `cadam versions` lists it")
    parser.add_argument(
        "--force",
        action="store_true",
        help="go back although entries of the log after the version were deleted (--retain), so that events among them "
        "no longer wait for their labels",
    )


def add_migrate_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `cadam migrate`."""
    add = parser.add_argument
    add(
        "folder",
        type=Path,
        metavar="FOLDER",
        help="the folder with the checkpoints of a run or of a service, which must not run",
    )
    for name, placeholder, text in (
        ("--add", "NAME=KIND", "a new column, as in user=hash:1000?"),
        ("--drop", "NAME", "a column to leave out"),
        ("--resize", "NAME=KIND", "a new size of a column, as in item=hash:2000"),
    ):
        add(name, action="append", default=[], metavar=placeholder, help=f"{text} (repeat the option for several)")
    add("--optimizer", metavar="NAME", help="switch to another optimizer of cadam, such as adam, and keep the moments")
    add("--lr", type=float, help="set the learning rate")
    add("--dry-run", action="store_true", help="print what would be kept, and change nothing")
