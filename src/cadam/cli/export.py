"""The command `cadam export`: write the model of a checkpoint for serving."""

from __future__ import annotations

import argparse
import os

from ..online.data.schema import Schema
from ..online.device import select_device
from ..online.persistence.export import export, load_model
from ..printable import printable
from .exit_codes import DONE, FAILED, NO_PACKAGE, USAGE, fail


def run(options: argparse.Namespace) -> int:
    """Run the command and return its exit code."""
    if options.output.suffix != ".pt2":
        return fail("export", f"{options.output} must end in .pt2, as exported programs of torch do", USAGE)
    try:
        schema = Schema.read(options.schema) if options.schema else None
        loaded = load_model(options.folder, options.model, schema, device=select_device(options.device))
    except (ValueError, RuntimeError, OSError, ImportError) as error:
        return fail("export", error, NO_PACKAGE if isinstance(error, ImportError) else USAGE)
    try:
        paths = export(loaded, options.output)
    except (RuntimeError, OSError) as error:
        return fail("export", error, FAILED)
    print(printable(f"{loaded.path.name}, {loaded.events:,} events: {', '.join(map(os.fspath, paths))}"))
    return DONE
