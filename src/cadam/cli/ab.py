"""`cadam ab`: compare optimizers on a user's own stream and model."""

from __future__ import annotations

import argparse
import hashlib
import itertools
import json
import math
import re
import shutil
import sys
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import redirect_stdout, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from filelock import FileLock

from ..ab.analysis import MIN_WARM_UP
from ..ab.comparison import RunFailedError, compare
from ..ab.report import palette
from ..ab.report.console import result_lines, show_progress
from ..ab.report.page import render_page
from ..ab.result import Result, as_plain
from ..ab.runner import CacheError, RunCache, StudyRunner
from ..ab.stream import EncodedStream, encode_stream
from ..ab.study import Study
from ..ab.text import count, join_words
from ..ab.wording import action, headline, reasons, summary, warnings
from ..atomic_write import replace_file
from ..online import run_config
from ..online.data import simulation
from ..online.data.events import Batch
from ..online.data.label_source import open_with_labels
from ..online.data.schema import Schema
from ..online.data.sources import Source, open_source, resolve_uri
from ..online.data.validation import check_columns
from ..online.labels.join import LabelOptions
from ..online.models.model_file import LOG_LOSS, OptimizerSpec, accepts_weight, imported_files
from ..online.monitoring.reject_limit import EVENTS_PER_CHECK, rejected_share
from ..online.monitoring.rejection_reasons import format_reasons, generalize_reason, suggest_fix
from ..online.per_event import CHUNK_SIZE, WEIGHTED, PerEventTraining
from ..online.sparse_checks import disable_sparse_checks
from ..printable import printable, printable_lines, shell_word
from .ab_arguments import MAX_REJECTED, add_study_arguments
from .arguments import OWN_MODEL_BATCH_SIZE, add_label_arguments, check_label_arguments
from .exit_codes import DISK_IS_FULL, DONE, FAILED, NO_PACKAGE, USAGE, fail, interrupt_code
from .writable_paths import check_file, check_folder

FOLDER = Path("ab")
"""The folder in which each comparison has its own folder."""
COUNT_INTERVAL = 10.0
"""Seconds between lines of progress while events are counted."""
SHARED_OPTIONS = ("label", "user", "time", "id", "ignore", "schema", "model", "width", "hidden", "device", "labels")
"""Options about data and model that `cadam run` shares."""
LABEL_OPTIONS = ("horizon", "unmatched", "early_positives", "capacity")
"""Options about late labels that `cadam run` shares: the fields of `LabelOptions`."""


class TooManyRejectedError(ValueError):
    """A larger share of the events is rejected than `--max-rejected` allows."""


@dataclass(frozen=True)
class Comparison:
    """A comparison as the command line asks for it."""

    study: Study
    schema: Schema
    resume_command: str
    """The command that continues the comparison."""
    model_bytes: int
    """The size of the parameters of the model."""

    @property
    def title(self) -> str:
        """The title of the page."""
        return f"{' against '.join(reversed(self.study.arms))} on {run_config.displayed_uri(self.study.data)}"


