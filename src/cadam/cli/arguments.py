"""Arguments of the commands.

They are defined apart from the commands' implementations so that `cadam COMMAND --help` does not import torch.
"""

from __future__ import annotations

import argparse
import math
import re
import textwrap
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

from ..sources_and_metrics import METRICS, source_help

MODEL_NAMES = ("linear", "fm", "deepfm", "dcn", "mlp")
"""Ready-made models. A test compares them with those of `cadam.online.models`."""

RUN_DETAILS = """
without any code:
  cadam run clicks.csv --label click
infers the schema from a sample, prints it, and trains a DeepFM. The checkpoints, schema.json and model.json are
written to runs/clicks. The same command resumes from there.

with your own model:
  --model mod.py:build names a function without arguments that returns the model: a torch.nn.Module that is called
  with the features by name and returns one logit per event. SCHEMA in the same file, or --schema, describes an event:
    SCHEMA = Schema({"user": "hash:100000", "price": "number"}, label="click", id="event", user="user", time="at")
  The file may also define loss(scores, labels); then labels may be any numbers. The default is the log loss, which
  needs labels from 0 to 1.

the data:
{sources}
SIGTERM or SIGINT: the run finishes its batch, writes a checkpoint and exits with code 0. A second signal stops it
at once.

exit codes:
  0    the stream has ended or the run was stopped; the same command resumes from there
  1    the run failed, the stream ended and nothing was learned, more than --max-rejected was rejected, or rows of
       the log are only in the checkpoint; earlier checkpoints are kept
  2    the command is invalid or does not fit the checkpoint, or a folder cannot be written to; nothing was learned
  5    a package is missing; nothing was learned
  130  interrupted during startup, or interrupted twice; earlier checkpoints are kept
  141  the reader of the output has closed it; a checkpoint was written
  143  SIGTERM during startup, or a second one; earlier checkpoints are kept
"""


class StoreOnce(argparse.Action):
    """Stores the value of an option, and refuses the option if it is given twice: the first would be lost silently."""

    def __call__(
        self, parser: Any, namespace: argparse.Namespace, values: Any, option_string: str | None = None
    ) -> None:
        """Store the value."""
        if getattr(namespace, self.dest) is not None:
            raise argparse.ArgumentError(self, "is given twice")
        setattr(namespace, self.dest, values)


def add_data_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments that name the data and the roles of its columns."""
    add = partial(parser.add_argument, action=StoreOnce)
    parser.add_argument("place", nargs="?", metavar="DATA", help="a file, a folder of Parquet files, or a URI")
    parser.add_argument("--data", metavar="URI", help="another way to give DATA")
    add("--label", metavar="NAME", help="the column to predict, or a condition such as 'rating>=4' or 'status==sold'")
    add("--user", metavar="NAME", help="the column of the user, by which GAUC groups events")
    add(
        "--time",
        action=StoreOnce,
        metavar="NAME",
        help="the column of the time, with its format if it is not recognized, as in 'at:%%d/%%m/%%Y'",
    )
    add("--id", metavar="NAME", help="the column of the event's id, by which later labels are joined")
    add("--ignore", metavar="A,B", help="columns to leave out")
    parser.add_argument(
        "--ids",
        action="store_true",
        help="infer the kind id, which has a row for each value, instead of hash, for columns of many ids",
    )


def add_model_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments that choose the schema and the model."""
    models = f"{', '.join(MODEL_NAMES)}, or FILE.py:FUNCTION for your own model (default: deepfm)"
    add = parser.add_argument
    add("--schema", type=Path, metavar="FILE", help="the schema as JSON (default: it is inferred)")
    add("--model", metavar="NAME", help=models)
    add("--width", type=int, metavar="N", help="width of the embeddings (default: 8)")
    add(
        "--hidden",
        metavar="N,M",
        help="sizes of the hidden layers (default: one layer, whose size depends on the number of inputs)",
    )
    # On a GPU a step of a small model takes as long as it takes to launch its kernels.
    reason = "cpu, which is faster for small models and batches; your own model stays where FUNCTION puts it"
    add_device_argument(parser, None, reason)


def add_device_argument(parser: argparse.ArgumentParser, default: str | None, reason: str) -> None:
    """Add `--device`.

    Args:
        parser: the parser of the command.
        default: the device if the option is not given; None for the CPU, or where a user's own model is.
        reason: what the help says about the default.
    """
    parser.add_argument(
        "--device",
        type=device_name,
        default=default,
        metavar="NAME",
        help=f"cpu, cuda, cuda:N, or auto for CUDA where it is available (default: {reason})",
    )


