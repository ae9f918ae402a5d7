"""The command `cadam export`: write the model of a checkpoint for serving."""

from __future__ import annotations

import argparse
import os

from ..online.data.schema import Schema
from ..online.device import select_device
from ..online.persistence.deltas import apply_delta_to_file, write_delta
from ..online.persistence.export import LoadedModel, export, load_model
from ..printable import printable
from .exit_codes import DONE, FAILED, NO_PACKAGE, USAGE, fail


def run(options: argparse.Namespace) -> int:
    """Run the command and return its exit code."""
    if options.since is not None and options.output.suffix != ".delta":
        return fail("export", f"{options.output} must end in .delta, because --since writes a delta", USAGE)
    if options.since is None and options.output.suffix != ".pt2":
        return fail("export", f"{options.output} must end in .pt2, as exported programs of torch do", USAGE)
    try:
        schema = Schema.read(options.schema) if options.schema else None
        loaded = load_model(options.folder, options.model, schema, device=select_device(options.device))
    except (ValueError, RuntimeError, OSError, ImportError) as error:
        return fail("export", error, NO_PACKAGE if isinstance(error, ImportError) else USAGE)
    if options.since is not None:
        return _write_delta(loaded, options)
    try:
        paths = export(loaded, options.output)
    except (RuntimeError, OSError) as error:
        return fail("export", error, FAILED)
    print(printable(f"{loaded.path.name}, {loaded.events:,} events: {', '.join(map(os.fspath, paths))}"))
    return DONE


def _write_delta(loaded: LoadedModel, options: argparse.Namespace) -> int:
    try:
        changed = write_delta(loaded, options.since, options.output)
    except (ValueError, OSError) as error:
        return fail("export", error, FAILED)
    rows = sum(count for count in changed.values() if count > 0)
    whole = sum(count < 0 for count in changed.values())
    print(
        printable(
            f"{loaded.path.name}, {loaded.events:,} events: {options.output}, {rows:,} changed rows and {whole} whole "
            f"tensors, {options.output.stat().st_size:,} bytes"
        )
    )
    return DONE


def apply(options: argparse.Namespace) -> int:
    """Run `cadam apply` and return its exit code."""
    try:
        events = apply_delta_to_file(options.delta, options.weights)
    except (ValueError, OSError) as error:
        return fail("apply", error, FAILED)
    print(printable(f"{options.weights} has the weights after {events:,} events"))
    return DONE
