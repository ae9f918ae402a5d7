"""Arguments of the commands.

They are defined apart from the commands' implementations so that `cadam COMMAND --help` does not import torch.
"""

from __future__ import annotations

import argparse
import math
import textwrap
from collections.abc import Mapping
from pathlib import Path

METRIC_NAMES = ("auc", "gauc", "log_loss", "normalised_entropy", "calibration")
"""Metrics that `--metrics` accepts. A test compares them with those of `cadam.online.metrics`."""
MODEL_NAMES = ("linear", "fm", "deepfm", "dcn", "mlp")
"""Ready-made models. A test compares them with those of `cadam.online.models`."""
BENCHMARK_SUITES = ("dense", "graphs", "sparse", "tables", "growth", "training")
"""Suites of `cadam bench`. A test compares them with those of `cadam.cli.bench`."""

RUN_DETAILS = """
without any code:
  cadam run clicks.csv --label click
infers the schema from a sample, prints it, and trains a DeepFM. The checkpoints, schema.json and model.json are
written to runs/clicks. The same command resumes from there.

with your own model:
  --model mod.py:build names a function without arguments that returns the model: a torch.nn.Module that is called
  with the features by name and returns one logit per event. SCHEMA in the same file, or --schema, describes an event:
    SCHEMA = Schema({"user": "hash:100000", "price": "number"}, label="click", id="event", user="user", time="at")
  The file may also define loss(scores, labels). The default is the log loss.

the data:
  PATH                            a file or folder; its name or its first bytes decide how it is read
  parquet:PATH                    a Parquet file, or a folder of them
  csv:PATH, jsonl:PATH            the lines of a file, which may be compressed as .gz; - is standard input
  redis://HOST[:PORT]/STREAM      a Redis stream; ?db=N selects the database; rediss:// uses TLS
  kafka://HOST[:PORT]/TOPIC       a Kafka topic of JSON messages; ?servers=HOST:PORT,... adds servers,
                                  and other query fields are settings of librdkafka

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
"""


def add_data_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments that name the data and the roles of its columns."""
    add = parser.add_argument
    add("place", nargs="?", metavar="DATA", help="a file, a folder of Parquet files, or a URI")
    add("--data", metavar="URI", help="another way to give DATA")
    add("--label", metavar="NAME", help="the column to predict, or as in 'rating>=4', 'status==sold'")
    add("--user", metavar="NAME", help="the column of the user, by which GAUC groups events")
    add("--time", metavar="NAME", help="the column of the time; a format may follow, as in 'at:%%d/%%m/%%Y'")
    add("--id", metavar="NAME", help="the column of the event's id, by which later labels are joined")
    add("--ignore", metavar="A,B", help="columns to leave out")


def add_model_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments that choose the schema and the model."""
    models = f"{', '.join(MODEL_NAMES)}, or FILE.py:FUNCTION for your own model (default: deepfm)"
    add = parser.add_argument
    add("--schema", type=Path, metavar="FILE", help="the schema as JSON (default: it is inferred)")
    add("--model", metavar="NAME", help=models)
    add("--width", type=int, metavar="N", help="width of the embeddings (default: 8)")
    add("--hidden", metavar="N,M", help="sizes of the hidden layers (default: one layer, by the number of inputs)")


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


def default_batch_size(has_own_model: bool) -> int:
    """Return the batch size of `cadam run` without `--batch-size`, for the user's own or a ready-made model."""
    return 1024 if has_own_model else 256


def add_run_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `cadam run`."""
    parser.epilog = RUN_DETAILS
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
        default="CAdam",
        metavar="NAME",
        help="an optimizer of cadam, with options as in CAdam:moments=int8:weight_decay=0.01 (default: CAdam)",
    )
    add("--lr", type=float, help="learning rate (default: 0.003 for ready-made models, 0.001 for your own)")
    add("--seed", type=int, default=0, help="seed of the initial weights (default: 0)")
    add("--batch-size", type=int, metavar="N", help="events per step (default: 256, or 1024 for your own model)")
    add("--follow", action="store_true", help="wait for more events at the end of the data")
    add(
        "--patience",
        type=float,
        default=1.0,
        metavar="SECONDS",
        help="how long to wait for a full batch; with inf, batches do not depend on time (default: 1)",
    )
    add(
        "--horizon",
        type=float,
        default=math.inf,
        help="how long to wait for a label, in the unit of the time column (default: inf)",
    )
    add(
        "--unmatched",
        choices=("drop", "negative"),
        default="drop",
        help="drop an event that has no label after --horizon, or learn it with label 0 (default: drop)",
    )
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
        help="metrics beside the log loss, over windows, decayed and over the whole stream: " + ", ".join(METRIC_NAMES),
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
        help="start from a model and optimizer written with torch.save; repeat the option for several files",
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
    add("folder", type=Path, metavar="FOLDER", help="the --checkpoint folder of a run, which may still be running")
    add("output", type=Path, metavar="MODEL.pt2", help="MODEL.pt and MODEL.schema.json are written beside it")
    add("--model", metavar="FILE:FUNCTION", help="the function that builds the model, if its file has moved")
    add("--schema", type=Path, metavar="FILE", help="the schema, if the folder has none")


def add_bench_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `cadam bench`."""
    add = parser.add_argument
    add(
        "suites",
        nargs="*",
        metavar="SUITE",
        help=f"any of {', '.join(BENCHMARK_SUITES)} (default: all; graphs runs on CUDA only)",
    )
    add("--device", choices=["cpu", "cuda"], help="default: cuda if there is a device, else cpu")
    add("--quick", action="store_true", help="run smaller and fewer cases: one or two minutes instead of about five")
    add("--json", metavar="PATH", help="also write the results to this file")
    add("--plot", metavar="PATH", help="draw the results (needs matplotlib)")


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