def run(options: argparse.Namespace) -> int:
    """Run `cadam ab` and return its exit code."""
    # With --json, standard output has the JSON alone, so messages go to standard error. So does text of the model.
    messages = sys.stderr if options.json else sys.stdout
    disable_sparse_checks()
    try:
        check_folder(options.cache, "--cache")
        if options.output is not None:
            check_file(options.output, "--output")
            # The numbers and the schema are written under the same name as JSON.
            if options.output.suffix.lower() != ".html":
                raise ValueError(f"--output {options.output}: the report is a page, so its name must end in .html")
        with redirect_stdout(messages):
            comparison = prepare(options)
            study = comparison.study
            folder = FOLDER / f"{run_config.short_name(study.data)}-{study.identity}"
            output = options.output or folder / "report.html"
            check_replaces_nothing(output, comparison)
            check_file(output, "--output")
            cache = RunCache(options.cache, study)
            runner = StudyRunner(study, cache, options.threads, comparison.model_bytes)
            if options.force:
                runner.forget()
            stream = read_stream(comparison, cache, options)
            if not _is_in_files(options, study.data):
                cache.content = stream.digest()
                if options.force:
                    runner.forget_scores()
    except ImportError as error:
        return fail("ab", error, NO_PACKAGE)
    except TooManyRejectedError as error:
        return fail("ab", error, FAILED)
    except CacheError as error:
        return fail("ab", f"{error}. Free some space, or give another --cache", FAILED)
    except (ValueError, OSError, AttributeError) as error:
        return fail("ab", error, USAGE)
    try:
        with redirect_stdout(messages):
            result = compute(comparison, stream, runner, options)
    except RunFailedError as error:
        print(printable_lines(str(error)), file=sys.stderr)
        return fail("ab", "a run failed; the others have recorded their scores", FAILED)
    except CacheError as error:
        advice = "Recorded scores are kept: free some space, and the same command continues from there"
        return fail("ab", f"{error}. {advice}", FAILED)
    except KeyboardInterrupt as error:
        text = "interrupted: recorded scores are kept, and this command continues from there:"
        print(f"{text}\n  {printable(comparison.resume_command)}", file=sys.stderr)
        return interrupt_code(error)
    runner.delete_checkpoints()
    numbers = as_json(comparison, result, output, options)
    with redirect_stdout(messages):
        # The report is written before anything is printed, because the reader of the output may close it.
        try:
            size = write_report(comparison, result, numbers, output)
        except OSError as error:
            advice = "the scores are kept, and the same command writes the report"
            return fail("ab", f"the report cannot be written: {error}; {advice}", FAILED)
        if not options.json:
            print("", *result_lines(result), sep="\n")
        print(f"\nreport: {printable(output)} ({size / 1e6:.2f} MB)")
        if numbers["run"]:
            print(f"to learn with {result.recommended} from now on:\n  {numbers['run']}")
    if options.json:
        print(json.dumps(numbers, indent=1, allow_nan=False))
    return FAILED if any(pair.kind == "diverged" for pair in result.pairs) else DONE


def compute(comparison: Comparison, stream: EncodedStream, runner: StudyRunner, options: argparse.Namespace) -> Result:
    """Run the comparison, show its progress unless the output is JSON, and return the result."""
    if options.json:
        analysis = compare(comparison.study, stream, runner, full=options.full)
    else:
        with show_progress() as notify:
            analysis = compare(comparison.study, stream, runner, full=options.full, notify=notify)
    return analysis.result(runner.seconds)


def as_json(comparison: Comparison, result: Result, output: Path, options: argparse.Namespace) -> dict[str, Any]:
    """Return everything that is known about a comparison, for JSON."""
    verdicts = [
        {
            "arm": pair.arm,
            "action": action(pair, result),
            "headline": headline(pair, result),
            "summary": summary(pair, result),
            "reasons": reasons(pair, result),
        }
        for pair in result.pairs
    ]
    return {
        "identity": comparison.study.identity,
        "title": comparison.title,
        "command": comparison.resume_command,
        "run": learning_command(options, comparison.study, result),
        "report": str(output),
        "recommended": result.recommended,
        "verdicts": verdicts,
        "warnings": warnings(result),
        "ranking": result.ranking,
        "judged_events": result.judged_events,
        "complete": result.is_complete,
        **as_plain(result),
    }


def write_report(comparison: Comparison, result: Result, numbers: Mapping[str, Any], output: Path) -> int:
    """Write the page, its numbers and the schema; return the size of the page in bytes."""
    page = render_page(comparison.title, comparison.study, result, comparison.resume_command, numbers["run"]).encode()
    output.parent.mkdir(parents=True, exist_ok=True)
    schema_path = output.with_suffix(".schema.json")
    if not _has_schema(schema_path, comparison.schema):
        comparison.schema.write(schema_path)
    replace_file(output, page)
    replace_file(output.with_suffix(".json"), f"{json.dumps(numbers, indent=1, allow_nan=False)}\n".encode())
    return len(page)