def device_name(text: str) -> str:
    """Check the name of a device, as an argparse type."""
    if re.fullmatch(r"cpu|auto|cuda(:\d+)?", text) is None:
        raise argparse.ArgumentTypeError(f"must be cpu, cuda, cuda:N or auto, got {text!r}")
    return text


def add_max_rejected_argument(parser: argparse.ArgumentParser, default: float | None) -> None:
    """Add `--max-rejected`, which takes a share or a percentage."""
    parser.add_argument(
        "--max-rejected",
        type=share,
        default=default,
        metavar="X",
        help="fail if a larger share of the events is rejected (default: 0.01)",
    )


def share(text: str) -> float:
    """Parse a share from 0 to 1, or a percentage, as an argparse type."""
    try:
        value = float(text.removesuffix("%")) / (100 if text.endswith("%") else 1)
    except ValueError:
        value = -1.0
    if not 0 <= value <= 1:
        raise argparse.ArgumentTypeError(f"must be a share such as 0.01 or 1%, got {text!r}")
    return value


OWN_MODEL_BATCH_SIZE = 1024
"""The batch size of `cadam run` without `--batch-size` for your own model. That of ready-made models grows."""


def add_run_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `cadam run`."""
    parser.epilog = RUN_DETAILS.replace("{sources}", source_help())
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    add_data_arguments(parser)
    add_model_arguments(parser)
    add = parser.add_argument
    add(
        "--checkpoint",
        type=Path,
        metavar="FOLDER",
        help="the folder of the checkpoints and the schema (default: runs/NAME OF DATA)",
    )
    add(
        "--optimizer",
        metavar="NAME",
        help="an optimizer of cadam, with options as in CAdam:moments=int8:weight_decay=0.01; "
        "CAdam:confidence@*.bias=False is for the parameters with such names (default: the optimizer of the "
        "checkpoint, or CAdam)",
    )
    add(
        "--lr",
        type=learning_rate,
        metavar="X",
        help="a fixed learning rate; auto, or auto:X to start at X, tunes it while the run learns (default: auto:0.003 "
        "for ready-made models, 0.001 for your own)",
    )
    add("--seed", type=int, default=0, help="seed of the initial weights (default: 0)")
    add(
        "--batch-size",
        type=int,
        metavar="N",
        help="events per step (default: 32 in the beginning, which grows to 256; 1024 for your own model)",
    )
    add(
        "--threads",
        type=positive_int,
        metavar="N",
        help="threads of torch; the number can change the last bits of the weights (default: 1, or all cores for a "
        "large model)",
    )
    add("--compile", action="store_true", help="compile your own model with torch.compile, which takes some seconds")
    add("--follow", action="store_true", help="wait for more events at the end of the data")
    add(
        "--patience",
        type=float,
        default=1.0,
        metavar="SECONDS",
        help="how long to wait for a full batch; with inf, batches do not depend on time (default: 1)",
    )
    add_label_arguments(parser)
    add(
        "--every",
        type=int,
        default=1_000_000,
        metavar="N",
        help="events between checkpoints, which are at most 30 seconds apart (default: 1000000)",
    )
    add("--keep", type=int, default=3, metavar="N", help="number of checkpoints to keep (default: 3)")
    add(
        "--events",
        type=int,
        metavar="N",
        help="stop after exactly N events in total; a resumed run continues with the rest of the batch",
    )
    add("--log", type=Path, metavar="FOLDER", help="write the prediction log there, as Parquet")
    add(
        "--metrics",
        metavar="A,B",
        help="metrics beside the log loss, over windows, decayed and over the whole stream: " + ", ".join(METRICS),
    )
    add("--window", type=int, default=10_000, metavar="N", help="events per window (default: 10000)")
    add(
        "--rejected",
        type=Path,
        metavar="FILE",
        help="write rejected events there (default: rejected.jsonl beside the checkpoints)",
    )
    add_max_rejected_argument(parser, None)
    add(
        "--warm-start",
        type=Path,
        action="append",
        metavar="FILE",
        help="start from a checkpoint, or from files written with torch.save (repeat the option for each)",
    )
    add("--tensorboard", type=Path, metavar="FOLDER", help="write TensorBoard scalars there")
    add("--prometheus", type=Path, metavar="FILE", help="write Prometheus metrics there every 10 seconds")
    add(
        "--status",
        metavar="[HOST:]PORT",
        help="serve a status page, /metrics for Prometheus and /healthz (default host: 127.0.0.1)",
    )
    add("--quiet", action="store_true", help="print only warnings and errors")
    add("--seconds", type=float, default=30, metavar="N", help="seconds between lines of progress (default: 30)")


def add_label_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments about labels that arrive later than their events."""
    add = parser.add_argument
    add("--labels", metavar="URI", help="a second source, which has the labels: id, label and, for files, time")
    add(
        "--horizon",
        type=float,
        default=math.inf,
        help="how long an event waits for its label, in the unit of the time column; then it is learned, with label 0 "
        "if there is none (default: an event is learned when its label arrives)",
    )
    add_waiting_arguments(parser)
    add(
        "--early-positives",
        action="store_true",
        help="learn every event as a negative when it arrives, and positives again when their label arrives, with "
        "importance weights",
    )


