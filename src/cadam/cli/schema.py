"""The command `cadam schema`: infers a schema and writes it as JSON."""

from __future__ import annotations

import argparse

from ..online import run_config
from ..printable import printable, shell_word
from . import writable_paths
from .exit_codes import DONE, FAILED, NO_PACKAGE, USAGE, fail


def run(options: argparse.Namespace) -> int:
    """Print the inferred schema with the reason for each column, and write it to `--output`."""
    try:
        uri = run_config.data_uri(options)
        writable_paths.check_file(options.output, "--output")
        inferred = run_config.infer_schema(uri, options)
    except (ValueError, OSError, ImportError) as error:
        return fail("schema", error, NO_PACKAGE if isinstance(error, ImportError) else USAGE)
    run_config.print_inferred(inferred)
    text = inferred.schema.to_json(ignored=inferred.ignored())
    if options.output.is_file() and not options.force and options.output.read_bytes() != text.encode():
        advice = "Name another --output, or replace the file with --force"
        error_text = f"{options.output} exists and differs from the inferred schema, so it was not changed. {advice}"
        return fail("schema", error_text, USAGE)
    try:
        inferred.schema.write(options.output, ignored=inferred.ignored())
    except OSError as error:
        return fail("schema", f"{options.output} cannot be written: {error}", FAILED)
    command = f"cadam run {shell_word(options.place or options.data)} --schema {shell_word(options.output)}"
    print(f"The schema was written to {printable(options.output)}. Edit it if needed, then: {command}")
    return DONE