def check_replaces_nothing(output: Path, comparison: Comparison) -> None:
    """Raise ValueError if the report would replace a file that is not a report of the same comparison."""
    numbers_path, schema_path = output.with_suffix(".json"), output.with_suffix(".schema.json")
    data = {path.resolve() for path in _data_files(comparison.study.data)}
    for path in (output, numbers_path, schema_path):
        if path.resolve() in data:
            raise ValueError(f"{path} is the data, and would be replaced by the report: choose another --output")
    try:
        is_same = json.loads(numbers_path.read_text(encoding="utf-8"))["identity"] == comparison.study.identity
    except (OSError, ValueError, KeyError, TypeError):
        is_same = False
    if is_same:
        return
    existing = [path for path in (output, numbers_path) if path.exists()]
    if schema_path.exists() and not _has_schema(schema_path, comparison.schema):
        existing.append(schema_path)
    if existing:
        names = join_words(map(str, existing))
        verb = "exists and is not a report" if len(existing) == 1 else "exist and are not reports"
        raise ValueError(f"{names} {verb} of this comparison: move the file, or choose another --output")


def _has_schema(path: Path, schema: Schema) -> bool:
    """Return whether a file has this schema; it may have comments that another file would not have."""
    try:
        return Schema.read(path) == schema
    except (OSError, ValueError):
        return False


def prepare(options: argparse.Namespace) -> Comparison:
    """Check the options and return the comparison.

    Raises:
        ValueError: If an option or the data does not fit.
    """
    uri = run_config.data_uri(options)
    if uri.partition(":")[2] == "-":
        raise ValueError("standard input can be read only once, and an A/B may have to read it again: use a file")
    check_label_arguments(options)
    if options.labels is not None and options.delay is not None:
        raise ValueError("--delay simulates late labels, but --labels has real ones: leave out one of them")
    arms, grid = _parse_arms(options.arms), tuple(sorted(set(map(_parse_rate, options.lr.split(",")))))
    if not 0 <= options.matters < math.inf:
        raise ValueError(f"--matters must be 0 or more, and finite, got {options.matters:g}")
    config = run_config.read_config(options)
    schema = config.schema
    simulated = _simulated_changes(options, schema)
    source = open_source(uri, schema, batch_size=options.batch_size, patience=None)
    check_columns(source, schema, has_label_source=options.labels is not None)
    late_labels = _changed_label_options(options)
    if options.labels is not None:
        open_labels(source, options.labels, schema, options.batch_size)
    if schema.weight is not None and not accepts_weight(config.loss):
        raise ValueError("the schema names a weight, so the loss must take it: def loss(scores, labels, weight)")
    if options.early_positives and config.loss is not LOG_LOSS:
        raise ValueError("--early-positives needs the log loss, and the model file defines another loss")
    model = config.build_model()
    for arm in arms:
        optimizer = OptimizerSpec.parse(arm).build(model, grid[0])
        compiled = PerEventTraining.create(model, optimizer, config.loss) if options.batch_size == 1 else None
        if compiled is not None and schema.weight is not None:
            compiled = WEIGHTED
        if isinstance(compiled, str):
            print(f"{arm} learns {compiled}; that is hundreds of times slower than compiled code")
    if schema.user is None and options.metric == "gauc":
        print("the schema has no user: GAUC is then the AUC of all events together")
    model_file = config.model.rpartition(":")[0]
    study = Study(
        data=uri,
        arms=arms,
        model=config.model,
        batch_size=options.batch_size,
        grid=grid,
        seeds=options.seeds,
        metric=options.metric,
        matters=options.matters,
        blocks=options.blocks,
        settings={
            "schema": schema.settings(),
            "events": options.events,
            **simulated,
            **({"model file": _digest_model(Path(model_file))} if model_file else config.settings),
            "data": digest_data(uri),
            **({} if options.labels is None else {"labels": digest_data(resolve_uri(options.labels))}),
            **({"late labels": late_labels} if late_labels else {}),
            # Other devices add numbers in another order, so scores on the CPU are not those on CUDA.
            **({} if config.device is None or config.device.type == "cpu" else {"device": str(config.device)}),
        },
    )
    model_bytes = sum(parameter.nbytes for parameter in model.parameters())
    return Comparison(study, schema, resume_command(options, uri), model_bytes)


