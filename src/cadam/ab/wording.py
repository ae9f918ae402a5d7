"""The sentences of a result, which console, page and JSON share."""

from __future__ import annotations

import math
from collections.abc import Mapping

from ..statistics.comparison import Kind, position, sign
from ..statistics.intervals import Interval
from .result import METRIC_NAMES, UNITS, PairResult, Result
from .text import count, join_words

ACTIONS: Mapping[Kind, str] = {
    "better": "switch",
    "worse": "stay",
    "equivalent": "no practical difference",
    "inconclusive": "undecided",
    "diverged": "not comparable",
}
"""The recommended action for each kind of verdict."""


def action(pair: PairResult, result: Result) -> str:
    """Return the recommended action."""
    return "undecided" if objection(pair, result) else ACTIONS[pair.kind]


def objection(pair: PairResult, result: Result) -> str:
    """Return the reason why nothing can be recommended, whatever the verdict is; empty if there is none."""
    if pair.kind == "diverged":
        return ""
    if result.warm_up is None:
        text = "no model is better than the best constant prediction. "
        if 2 * result.lag >= result.batches:
            return (
                f"{text}Labels are up to {result.lag:,} batches late in a stream of {result.batches:,}, so most "
                "events may have been predicted before the models had learned anything. Use more events, or a shorter "
                "--horizon"
            )
        return f"{text}Check label and features, or use more events or other learning rates"
    if not math.isfinite(pair.difference):
        return (
            f"no events could be compared after the warm-up, which took {result.warm_up:,} of "
            f"{result.processed_events:,} events. Use more events"
        )
    if pair.is_reversed and pair.kind in ("better", "worse"):
        return (
            f"the learning rates decide which arm is ahead. With rates chosen along the stream, {_effect(pair)}; at "
            f"the best single rates in hindsight it is {pair.in_hindsight:+.2f}%. About {pair.more_events or 0:,} more "
            "events, or learning rates that lie closer around the best ones (--lr), would show which is right"
        )
    return ""


def headline(pair: PairResult, result: Result) -> str:
    """Return the verdict in one sentence or two."""
    if text := objection(pair, result):
        return f"Undecided: {text}."
    texts: dict[Kind, str] = {
        "better": f"Switch to {pair.arm}: {_effect(pair)}{_caution(pair, result)}.",
        "worse": f"Stay with {pair.baseline}: {_effect(pair)}{_caution(pair, result)}.",
        "equivalent": f"No practical difference: {_effect(pair)}.",
        "inconclusive": f"Undecided: {_effect(pair)}, but {_doubt(pair, result)}. {next_step(pair, result)}",
        "diverged": f"Not comparable: {_divergence(pair, result)}",
    }
    return texts[pair.kind]


def _divergence(pair: PairResult, result: Result) -> str:
    """Return which arms diverged, and what to do; empty if none did."""
    arms = [name for name in (pair.baseline, pair.arm) if result.arm(name).has_diverged]
    if not arms:
        return ""
    return f"{join_words(arms)} diverged at every learning rate under some seed. Compare again with lower rates (--lr)."


def _effect(pair: PairResult) -> str:
    name, unit = METRIC_NAMES[pair.metric], UNITS[pair.metric]
    if pair.is_same:
        return f"{pair.arm} and {pair.baseline} make the same predictions, to the last bit"
    size = f"{abs(pair.difference):.2f}{unit} {'lower' if pair.difference < 0 else 'higher'}"
    return f"the {name} with {pair.arm} is {size} than with {pair.baseline}"


def _caution(pair: PairResult, result: Result) -> str:
    """Return what a verdict about the whole stream does not say, as the end of its sentence; empty if nothing."""
    parts = []
    if abs(pair.difference) < result.matters:
        parts.append(f"which is less than what matters ({result.matters:g}{UNITS[pair.metric]})")
    recent = pair.recent_over_time
    if math.isfinite(recent.half_width) and (sign(recent) == 0 or pair.trend == "shrinks" or pair.is_fading):
        text = f"but {recent.mean:+.2f}{UNITS[pair.metric]} in the recent part"
        parts.append(text + ("" if sign(recent) else ", whose interval includes 0"))
    return "".join(f", {part}" for part in parts)


def _doubt(pair: PairResult, result: Result) -> str:
    if pair.is_conflicting:
        return "seeds and time disagree about the sign"
    unit, recent = UNITS[pair.metric], pair.recent_over_time.mean
    intervals = whole_stream_intervals(pair)
    unknown = [source for source, each in intervals.items() if not math.isfinite(each.half_width)]
    doubtful = [
        source
        for source, each in intervals.items()
        if source not in unknown and position(each, result.matters) == "open"
    ]
    parts = []
    if pair.is_reversing:
        parts.append(f"it is {recent:+.2f}{unit} in the recent part, after {pair.recent_from:,} events")
    elif pair.is_ending:
        earlier = recent - pair.change.mean
        parts.append(f"it fades along the stream, from {earlier:+.2f}{unit} to {recent:+.2f}{unit} in the recent part")
    if doubtful:
        parts.append(f"{_name_intervals(doubtful)} {'includes' if len(doubtful) == 1 else 'include'} 0")
    if unknown:
        text = f"{_name_intervals(unknown)} {'is' if len(unknown) == 1 else 'are'} unknown"
        if "time" in unknown and pair.over_time.count < pair.required_batches:
            batches = "batches" if pair.metric == "log_loss" else "blocks"
            text += f" ({pair.over_time.count:,} of the {pair.required_batches:,} {batches} that it needs were judged"
            text += f", because labels are up to {result.lag:,} batches late)" if result.lag else ")"
        parts.append(text)
    return join_words(parts) if parts else "the intervals do not agree whether it matters"


