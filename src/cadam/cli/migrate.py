"""The command `cadam migrate`: changes the columns or the optimizer of a saved state."""

from __future__ import annotations

import argparse

from ..online.models.model_file import OptimizerSpec, UsageError
from ..online.persistence.migration import Migration, change_schema
from ..printable import printable
from ..serving.migration import migrate_folder, migrate_state, read_model, read_state
from .exit_codes import DONE, FAILED, USAGE, fail


def run(options: argparse.Namespace) -> int:
    """Run the command and return its exit code."""
    folder = options.folder
    try:
        model, settings, schema = read_model(folder)
        changes = [dict(map(_split, each)) for each in (options.add, options.resize)]
        if not (options.add or options.drop or options.resize or options.optimizer or options.lr):
            raise UsageError("nothing is to change: give --add, --drop, --resize, --optimizer or --lr")
        new_schema = change_schema(schema, changes[0], options.drop, changes[1])
        spec = None if options.optimizer is None else OptimizerSpec.parse(options.optimizer)
        if options.lr is not None and not options.lr > 0:
            raise UsageError(f"--lr must be above 0, got {options.lr:g}")
        migration = Migration(model, settings, schema, new_schema, spec, options.lr)
        state = read_state(folder)
        _, stale = migrate_state(folder, migration, state)  # finds what cannot be migrated before anything is written
        for line in migration.describe(state, stale):
            print(printable(line))
        if options.dry_run:
            print("nothing was written")
            return DONE
    except (ValueError, OSError) as error:
        return fail("migrate", error, USAGE)
    try:
        backup = migrate_folder(folder, migration)
    except (ValueError, RuntimeError, OSError) as error:
        return fail("migrate", error, FAILED)
    print(printable(f"{folder} was migrated; the old state and its versions are in {backup}"))
    return DONE


def _split(text: str) -> tuple[str, str]:
    name, equals, kind = text.partition("=")
    if not equals or not name or not kind:
        raise UsageError(f"a column is given as NAME=KIND, as in user=hash:1000?; got {text!r}")
    return name, kind
