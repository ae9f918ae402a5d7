"""The arguments of `cadam ab`, apart from its implementation so that `cadam ab --help` does not import torch."""

from __future__ import annotations

import argparse
import os
from pathlib import Path

from .arguments import (
    add_data_arguments,
    add_label_arguments,
    add_max_rejected_argument,
    add_model_arguments,
    format_exit_codes,
    positive_int,
    share,
)
from .exit_codes import DONE, FAILED, INTERRUPTED, NO_PACKAGE, TERMINATED, UNREAD, USAGE

MAX_REJECTED = 0.01
"""The default of `--max-rejected`. A test compares it with that of `cadam run`."""
MATTERS = 0.1
"""The default of `--matters`. A test compares it with that of `Study`."""
EXIT_CODES = {
    DONE: "there is a result",
    FAILED: "a run failed, an optimizer diverged at every learning rate, or more than "
    "--max-rejected was rejected; recorded scores are kept",
    USAGE: "the command is invalid, the data is missing or does not fit, or a folder cannot be written to; nothing was "
    "computed",
    NO_PACKAGE: "a package is missing; nothing was computed",
    INTERRUPTED: "interrupted; the same command continues from there",
    UNREAD: "the reader of the output has closed it, as `| head` does; the same command continues from there",
    TERMINATED: "stopped by SIGTERM; the same command continues from there",
}
"""The exit codes of `cadam ab`."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add all arguments of `cadam ab`."""
    parser.epilog = format_exit_codes(EXIT_CODES)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    add_study_arguments(parser)
    add = parser.add_argument
    add("--full", action="store_true", help="continue to the end of the stream after the verdict")
    add("--seeds", type=positive_int, default=5, metavar="N", help="number of seeds of each arm (default: 5)")
    add(
        "--cache",
        type=Path,
        default=Path(os.environ.get("CADAM_CACHE", "results/cache")),
        metavar="FOLDER",
        help="the folder of the encoded stream and of the scores of runs (default: $CADAM_CACHE, or results/cache)",
    )
    add(
        "--threads",
        type=positive_int,
        metavar="N",
        help="number of processes, which does not change the results (default: all cores)",
    )
    add("--force", action="store_true", help="read the data and compute all runs again")
    add("--json", action="store_true", help="print only the verdict and all numbers, as JSON")
    add(
        "--output",
        type=Path,
        metavar="FILE",
        help="the report, as .html; its numbers and the schema are written beside it as JSON "
        "(default: ab/NAME/report.html)",
    )


def add_study_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments that define the study."""
    add_data_arguments(parser)
    add_model_arguments(parser)
    add = parser.add_argument
    add(
        "--arms",
        default="adam,cadam",
        metavar="A,B",
        help="optimizers, with options as in cadam,cadam:moments=int8 or cadam,cadam:confidence@*.bias=False; the "
        "first is the baseline (default: adam,cadam)",
    )
    add(
        "--lr",
        default="3e-4,1e-3,3e-3,1e-2,3e-2,1e-1",
        metavar="X,Y,...",
        help="learning rates of every arm; more are added if the best one is an end of the grid (default: %(default)s)",
    )
    add("--batch-size", type=positive_int, default=256, metavar="N", help="events per step (default: 256)")
    add("--events", type=positive_int, metavar="N", help="use the first N events, in whole batches (default: all)")
    add(
        "--metric",
        choices=("log_loss", "auc", "gauc"),
        default="log_loss",
        help="the metric of the verdict; AUC and GAUC are measured in blocks of time (default: log_loss)",
    )
    add(
        "--blocks",
        type=positive_int,
        default=100,
        metavar="N",
        help="number of blocks of time for --metric auc and gauc (default: 100)",
    )
    add(
        "--matters",
        type=float,
        default=MATTERS,
        metavar="X",
        help="smallest difference of practical use, in percent of the log loss or in points of AUC or GAUC; arms "
        "within it are equivalent (default: %(default)s)",
    )
    add_max_rejected_argument(parser, MAX_REJECTED)
    add_label_arguments(parser)
    simulated = parser.add_argument_group("simulated changes of the stream")
    simulated.add_argument(
        "--change", metavar="FEATURE", help="the values of this feature are exchanged at two points in time"
    )
    simulated.add_argument("--noise", type=share, metavar="X", help="share of the labels that are flipped")
    simulated.add_argument("--delay", type=float, metavar="T", help="mean delay of the labels")