def _name_intervals(sources: list[str]) -> str:
    return f"the interval{'' if len(sources) == 1 else 's'} over {join_words(sources)}"


def next_step(pair: PairResult, result: Result) -> str:
    """Return what would decide an undecided comparison, as a sentence."""
    if result.seeds == 1:
        return "Run more seeds (--seeds)."
    if pair.more_events is not None and not math.isfinite(pair.over_time.half_width):
        return f"At least {pair.more_events:,} more events are needed before it can be decided."
    parts = []
    if pair.more_events is not None:
        parts.append(f"about {pair.more_events:,} more events")
    if pair.more_seeds is not None:
        parts.append(f"about {pair.more_seeds} seeds (--seeds)")
    if parts:
        return f"{join_words(parts)} would decide it.".capitalize()
    return "More than 100 times as many events would be needed to decide it, or the difference does not exist."


def whole_stream_intervals(pair: PairResult) -> dict[str, Interval]:
    """Return the intervals over the whole stream, which decide at its end, by what varies."""
    intervals = {"time": pair.over_time, "seeds": pair.over_seeds}
    return {source: interval for source, interval in intervals.items() if interval is not None}


def all_intervals(pair: PairResult) -> dict[str, Interval]:
    """Return the intervals over the whole stream and over its recent part, by what varies."""
    recent = {"recent time": pair.recent_over_time, "seeds in recent time": pair.recent_over_seeds}
    return whole_stream_intervals(pair) | {
        source: interval for source, interval in recent.items() if interval is not None
    }


def format_interval(interval: Interval, unit: str) -> str:
    """Format the ends of an interval."""
    if not math.isfinite(interval.half_width):
        return "unknown"
    return f"{interval.low:+.2f} to {interval.high:+.2f}{unit}"


def reasons(pair: PairResult, result: Result) -> list[str]:
    """Return the evidence for a verdict, one sentence or two for each kind; none if an arm has diverged."""
    unit = UNITS[pair.metric]
    arm, base = result.arm(pair.arm), result.arm(pair.baseline)
    lines: list[str] = []
    if pair.kind == "diverged":
        return lines
    if result.warm_up is None:
        return [*_losses_without_judgment(pair, result), *_losses_in_hindsight(pair, result)]
    if pair.is_same:
        return _losses_in_hindsight(pair, result)
    if pair.decided_at is not None:
        when = "at the end of the stream, " if pair.decided_at == result.events else ""
        lines.append(f"Decided {when}after {pair.decided_at:,} events, of which {result.warm_up:,} were warm-up.")
    if pair.first_decided_at not in (None, pair.decided_at):
        lines.append(f"There was a verdict for the first time after {pair.first_decided_at:,} events.")
    if pair.reopened_at is not None:
        lines.append(f"The interval over time had excluded 0, and included it again after {pair.reopened_at:,} events.")
    over_seeds = pair.over_seeds
    seeds = (
        "Every seed gives the same predictions, so seeds are not evidence."
        if over_seeds is None
        else f"Over {count(result.seeds, 'seed')}: {format_interval(over_seeds, unit)} "
        f"({100 * pair.seed_confidence:.4g}% interval)."
    )
    lines.append(
        f"Over time: {format_interval(pair.over_time, unit)} ({100 * (1 - result.alpha / len(result.pairs)):.4g}% "
        f"confidence sequence, valid at every moment). {seeds}"
    )
    if pair.recent_from is not None:
        over_seeds = pair.recent_over_seeds
        seeds = "" if over_seeds is None else f", over seeds {format_interval(over_seeds, unit)}"
        lines.append(
            f"In the recent part, after {pair.recent_from:,} events: {pair.recent_over_time.mean:+.2f}{unit}, over "
            f"time {format_interval(pair.recent_over_time, unit)}{seeds}."
        )
    if quarters := pair.quarters:
        trend = f"The difference {pair.trend} along the stream. " if pair.trend else ""
        by_quarter = join_words([f"{quarter:+.2f}" for quarter in quarters])
        lines.append(f"{trend}By quarters of the judged events, the difference of the log loss is {by_quarter}%.")
    lines += _losses_in_hindsight(pair, result)
    if pair.periods:
        lines.append(
            f"{pair.arm} has the lower log loss in {pair.share_of_periods_ahead:.0%} of "
            f"{sum(map(math.isfinite, pair.periods))} periods."
        )
    beside = []
    for name, title in (("gauc", "GAUC"), ("auc", "AUC")):
        if math.isfinite(arm.metrics.get(name, math.nan)) and math.isfinite(base.metrics.get(name, math.nan)):
            difference = 100 * (arm.metrics[name] - base.metrics[name])
            beside.append(f"{title} {100 * arm.metrics[name]:.2f} ({difference:+.2f} points)")
    if beside:
        lines.append(
            f"Beside the verdict, {pair.arm}: {', '.join(beside)}, calibration "
            f"{arm.metrics['calibration']:.3f} (with {pair.baseline} {base.metrics['calibration']:.3f}; 1 is perfect)."
        )
    if pair.users is not None:
        lines.append(
            f"Over users, the difference of the log loss is {format_interval(pair.users, '%')} (95% interval), and "
            f"{pair.users_ahead:.0%} of the users have a lower one."
        )
    return lines