def add_waiting_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments about events that wait for their labels, besides the horizon, whose unit differs by command."""
    add = parser.add_argument
    add(
        "--unmatched",
        choices=("drop", "negative"),
        help="drop an event that has no label after --horizon, or learn it with label 0 (default: negative)",
    )
    add(
        "--capacity",
        type=positive_int,
        default=1_000_000,
        metavar="N",
        help="how many events may wait for their labels (default: 1000000)",
    )


def check_label_arguments(options: argparse.Namespace) -> None:
    """Raise ValueError if the arguments about late labels do not fit each other."""
    if options.horizon == math.inf and (options.unmatched == "negative" or options.early_positives):
        option = "--early-positives" if options.early_positives else "--unmatched negative"
        raise ValueError(f"{option} needs --horizon, after which an event counts as negative")
    if options.early_positives and options.unmatched == "drop":
        raise ValueError("--early-positives learns events as negatives, but --unmatched drop drops them")


def add_schema_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `cadam schema`."""
    add_data_arguments(parser)
    parser.add_argument(
        "--output",
        type=Path,
        default=Path("schema.json"),
        metavar="FILE",
        help="where to write the schema (default: schema.json)",
    )
    parser.add_argument("--force", action="store_true", help="replace an existing file with other content")


def add_export_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `cadam export`."""
    add = parser.add_argument
    add("folder", type=Path, metavar="FOLDER", help="the checkpoint folder of a run, which may still be running")
    add(
        "output",
        type=Path,
        metavar="MODEL.pt2",
        help="the exported model; MODEL.pt and MODEL.schema.json are written beside it",
    )
    add(
        "--since",
        metavar="BASE",
        help="write a delta instead, to a file that ends in .delta, with what has changed since BASE: the number of a "
        "checkpoint in the folder, a checkpoint file, or the MODEL.pt of an earlier export",
    )
    add("--model", metavar="FILE:FUNCTION", help="the function that builds the model, needed if the model is your own")
    add("--schema", type=Path, metavar="FILE", help="the schema, if the folder has none")
    add_device_argument(parser, "cpu", "cpu, whichever device the model was trained on")


def add_apply_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `cadam apply`."""
    parser.add_argument(
        "delta", type=Path, metavar="FILE.delta", help="the file that `cadam export --since` has written"
    )
    parser.add_argument("weights", type=Path, metavar="MODEL.pt", help="the weights of an export, which are replaced")


def learning_rate(text: str) -> float | str:
    """Parse a fixed learning rate, or the word auto, after which a colon and a first rate may follow."""
    first = text.removeprefix("auto:")
    if text == "auto":
        return text
    try:
        rate = float(first)
    except ValueError:
        raise argparse.ArgumentTypeError(f"must be a number, auto or auto:NUMBER, got {text!r}") from None
    return text if first != text else rate


def positive_int(text: str) -> int:
    """Parse a whole number of at least 1, as an argparse type."""
    try:
        value = int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"must be a whole number, got {text!r}") from None
    if value < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, got {value}")
    return value


def format_exit_codes(exit_codes: Mapping[int, str]) -> str:
    """Format exit codes and their meanings for the help of a command."""
    lines = [
        textwrap.fill(text, 120, initial_indent=f"  {code:<5}", subsequent_indent=" " * 7, break_on_hyphens=False)
        for code, text in exit_codes.items()
    ]
    return "\n".join(["exit codes:", *lines, ""])
