"""The commands `cadam list`, `reproduce`, `report` and `archive`."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Sequence
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np

from cadam.ab.text import format_duration
from cadam.cli.arguments import positive_int
from cadam.cli.exit_codes import DONE, FAILED, NO_DATA, NO_PACKAGE, NOTHING, USAGE, interrupt_code

from . import catalog
from .harness import command, console, report, runner
from .harness.archive import PYARROW_ADVICE, Archive, DamagedArchiveError
from .harness.cache import Cache
from .harness.experiment import Data, Experiment, Plan, Scale
from .harness.learning_rates import NoLearningRateError
from .harness.measured_runs import DamagedResultError
from .harness.results import Result, Results
from .harness.time_limit import TimeLimit

SCALES: tuple[Scale, ...] = ("quick", "full")
HEADING = report.Heading(
    "CAdam: the paper's claims, measured",
    (
        "CAdam updates an element only if its momentum and its current gradient agree in sign. This page shows all "
        "measurements, including those that do not support the paper's claims.",
    ),
    (
        "The paper: “CAdam: Confidence-Based Optimization for Online Learning” by Shaowen Wang, Anan Liu, Jian Xiao, "
        "Huan Liu, Yuekui Yang, Cong Xu, Qianqian Pu, Suncong Zheng, Di Wang, Jie Jiang, Wei Zhang and Jian Li.",
    ),
)


def _add_shared_arguments(parser: argparse.ArgumentParser) -> None:
    parser.epilog = command.EXIT_CODES
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    command.cache_arguments(parser)
    parser.add_argument(
        "--archive",
        type=Path,
        default=Path(os.environ.get("CADAM_ARCHIVE", "results")),
        metavar="FOLDER",
        help="folder of the published results, which are not computed again (default: $CADAM_ARCHIVE, else results)",
    )


def _cache(options: argparse.Namespace) -> Cache:
    """Open the cache of local results, backed by the published results if pyarrow is installed."""
    folder: Path = options.archive
    if find_spec("pyarrow") is None and any(folder.glob("*.parquet")):
        print(f"the published results in {folder} are not used: {PYARROW_ADVICE}", file=sys.stderr)
        return Cache(options.cache)
    return Cache(options.cache, Archive(folder))


def add_list_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `cadam list`."""
    _add_shared_arguments(parser)
    parser.add_argument("--json", action="store_true", help="print JSON")


def add_reproduce_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `cadam reproduce`."""
    _add_shared_arguments(parser)
    parser.add_argument("names", nargs="+", metavar="NAME", help="names of experiments (see `cadam list`), or all")
    _scale_arguments(parser, default="--quick")
    parser.add_argument("--data", type=Path, metavar="PATH", help="your own data, such as Criteo's train.txt")
    parser.add_argument("--rows", type=positive_int, metavar="N", help="number of rows to use (default: all)")
    parser.add_argument("--force", action="store_true", help="compute results again that exist already")
    parser.add_argument(
        "--jobs", type=positive_int, metavar="N", help="number of worker processes (default: chosen automatically)"
    )
    parser.add_argument(
        "--seconds",
        type=positive_int,
        metavar="N",
        help="start no run that is unlikely to end within N seconds; the same command continues (default: no limit)",
    )
    output = parser.add_mutually_exclusive_group()
    output.add_argument("--json", action="store_true", help="print only the verdicts and tables, as JSON")
    output.add_argument("--quiet", action="store_true", help="print only errors")


def _scale_arguments(parser: argparse.ArgumentParser, default: str) -> None:
    scale = parser.add_mutually_exclusive_group()
    quick, full = f"small models and few seeds (default: {default})", "the paper's models and all seeds"
    scale.add_argument("--quick", dest="scale", action="store_const", const="quick", help=quick)
    scale.add_argument("--full", dest="scale", action="store_const", const="full", help=full)
    parser.add_argument("--seeds", type=positive_int, metavar="N", help="number of seeds")


def add_report_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `cadam report`."""
    _add_shared_arguments(parser)
    parser.add_argument("names", nargs="*", metavar="NAME", help="experiments to report (default: all requested ones)")
    _scale_arguments(parser, default="what was last run")
    command.output_argument(parser)
    parser.add_argument("--title", metavar="TEXT", help="title of the page (default: the title of a single experiment)")
    parser.add_argument("--images", type=Path, metavar="FOLDER", help="also write each figure to this folder as PNG")