def _parse_arms(text: str) -> tuple[str, ...]:
    # A comma inside an option, as in betas=(0.9,0.99), is followed by a number.
    arms = tuple(str(OptimizerSpec.parse(arm)) for arm in re.split(r",(?!\s*[-.\d])", text))
    if len(arms) < 2:
        raise ValueError(f"--arms needs two or more optimizers, got {text!r}")
    if repeated := [arm for arm, count in Counter(arms).items() if count > 1]:
        raise ValueError(f"--arms needs different optimizers, and has {repeated[0]} more than once")
    if len(arms) > len(palette.SERIES):
        raise ValueError(f"--arms takes up to {len(palette.SERIES)} optimizers, got {len(arms)}")
    return arms


def _parse_rate(text: str) -> float:
    try:
        rate = float(text)
    except ValueError:
        raise ValueError(f"--lr must be numbers, as in 0.01,0.1; got {text!r}") from None
    if not 0 < rate < math.inf:
        raise ValueError(f"--lr: learning rates must be above 0 and finite, got {text!r}")
    return rate


def _changed_label_options(options: argparse.Namespace) -> dict[str, Any]:
    """Return the options about late labels that are not the default."""
    parser = argparse.ArgumentParser()
    add_label_arguments(parser)
    values = {name: getattr(options, name) for name in LABEL_OPTIONS}
    return {name: value for name, value in values.items() if value != parser.get_default(name)}


def open_labels(source: Source, labels: str, schema: Schema, batch_size: int) -> Source:
    """Merge a source of labels with a source of events."""
    uri = resolve_uri(labels)
    return open_with_labels(source, uri, schema, batch_size=batch_size, follow=False, patience=None)


def _simulated_changes(options: argparse.Namespace, schema: Schema) -> dict[str, Any]:
    """Return the simulated changes of the stream, as settings."""
    if options.delay is not None and not options.delay > 0:
        raise ValueError(f"--delay must be above 0, got {options.delay:g}")
    simulated: dict[str, Any] = {}
    if options.change is not None:
        sizes = {
            name: kind.size
            for name, kind in schema.kinds.items()
            if kind.size and not kind.length and kind.id_options is None
        }
        if options.change not in sizes:
            raise ValueError(
                f"--change needs a categorical feature, got {options.change!r}; there are {', '.join(sizes)}"
            )
        simulated["change"] = {"feature": options.change, "size": sizes[options.change]}
    if options.noise is not None:
        simulated["noise"] = options.noise
    if options.delay is not None:
        simulated["delay"] = options.delay
    return simulated


def read_stream(comparison: Comparison, cache: RunCache, options: argparse.Namespace) -> EncodedStream:
    """Read and encode the stream, unless the cache has it.

    Raises:
        TooManyRejectedError: If no event can be used, or more are rejected than `--max-rejected` allows.
        CacheError: If the disk is full.
        ValueError: If labels are not 0 or 1, or there are too few of them.
    """
    study, folder = comparison.study, cache.stream_folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(_lock_path(folder)):  # another comparison may encode the same stream at the same time
        # Data that are not in files may have changed since they were encoded.
        if EncodedStream.is_complete(folder) and _is_in_files(options, study.data):
            stream = EncodedStream(folder)
        else:
            reader = StreamReader(comparison, options)
            try:
                label_options = LabelOptions(**study.settings.get("late labels", {}))
                stream = encode_stream(reader.batches(), folder, study.is_per_event, label_options)
            except BaseException as error:
                _remove_stream(folder, options.cache)
                if isinstance(error, OSError) and error.errno in DISK_IS_FULL:
                    raise CacheError(f"the encoded stream cannot be written to {folder}: {error}") from error
                raise
            reader.report_rejected()
    judged = stream.judged
    labeled, positive = len(judged.labels), int(judged.labels.sum())
    if labeled < 2 * MIN_WARM_UP or positive in (0, labeled):
        _remove_stream(folder, options.cache)
        if labeled < 2 * MIN_WARM_UP:
            lack = f"{2 * MIN_WARM_UP:,} labeled events; {study.data} has {labeled:,} of {stream.events:,}"
            advice = "Use more events" if labeled == stream.events else "Check --label"
        else:
            lack = f"both kinds of label; all {labeled:,} labels of {study.data} are {int(positive > 0)}"
            advice = "Check --label"
        raise ValueError(f"an A/B needs {lack}. {advice}")
    runs = len(study.arms) * len(study.grid) * study.seeds
    print(
        f"{stream.events:,} events. {join_words(study.arms)} run at {count(len(study.grid), 'learning rate')} "
        f"under {count(study.seeds, 'seed')} ({runs} runs) until there is a verdict. To be quicker: --events N, "
        "--seeds N, fewer --lr"
    )
    return stream


