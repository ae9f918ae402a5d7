"""The command `cadam criteo`, which preprocesses Criteo's train.txt or generates a file in its format."""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

from cadam.ab.text import format_duration
from cadam.cli.exit_codes import DONE, FAILED, NO_DATA, NO_PACKAGE, USAGE, interrupt_code

from . import criteo_parser
from .criteo_dataset import cache_folder, find_source
from .criteo_writer import write
from .generator import Generated
from .preprocess import STAGES, BadLinesError, Manifest, SourceChangedError, Stage, preprocess

DESCRIPTION = """Preprocess Criteo's train.txt for the CTR prediction experiments.

The command reads the text once, counts the vocabularies on the training part of split x4 and writes every row as 39
ids. You can interrupt it at any time; the same command resumes. The file may be compressed with gzip. --generate writes
a file in Criteo's format instead, with simulated clicks."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `cadam criteo`."""
    parser.description = DESCRIPTION
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("path", type=Path, metavar="PATH", help="train.txt, train.txt.gz, or the folder of one")
    parser.add_argument("--rows", type=int, metavar="N", help="use only the first N lines")
    parser.add_argument("--generate", type=int, metavar="N", help="write N simulated lines to PATH and exit")
    parser.add_argument("--strict", action="store_true", help="fail on invalid lines (default: skip them)")
    parser.add_argument("--cache", type=Path, metavar="FOLDER", help="folder for the ids (default: PATH.cache)")


def run(options: argparse.Namespace) -> int:
    """Run `cadam criteo` and return the exit code."""
    if options.generate is not None and (options.rows is not None or options.strict or options.cache):
        return _fail("--generate cannot be combined with --rows, --strict or --cache", USAGE)
    try:
        if options.generate is not None:
            generate(options.path, options.generate)
            print(f"{options.path}: {options.generate:,} generated rows")
            return DONE
        source = find_source(options.path)
        folder = cache_folder(source, options.rows, options.cache)
        if isinstance(reason := criteo_parser.compiled(), str):
            print(f"cadam criteo: the text is parsed by pyarrow, which is slower: {reason}", file=sys.stderr)
        manifest = preprocess(source, folder, rows=options.rows, strict=options.strict, report=Progress())
    except (FileNotFoundError, PermissionError) as error:
        return _fail(error, NO_DATA)
    except ModuleNotFoundError as error:
        return _fail(error, NO_PACKAGE)
    except (BadLinesError, SourceChangedError, ValueError, RuntimeError, OSError) as error:
        return _fail(error, FAILED)
    except KeyboardInterrupt as error:
        if options.generate is not None:
            return _fail("interrupted: nothing was written", interrupt_code(error))
        return _fail("interrupted: finished work is kept; the same command resumes", interrupt_code(error))
    print("\n".join(summary(manifest, folder)))
    return DONE


def generate(path: Path, rows: int) -> None:
    """Write a file of simulated clicks. It gets its final name only when it is complete.

    Raises:
        FileExistsError: If the file exists.
    """
    if path.exists():
        raise FileExistsError(f"{path} exists already; it is not replaced, because it may be Criteo's original file")
    clicks, unfinished = Generated(rows), path.with_name(f"unfinished-{path.name}")
    try:
        write(clicks, unfinished)
        unfinished.replace(path)
    finally:
        unfinished.unlink(missing_ok=True)


def _fail(error: object, code: int) -> int:
    print(f"cadam criteo: {error}", file=sys.stderr)
    return code


class Progress:
    """Prints the progress of the preprocessing: one updated line on a terminal, otherwise a line every ten seconds."""

    def __init__(self) -> None:
        self.began: dict[Stage, tuple[float, float, int]] = {}
        """The time, the completed share and the number of rows at the first report of each stage."""
        self.last_output = 0.0
        self.on_terminal = sys.stderr.isatty()

    def __call__(self, stage: Stage, share: float, rows: int) -> None:
        """Print the completed share of a stage, the speed, and the time left, unless the last output is too recent."""
        now = time.monotonic()
        start, first_share, first_rows = self.began.setdefault(stage, (now, share, rows))
        if share < 1 and now - self.last_output < (0.2 if self.on_terminal else 10):
            return
        self.last_output = now
        line = f"{STAGES.index(stage) + 1} of {len(STAGES)}: {stage} {share:4.0%}, {rows:,} rows"
        if share < 1 and share > first_share:
            left = (now - start) * (1 - share) / (share - first_share)
            line += f", {(rows - first_rows) / max(now - start, 1e-9):,.0f} a second" if rows > first_rows else ""
            line += f", {format_duration(left)} left"
        end = "\n" if not self.on_terminal or share >= 1 else ""
        print(f"\r\033[K{line}" if self.on_terminal else line, end=end, file=sys.stderr, flush=True)


def summary(manifest: Manifest, folder: Path) -> list[str]:
    """Return the lines that describe a finished preprocessing: source, folder, warnings and invalid lines."""
    assert manifest.vocabulary is not None
    lines = [
        f"{manifest.source}: {manifest.rows:,} rows, {sum(manifest.vocabulary):,} ids in 39 fields, "
        f"sha256 {manifest.sha256}",
        f"written to {folder}",
    ]
    lines += [f"warning: {note}" for note in manifest.notes]
    if manifest.bad:
        lines.append(f"skipped {manifest.bad:,} invalid lines, which are listed in {folder / 'bad-lines.tsv'}")
        lines += [f"  {line}" for line in manifest.first_bad]
    return lines
