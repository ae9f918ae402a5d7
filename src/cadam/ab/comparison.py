"""The loop of an A/B comparison: all runs advance segment by segment until there is a verdict.

After each segment the analysis follows the runs, learning rates are added where the best one is at an end of the grid,
and the comparison stops if every arm has a verdict.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from .analysis import Analysis
from .runner import Advanced, StudyRunner
from .stream import EncodedStream
from .study import Run, Study, segment_ends


@dataclass(frozen=True)
class Progress:
    """The state of a comparison while it runs."""

    done: float
    """The share of the work that is done, if the comparison has to read the whole stream."""
    events: int
    """The number of events of the present segment's end."""
    analysis: Analysis
    advanced: Advanced | None = None
    """The run that has just got to the end of the segment; None after a segment was analyzed."""


class RunFailedError(RuntimeError):
    """A run has failed."""


def compare(
    study: Study,
    stream: EncodedStream,
    runner: StudyRunner,
    *,
    full: bool = False,
    notify: Callable[[Progress], None] = lambda progress: None,
) -> Analysis:
    """Run a comparison until there is a verdict about every arm, or until the stream ends.

    Args:
        study: The comparison.
        stream: The encoded stream.
        runner: Advances the runs.
        full: Whether to continue to the end of the stream after the verdict.
        notify: Called after each run of each segment, and after each segment.

    Raises:
        RunFailedError: If a run has failed; the others have recorded their scores.
    """
    judged = stream.judged
    analysis = Analysis(study, judged, runner.cache)
    ends = segment_ends(judged.ends.tolist())
    total = len(judged.labels)
    start = 0
    with runner.working():
        for end in ends:
            events = int(judged.ends[end - 1])

            def advance(runs: list[Run], end: int = end, start: int = start, events: int = events) -> None:
                failures: list[Advanced] = []
                others = len(runner.runs) - len(runs)  # have got as far already
                for count, advanced in enumerate(runner.advance(runs, end, total * len(runner.runs)), 1 + others):
                    done = (start + (events - start) * count / len(runner.runs)) / total
                    notify(Progress(done, events, analysis, advanced))
                    failures += [advanced] if advanced.failure else []
                if failures:
                    names = f"{failures[0].run}" + (f" and {len(failures) - 1} others" if len(failures) > 1 else "")
                    raise RunFailedError(f"{names} failed:\n{failures[0].failure}")

            advance(runner.runs)
            analysis.update(end)
            is_last = end == ends[-1]
            if not is_last and (added := analysis.rates_to_add()):
                runner.runs += added
                advance(added)
                analysis.add(added)
            start = events
            notify(Progress(events / total, events, analysis))
            if analysis.is_decided and not full and not is_last:
                break
    return analysis