def add_archive_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `cadam archive`."""
    _add_shared_arguments(parser)
    parser.add_argument("names", nargs="+", metavar="NAME", help="names of experiments (see `cadam list`)")
    _scale_arguments(parser, default="what was last run")
    parser.add_argument("--dirty", action="store_true", help="also archive results computed by uncommitted code")


# list ----------------------------------------------------------------------------------------------------------


def list_experiments(options: argparse.Namespace) -> int:
    """Print every experiment with its data, cost and state, and return the exit code."""
    cache = _cache(options)
    rows: list[dict[str, Any]] = []
    for experiment in catalog.select(["all"]):
        request = _load_results(cache, experiment, _last_plan(cache, experiment) or experiment.plan("quick"))
        rows.append(
            {
                "name": experiment.name,
                "title": experiment.title,
                "shows": experiment.shows,
                "data": {scale: _describe_data(experiment.required_data(scale)) for scale in SCALES},
                "cuda": list(experiment.cuda),
                "state": console.describe_state(experiment, request, _count_published(request, cache)),
                "seconds": dict(experiment.seconds),
            }
        )
    if options.json:
        command.print_lines([json.dumps(rows, indent=1)])
        return DONE
    width = max(len(row["name"]) for row in rows)
    lines = []
    for row in rows:
        lines.append(f"{row['name']:{width}}  {row['title']}: {row['shows']}")
        lines.append(f"{'':{width}}  {row['state']}")
        for scale in SCALES:
            needs = f"needs {data}" if (data := row["data"][scale]) else "needs no data"
            device = " on a CUDA device" if scale in row["cuda"] else ""
            lines.append(f"{'':{width}}  --{scale}: about {format_duration(row['seconds'][scale])}{device}, {needs}")
        lines.append("")
    command.print_lines([*lines, "`cadam reproduce NAME` computes an experiment, `cadam report` shows the results."])
    return DONE


def _describe_data(data: Data | None) -> str | None:
    return None if data is None else f"{data.name} (from {data.source}, {data.size})"


def _last_plan(cache: Cache, experiment: Experiment, scale: Scale | None = None) -> Plan | None:
    """Return the last requested plan of an experiment, or None.

    If the stored plan cannot be read, print that and return the default plan of the scale.
    """
    try:
        return cache.last_plan(experiment, scale)
    except (DamagedResultError, DamagedArchiveError) as error:
        print(f"damaged: {error}", file=sys.stderr)
        return experiment.plan(scale or "quick")


def _requested_plan(cache: Cache, experiment: Experiment, options: argparse.Namespace) -> Plan:
    """Return the plan that --quick, --full and --seeds select.

    Without these options it is the last requested plan. With them it is the last requested plan of that scale, with the
    given number of seeds.
    """
    if not options.scale and not options.seeds:
        return _last_plan(cache, experiment) or experiment.plan("quick")
    plan = experiment.plan(options.scale or "quick", options.seeds)
    return replace(_last_plan(cache, experiment, plan.scale) or plan, seeds=plan.seeds)


def _load_results(cache: Cache, experiment: Experiment, plan: Plan) -> runner.Request:
    """Load the existing results of an experiment without computing anything."""
    try:
        if experiment.unread is not None and (advice := experiment.unread(plan)):
            return runner.Request(experiment, plan, unknown=advice)
        return runner.read(cache, experiment, plan, console.report_damaged)
    except (
        OSError,
        ValueError,
        RuntimeError,
        ImportError,
    ) as error:  # for example, because the user deleted a data file
        return runner.Request(experiment, plan, unknown=str(error))


# reproduce -----------------------------------------------------------------------------------------------------


def reproduce(options: argparse.Namespace) -> int:
    """Compute the results of experiments that are missing, print the summaries, and return the exit code."""
    try:
        experiments = _select(options.names, options.scale or "quick")
    except catalog.UnknownExperimentError as error:
        print(f"cadam reproduce: {error}", file=sys.stderr)
        return USAGE
    fixed = [e.name for e in experiments if not e.takes_data]
    if fixed and (options.data or options.rows):
        print(f"cadam reproduce: {', '.join(fixed)} cannot be run with --data or --rows", file=sys.stderr)
        return USAGE
    if not command.can_write("reproduce", cache=options.cache):
        return USAGE
    user_data = "" if options.data is None else str(options.data.absolute())
    plans = [e.plan(options.scale or "quick", options.seeds, user_data, options.rows) for e in experiments]
    requests = [runner.Request(e, plan) for e, plan in zip(experiments, plans, strict=True)]
    # Missing data, devices and packages matter only for experiments that have results to compute.
    blocked = [
        r for r in requests if _missing_requirement(r.experiment, r.plan.scale) or _missing_packages(r.experiment)
    ]
    blocked = [r for r in blocked if not _is_complete(r, _cache(options), options.force)]
    if packages := list(dict.fromkeys(name for request in blocked for name in _missing_packages(request.experiment))):
        print(f"cadam reproduce: {', '.join(packages)} missing: pip install {' '.join(packages)}", file=sys.stderr)
        return NO_PACKAGE
    missing = [advice for r in blocked if (advice := _missing_data(r.experiment, r.plan.scale))]
    if names := [r.experiment.name for r in blocked if _lacks_device(r.experiment, r.plan.scale)]:
        missing.append(f"{', '.join(names)}: {_NO_CUDA}")
    if user_data and not options.data.exists():
        missing.append(f"there is no file or folder {user_data}")
    if missing:
        print("\n".join(dict.fromkeys(missing)), file=sys.stderr)
        return NO_DATA
    if user_data or options.rows:
        try:
            # Listing the runs reads the user's data, so errors in the data appear before any run starts.
            requests[0].experiment.run_specs(requests[0].plan, Results())
        except (OSError, ValueError, RuntimeError, ImportError) as error:
            print(f"cadam reproduce: {error}", file=sys.stderr)
            return NO_DATA if user_data else USAGE
        except KeyboardInterrupt as error:
            print("interrupted: the data read so far is kept; the same command continues from there", file=sys.stderr)
            return interrupt_code(error)
    display = console.live if console.supports_live_display() else console.plain
    if options.quiet or options.json:
        display = console.silent
    try:
        with display(requests) as notify:
            limit = TimeLimit(options.seconds)
            code = command.run(requests, _cache(options), options.jobs, options.force, notify, limit)
    except PermissionError as error:
        print(f"cadam reproduce: the cache cannot be written to: {error}", file=sys.stderr)
        return FAILED
    except NoLearningRateError as error:
        print(f"cadam reproduce: {error}; finished runs are cached", file=sys.stderr)
        return FAILED
    if options.json:
        command.print_lines([json.dumps([command.as_json(request) for request in requests], indent=1, allow_nan=False)])
    elif not options.quiet:
        lines = [line for request in requests for line in command.summary_lines(request, options.cache)]
        lines += ["", *_from_archive(requests, _cache(options)), "`cadam report` shows all numbers and figures."]
        command.print_lines(lines)
    return code


def _from_archive(requests: Sequence[runner.Request], cache: Cache) -> list[str]:
    """Return a line for each experiment that uses results of the archive, with their number."""
    lines = []
    for request in requests:
        if published := _count_published(request, cache):
            lines.append(
                f"{request.experiment.name}: {published} of {len(request.results)} results come from the archive of "
                "published results; --force computes them again."
            )
    return lines


def _count_published(request: runner.Request, cache: Cache) -> int:
    """Count the results that come from the archive rather than from the local cache."""
    return sum(not cache.path(request.experiment, result.spec).exists() for result in request.results)


_NO_CUDA = "this scale needs a CUDA device and torch does not find one; --quick runs on the CPU"


def _missing_requirement(experiment: Experiment, scale: Scale) -> str | None:
    """Return what to do about missing data or a missing CUDA device, or None if nothing is missing."""
    return _missing_data(experiment, scale) or (_NO_CUDA if _lacks_device(experiment, scale) else None)


def _missing_data(experiment: Experiment, scale: Scale) -> str | None:
    """Return where to get the data of an experiment, or None if nothing is missing."""
    data = experiment.required_data(scale)
    return None if data is None else data.missing()


def _lacks_device(experiment: Experiment, scale: Scale) -> bool:
    """Return whether the experiment needs a CUDA device although torch finds none."""
    import torch

    return scale in experiment.cuda and not torch.cuda.is_available()


def _missing_packages(experiment: Experiment) -> list[str]:
    """Return the names of required packages that are not installed."""
    return [name for name in experiment.packages if find_spec(name) is None]


def _is_complete(request: runner.Request, cache: Cache, force: bool) -> bool:
    """Return whether all results exist; False if only reading the user's data could show this."""
    experiment, plan = request.experiment, request.plan
    if force:
        return False
    try:
        unread = experiment.unread is not None and experiment.unread(plan) is not None
        return not unread and runner.read(cache, experiment, plan).complete
    except (OSError, ValueError):  # the user's data is missing or cannot be read
        return False