def _lock_path(folder: Path) -> Path:
    """Return the path of the lock of an encoded stream."""
    return folder.with_name(f"{folder.name}.lock")


def _remove_stream(folder: Path, cache: Path) -> None:
    """Remove an encoded stream, and the folders of the cache if they are empty then."""
    shutil.rmtree(folder, ignore_errors=True)
    with suppress(OSError):
        _lock_path(folder).unlink(missing_ok=True)
        folder.parent.rmdir()
        cache.rmdir()


class StreamReader:
    """Reads the stream of a comparison and counts what cannot be used.

    Args:
        comparison: The comparison.
        options: The options of the command.
    """

    def __init__(self, comparison: Comparison, options: argparse.Namespace) -> None:
        self.comparison, self.options = comparison, options
        self.events, self.first_reject = 0, ""
        self.reasons: Counter[str] = Counter()

    def batches(self) -> Iterator[Batch]:
        """Yield the batches of the stream, with its simulated changes, up to `--events`.

        Raises:
            TooManyRejectedError: If most of the first events are rejected.
        """
        study, options = self.comparison.study, self.options
        limit = math.inf if options.events is None else options.events
        learns_at_once = self.comparison.schema.id is None and options.horizon == math.inf
        size = CHUNK_SIZE if study.is_per_event and learns_at_once else options.batch_size
        last_print = time.monotonic()
        for batch in self._open(size):
            if self.events >= limit:
                break
            if time.monotonic() - last_print > COUNT_INTERVAL:
                last_print = time.monotonic()
                print(f"reading: {self.events:,} events so far; --events N uses only the first N", flush=True)
            if not isinstance(batch, Batch):
                continue
            for record in batch.rejected:
                self.reasons[generalize_reason(record.reason)] += record.events
            if batch.rejected and not self.first_reject:
                self.first_reject = f"the first, {batch.rejected[0].where}: {batch.rejected[0].reason}"
            if batch.events is not None and study.is_per_event and self.events + len(batch.events) > limit:
                batch = replace(batch, events=batch.events.take(slice(int(limit) - self.events)))
            self.events += 0 if batch.events is None else len(batch.events)
            yield replace(batch, rejected=[])
            if self.events + self.reasons.total() >= EVENTS_PER_CHECK and self.reasons.total() > self.events:
                break  # most events are rejected, so the rest is not worth reading
        self._check_rejected()

    def _open(self, size: int) -> Source:
        study, settings = self.comparison.study, self.comparison.study.settings
        source = open_source(study.data, self.comparison.schema, batch_size=size, patience=None)
        if self.options.labels is not None:
            source = open_labels(source, self.options.labels, self.comparison.schema, size)
        if change := settings.get("change"):
            events = self.options.events or sum(
                len(batch.events) for batch in source if isinstance(batch, Batch) and batch.events is not None
            )
            source = open_source(study.data, self.comparison.schema, batch_size=size, patience=None)
            if self.options.labels is not None:
                source = open_labels(source, self.options.labels, self.comparison.schema, size)
            times = [events // 3, 2 * events // 3]
            source = simulation.SuddenChange(source, change["feature"], change["size"], times)
        if noise := settings.get("noise"):
            source = simulation.LabelNoise(source, noise)
        if delay := settings.get("delay"):
            source = simulation.LabelDelay(source, delay)
        return source

    def _check_rejected(self) -> None:
        uri, rejected = self.comparison.study.data, self.reasons.total()
        if rejected and not self.events:
            raise TooManyRejectedError(f"none of {rejected:,} events of {uri} can be used; {self.first_reject}")
        if rejected_share(rejected, self.events) > self.options.max_rejected:
            advice = suggest_fix(self.reasons, self.comparison.schema)
            raise TooManyRejectedError(f"{self._rejected_text()}. {advice[:1].upper()}{advice[1:]}")

    def _rejected_text(self) -> str:
        rejected = self.reasons.total()
        share = rejected_share(rejected, self.events)
        return (
            f"{rejected:,} of {self.events + rejected:,} events ({share:.1%}) of {self.comparison.study.data} cannot "
            f"be used: {format_reasons(self.reasons)}; {self.first_reject}"
        )

    def report_rejected(self) -> None:
        """Print how many events were left out, and why."""
        if self.reasons:
            print(printable(f"left out: {self._rejected_text()}"))


def resume_command(options: argparse.Namespace, uri: str) -> str:
    """Return the command that continues a comparison."""
    parser = argparse.ArgumentParser()
    add_study_arguments(parser)
    words = ["--data", uri]
    names = [action.dest for action in parser._actions if action.dest not in ("help", "place", "data")]
    changed = [name for name in names if getattr(options, name) != parser.get_default(name)]
    for name in (*changed, "seeds", "cache", *(["output"] if options.output else [])):
        value = getattr(options, name)
        words += [f"--{name.replace('_', '-')}", *([] if value is True else [str(value)])]
    return " ".join(["cadam ab", *map(shell_word, words)])


def learning_command(options: argparse.Namespace, study: Study, result: Result) -> str:
    """Return the `cadam run` command that learns with the recommended arm; empty if no model learned anything."""
    if result.warm_up is None:
        return ""
    rate = result.arm(result.recommended).rate_to_use
    return _run_command(options, study.data, result.recommended, rate) if math.isfinite(rate) else ""


def _run_command(options: argparse.Namespace, uri: str, optimizer: str, lr: float) -> str:
    """Return the `cadam run` command for the same data and model."""
    is_own_model = options.model is not None and ":" in options.model
    values: dict[str, Any] = {name: getattr(options, name) for name in SHARED_OPTIONS} | _changed_label_options(options)
    # Without --batch-size, the batches of a ready-made model grow in cadam run, and those of the comparison do not.
    if not is_own_model or options.batch_size != OWN_MODEL_BATCH_SIZE:
        values["batch_size"] = options.batch_size
    if options.max_rejected != MAX_REJECTED:
        values["max_rejected"] = options.max_rejected
    if optimizer != "CAdam":
        values["optimizer"] = optimizer
    values["lr"] = f"{lr:g}"
    # It has its own folder, because the default one may contain a run with other options, now or later.
    folder = Path("runs", f"{run_config.short_name(uri)}-ab")
    numbered = (folder.with_name(f"{folder.name}-{number}") for number in itertools.count(2))
    values["checkpoint"] = next(path for path in itertools.chain([folder], numbered) if not path.exists())
    words = [options.place] if options.place is not None else ["--data", uri]
    for name, value in values.items():
        if value is not None:
            words += [f"--{name.replace('_', '-')}", *([] if value is True else [str(value)])]
    return " ".join(["cadam run", *map(shell_word, words)])


def _data_files(uri: str) -> list[Path]:
    """Return the files of a stream; none if the stream is not in files."""
    path = Path(uri.partition(":")[2])
    if path.is_file():
        return [path]
    return sorted(file for file in path.rglob("*") if file.is_file()) if path.is_dir() else []


def _is_in_files(options: argparse.Namespace, uri: str) -> bool:
    """Whether events and labels are in files, whose content is part of the settings."""
    return bool(_data_files(uri) and (options.labels is None or _data_files(resolve_uri(options.labels))))


def digest_data(uri: str) -> str:
    """Return a hash of the files of a stream, in a folder also of their paths: ``dt=2024-01-01`` is a column."""
    files, folder = _data_files(uri), Path(uri.partition(":")[2])
    return _digest(files, [str(file.relative_to(folder)) for file in files] if folder.is_dir() else ())


def _digest_model(file: Path) -> str:
    """Return a hash of a model file, and of the files in its folder that it imports."""
    others = imported_files(file)
    return _digest([file, *others], [str(other.relative_to(file.parent.resolve())) for other in others])


def _digest(paths: Sequence[Path], names: Sequence[str] = ()) -> str:
    """Return a hash of names and of the content of files, so that changed files lead to new results."""
    digest = hashlib.sha256(json.dumps(names).encode() if names else b"")
    for path in paths:
        with path.open("rb") as file:
            while chunk := file.read(1 << 20):
                digest.update(chunk)
    return digest.hexdigest()[:20]
