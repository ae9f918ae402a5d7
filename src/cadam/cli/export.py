"""The command `cadam export`: write the model of a checkpoint for serving."""

from __future__ import annotations

import argparse
import os
import sys

from ..online.data.schema import Schema
from ..online.persistence.export import export, load_model
from .exit_codes import DONE, FAILED, NO_PACKAGE, USAGE


def run(options: argparse.Namespace) -> int:
    """Run the command and return its exit code."""
    if options.output.suffix != ".pt2":
        print(f"cadam export: {options.output} must end in .pt2, as exported programs of torch do", file=sys.stderr)
        return USAGE
    try:
        schema = Schema.read(options.schema) if options.schema else None
        loaded = load_model(options.folder, options.model, schema)
    except (ValueError, RuntimeError, OSError, ImportError) as error:
        print(f"cadam export: {error}", file=sys.stderr)
        return NO_PACKAGE if isinstance(error, ImportError) else USAGE
    try:
        paths = export(loaded, options.output)
    except (RuntimeError, OSError) as error:
        print(f"cadam export: {error}", file=sys.stderr)
        return FAILED
    print(f"{loaded.path.name}, {loaded.events:,} events: {', '.join(map(os.fspath, paths))}")
    return DONE