def _select(names: Sequence[str], scale: Scale) -> list[Experiment]:
    """Return the experiments with these names.

    The name `all` selects the experiments whose data and device are available; the others are printed.
    """
    selected, skipped = [], dict[str, list[str]]()
    for experiment in catalog.select(names):
        advice = _missing_requirement(experiment, scale)
        if experiment.name not in names and advice:
            skipped.setdefault(advice, []).append(experiment.name)
        else:
            selected.append(experiment)
    for advice, experiments in skipped.items():
        print(f"skipped: {', '.join(experiments)}: {advice}", file=sys.stderr)
    return selected


# report --------------------------------------------------------------------------------------------------------


def write_report(options: argparse.Namespace) -> int:
    """Write the HTML page of the existing results and return the exit code."""
    try:
        experiments = catalog.select(options.names or ["all"])
    except catalog.UnknownExperimentError as error:
        print(f"cadam report: {error}", file=sys.stderr)
        return USAGE
    if not command.can_draw():
        return NO_PACKAGE
    if not command.can_write("report", output=options.output, images=options.images):
        return USAGE
    cache = _cache(options)
    requests = _to_report(cache, experiments, options)
    unknown = [f"{request.experiment.name}: {request.unknown}" for request in requests if request.unknown]
    if unknown:
        print("\n".join(unknown), file=sys.stderr)
    if unknown and not any(request.results for request in requests):
        return NOTHING
    if not any(request.results for request in requests):
        names = f" of {', '.join(request.experiment.name for request in requests)}" if requests else ""
        commands = [command.command_of(request, options.cache) for request in requests] or ["cadam reproduce NAME"]
        folders = f"neither {options.cache} nor {options.archive}"
        print(f"{folders} has results{names}: run `{'; '.join(commands)}`", file=sys.stderr)
        return NOTHING
    title = requests[0].experiment.title if len(requests) == 1 else HEADING.title
    print(command.write_page(requests, replace(HEADING, title=options.title or title), options.output))
    if options.images:
        _write_images(requests, options.images)
    for request in (r for r in requests if r.missing):
        missing = f"{request.experiment.name}: {len(request.missing)} runs failed or were not started"
        print(f"{missing}: {command.command_of(request, options.cache)}", file=sys.stderr)
    return DONE if all(request.complete for request in requests) else FAILED