def _losses_in_hindsight(pair: PairResult, result: Result) -> list[str]:
    """Return a sentence about the best single learning rates; none if no rate has a finite loss."""
    if not math.isfinite(pair.in_hindsight):
        return []
    arm, base = result.arm(pair.arm), result.arm(pair.baseline)
    return [
        f"Log loss at the best single rate in hindsight: {pair.arm} {arm.loss_at_best_rate:.4f} (at "
        f"{arm.best_rate:g}), {pair.baseline} {base.loss_at_best_rate:.4f} (at {base.best_rate:g}), difference "
        f"{pair.in_hindsight:+.2f}%."
    ]


def _losses_without_judgment(pair: PairResult, result: Result) -> list[str]:
    """Return a sentence about the log loss over all events, none of which was judged."""
    own, base = (result.arm(name).metrics["log_loss"] for name in (pair.arm, pair.baseline))
    return [
        f"No events were judged. The log loss over all {result.processed_events:,} events is {own:.4f} with "
        f"{pair.arm}, {base:.4f} with {pair.baseline} and {result.best_constant:.4f} with the best constant prediction."
    ]


def warnings(result: Result) -> list[str]:
    """Return what limits the result."""
    lines = []
    for arm in result.arms:
        rates = list(arm.loss_by_rate)
        if len(rates) > 1 and arm.best_rate in (rates[0], rates[-1]):
            end = "lowest" if arm.best_rate == rates[0] else "highest"
            lines.append(f"{arm.name}: the best learning rate, {arm.best_rate:g}, is the {end} that was tried (--lr)")
    if result.clipped_share > 0.001:
        lines.append(f"the log loss of {result.clipped_share:.1%} of the predictions was limited to 15")
    return lines


def summary(pair: PairResult, result: Result) -> str:
    """Return one paragraph: what to do, what it is worth, how sure it is, and what was assumed."""
    if pair.kind == "diverged":
        return f"Nothing can be said about these arms, because {_divergence(pair, result)}"
    if result.warm_up is None:
        return " ".join(
            [f"Nothing is recommended: {objection(pair, result)}.", *_losses_without_judgment(pair, result)]
        )
    if not math.isfinite(pair.difference):
        return f"Nothing is recommended: {objection(pair, result)}."
    recommended = result.recommended
    rate = result.arm(recommended).rate_to_use
    is_open = recommended == pair.baseline and action(pair, result) == "undecided"
    todo = f"Keep {recommended} for now" if is_open else f"Use {recommended}"
    todo += f", at a learning rate of {rate:g}." if math.isfinite(rate) else "."
    unit = UNITS[pair.metric]
    worth = f"{_effect(pair)[:1].upper()}{_effect(pair)[1:]}"
    if pair.is_same:
        worth += "."
    else:
        caution = _caution(pair, result) if pair.kind in ("better", "worse") else ""
        worth += f"{caution}. The interval over time is {format_interval(pair.over_time, unit)}."
    error_rate = (
        f"Of simulated comparisons of equal arms, at most about {100 * result.alpha:.3g}% end with such a verdict; "
        "rare large losses or rare bad seeds can mislead it more often."
    )
    sure = {
        "better": error_rate,
        "worse": error_rate,
        "equivalent": f"Differences below {result.matters:g}{unit} count as none.",
        "inconclusive": f"This is not decided: {_doubt(pair, result)}. {next_step(pair, result)}",
    }[pair.kind]
    if text := objection(pair, result):
        sure = f"This is not decided: {text}."
    assumed = (
        "Each arm predicts every event before learning it, at the learning rate with the lowest recent loss so far. "
    )
    assumed += f"The first {result.warm_up:,} events, before the models were better than a constant, do not count. "
    assumed += "No assumption about drift is made; the verdict is about this stream, this model and seeds like these."
    if result.lag:
        assumed += f" Labels are up to {result.lag} batches late, which the interval takes into account."
    return " ".join([todo, worth, sure, assumed])
