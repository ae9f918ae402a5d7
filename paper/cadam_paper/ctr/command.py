"""Preprocess Criteo's train.txt for the study of click-through rates, or generate a file like it."""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

from cadam.ab.text import format_duration
from cadam.cli.exit_codes import DONE, FAILED, INTERRUPTED, NO_DATA, NO_PACKAGE, USAGE

from . import criteo_parser
from .criteo_dataset import cache_folder, find_source
from .criteo_writer import write
from .generator import Generated
from .preprocess import STAGES, BadLinesError, Manifest, SourceChangedError, Stage, preprocess

DESCRIPTION = """Preprocess Criteo's train.txt for the study of click-through rates.

Reads the text once, counts vocabularies on the training part of split x4 and writes every row as 39 ids. Stop it as
you like: the same command goes on from there. The file may be gzipped. --generate writes a file of Criteo's format
instead, with clicks of a known teacher."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `cadam criteo`."""
    parser.description = DESCRIPTION
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("path", type=Path, metavar="PATH", help="train.txt, train.txt.gz, or the folder it is in")
    parser.add_argument("--rows", type=int, metavar="N", help="only the first N lines")
    parser.add_argument("--generate", type=int, metavar="N", help="write N generated lines to PATH, and do no more")
    parser.add_argument("--strict", action="store_true", help="refuse a file with bad lines (default: leave them out)")
    parser.add_argument("--cache", type=Path, metavar="FOLDER", help="where to write (default: PATH.cache)")


def run(options: argparse.Namespace) -> int:
    if options.generate is not None and (options.rows is not None or options.strict or options.cache):
        return _fail("--generate writes a file and does no more: leave --rows, --strict and --cache out", USAGE)
    try:
        if options.generate is not None:
            generate(options.path, options.generate)
            print(f"{options.path}: {options.generate:,} generated rows")
            return DONE
        source = find_source(options.path)
        folder = cache_folder(source, options.rows, options.cache)
        if isinstance(reason := criteo_parser.compiled(), str):
            print(f"cadam criteo: pyarrow reads the text, which takes longer: {reason}", file=sys.stderr)
        manifest = preprocess(source, folder, rows=options.rows, strict=options.strict, tell=Progress())
    except (FileNotFoundError, PermissionError) as error:
        return _fail(error, NO_DATA)
    except ModuleNotFoundError as error:
        return _fail(error, NO_PACKAGE)
    except (BadLinesError, SourceChangedError, ValueError, RuntimeError, OSError) as error:
        return _fail(error, FAILED)
    except KeyboardInterrupt:
        if options.generate is not None:
            return _fail("interrupted: nothing was written", INTERRUPTED)
        return _fail("interrupted: what is done is kept, the same command goes on from there", INTERRUPTED)
    print("\n".join(summary(manifest, folder)))
    return DONE


def generate(path: Path, rows: int) -> None:
    """Write generated clicks; the file is there when it is whole."""
    if path.exists():
        raise FileExistsError(f"{path} is there already: it may be Criteo's own")
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
    """A line of progress: rewritten on a terminal, else a new one every ten seconds."""

    def __init__(self) -> None:
        self.began: dict[Stage, tuple[float, float, int]] = {}
        self.shown = 0.0
        self.on_terminal = sys.stderr.isatty()

    def __call__(self, stage: Stage, share: float, rows: int) -> None:
        now = time.monotonic()
        start, first_share, first_rows = self.began.setdefault(stage, (now, share, rows))
        if share < 1 and now - self.shown < (0.2 if self.on_terminal else 10):
            return
        self.shown = now
        line = f"{STAGES.index(stage) + 1} of {len(STAGES)}: {stage} {share:4.0%}, {rows:,} rows"
        if share < 1 and share > first_share:
            left = (now - start) * (1 - share) / (share - first_share)
            line += f", {(rows - first_rows) / max(now - start, 1e-9):,.0f} a second" if rows > first_rows else ""
            line += f", {format_duration(left)} left"
        end = "\n" if not self.on_terminal or share >= 1 else ""
        print(f"\r\033[K{line}" if self.on_terminal else line, end=end, file=sys.stderr, flush=True)


def summary(manifest: Manifest, folder: Path) -> list[str]:
    """What was read, what was left out and why, and where it is."""
    assert manifest.vocabulary is not None
    lines = [
        f"{manifest.source}: {manifest.rows:,} rows, {sum(manifest.vocabulary):,} ids in 39 fields, "
        f"sha256 {manifest.sha256}",
        f"kept in {folder}",
    ]
    lines += [f"beware: {note}" for note in manifest.notes]
    if manifest.bad:
        lines.append(f"bad lines, left out: {manifest.bad:,}; all of them in {folder / 'bad-lines.tsv'}")
        lines += [f"  {line}" for line in manifest.first_bad]
    return lines