def _to_report(cache: Cache, experiments: Sequence[Experiment], options: argparse.Namespace) -> list[runner.Request]:
    """Return the named experiments, or without names every experiment that was requested before.

    An experiment that was not requested is left out, even if results exist because it shares runs with another one.
    """
    requests = []
    for experiment in experiments:
        last = _last_plan(cache, experiment)
        if last is None and not options.names:
            continue
        plan = _requested_plan(cache, experiment, options)
        request = _load_results(cache, experiment, plan)
        if request.results or request.unknown or options.names or plan == last:
            requests.append(request)
    return requests


def _write_images(requests: Sequence[runner.Request], folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for request in (r for r in requests if r.complete):
        for number, figure in enumerate(report.draw(request.experiment, request).values(), 1):
            path = folder / f"{request.experiment.name}-{number}.png"
            figure.savefig(path, dpi=110)
            print(f"figure: {path}")


# archive -------------------------------------------------------------------------------------------------------


def archive(options: argparse.Namespace) -> int:
    """Copy results from the cache to the archive and return the exit code."""
    try:
        experiments = catalog.select(options.names)
    except catalog.UnknownExperimentError as error:
        print(f"cadam archive: {error}", file=sys.stderr)
        return USAGE
    if find_spec("pyarrow") is None:
        print(f"cadam archive: {PYARROW_ADVICE}", file=sys.stderr)
        return NO_PACKAGE
    if not command.can_write("archive", archive=options.archive):
        return USAGE
    published, code = Archive(options.archive), DONE
    for experiment in experiments:
        cache = Cache(options.cache, published, any_versions=True)
        plan = _requested_plan(cache, experiment, options)
        request = _load_results(cache, experiment, plan)
        new = [r for r in request.results if _is_new(published.find(experiment, r.spec), r)]
        unknown = sum(r.provenance.commit is None or bool(r.provenance.dirty) for r in new)
        if unknown and not options.dirty:
            print(
                f"cadam archive: {experiment.name}: {unknown} of {len(new)} new results were computed by uncommitted "
                "code; commit the code and compute them again with --force, or archive them with --dirty",
                file=sys.stderr,
            )
            code = FAILED
            continue
        if new:
            published.add(experiment, new)
        if request.results:
            published.remember(experiment, plan)
        missing = ""
        if request.missing:
            count, advice = len(request.missing), command.command_of(request, options.cache)
            missing = f", {count} results of the plan are missing: {advice}"
        print(f"{experiment.name}: {len(new)} results archived{missing}")
        code = FAILED if request.missing and not new else code
    return code


def _is_new(published: Result | None, result: Result) -> bool:
    """Return whether a result must be archived: the archive has no result of the run, or a different one."""
    if published is None:
        return True
    before, after = published.outcome, result.outcome
    return not (
        before.metrics.keys() == after.metrics.keys()
        and before.curves.keys() == after.curves.keys()
        and np.array_equal(
            list(before.metrics.values()), [after.metrics[name] for name in before.metrics], equal_nan=True
        )
        and all(np.array_equal(before.curves[name], after.curves[name], equal_nan=True) for name in before.curves)
    )
