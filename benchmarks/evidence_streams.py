"""Judge the streams of the evidence page by `cadam ab`, one after the other, and write the verdicts to one JSON file.

    python benchmarks/evidence_streams.py DATA RESULT.json [--threads 16] [--streams flights,forest] [--cache FOLDER]
        [--flights-3m data/flights-3m.parquet] [--online-retail online_retail.csv] [--commit HASH]

DATA is a folder with the files of `STREAMS`. `flights-3m.parquet` is in the npm package vega-datasets; Online Retail is
UCI's table as CSV, with its column names. Streams without a file are skipped with a message. A stream that RESULT.json
has for the same commit of the protocol is not judged again, and an interrupted comparison continues from its cache.
The verdicts by earlier protocols are kept as `earlier`.
Further options are those of `cadam ab`: --events 20000 --seeds 2 is a quick trial, --threads the number of processes,
and --full reads on after a verdict.
The commit is the last one that changed the protocol; where there is no git repository, --commit names it.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
import zlib
from pathlib import Path
from typing import Any

from ab_streams import write_stream

STREAMS: dict[str, tuple[str, tuple[str, ...]]] = {
    "electricity": ("elec2.parquet", ("--label", "target")),
    "weather": ("noaa_weather.parquet", ("--label", "target")),
    "movielens": ("ml_latest_small.parquet", ("--label", "rating>=4", "--user", "userId")),
    "flights": (
        "nycflights13.parquet",
        ("--label", "arr_delay>15", "--user", "tailnum", "--ignore", "dep_delay,dep_time,arr_time,air_time"),
    ),
    "forest": ("covtype.parquet", ("--label", "Cover_Type==2")),
    "turnover": ("turnover.csv", ("--label", "click")),
    "retail": (
        "online_retail.csv",
        ("--label", "Quantity>3", "--user", "CustomerID", "--ignore", "InvoiceNo,Description,InvoiceDate"),
    ),
    "baseball": ("retrosheet-2000-2024.parquet", ("--label", "on_base", "--user", "batter", "--ignore", "event")),
    "flights-3m": ("flights-3m.parquet", ("--label", "delay>15")),
}
"""The file of each stream, and its options of `cadam ab`."""
TURNOVER_EVENTS = 600_000
PREFIXES = {"baseball": ("--events", "1000000")}
"""The first events of a stream to which its comparison is limited, because all of them would take an hour."""
PROTOCOL = ("src/cadam/ab", "src/cadam/statistics")
"""The folders of the protocol."""


def protocol_commit() -> str:
    """Return the last commit that changed the protocol."""
    command = ["git", "log", "-1", "--format=%h", "--", *PROTOCOL]
    return subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout.strip()


def judge(path: Path, options: tuple[str, ...], cache: Path, more: list[str]) -> dict[str, Any]:
    """Run `cadam ab` on a stream and return what the evidence page shows of its result."""
    start = time.monotonic()
    command = [sys.executable, "-m", "cadam", "ab", str(path), *options, "--json", "--cache", str(cache), *more]
    # Another set of options is another comparison, whose report must not replace this one.
    command += ["--output", str(cache / f"{path.stem}-{zlib.crc32(' '.join(command).encode()):08x}.html")]
    result = json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE).stdout)
    names = ("events", "processed_events", "warm_up")
    return {
        **{name: result[name] for name in names},
        "seconds": round(time.monotonic() - start, 1),
        "arms": {
            arm["name"]: {
                "log_loss": arm["metrics"]["log_loss"],
                "best_rate": arm["best_rate"],
                "loss_at_best_rate": arm["loss_at_best_rate"],
                "rate_to_use": arm["rate_to_use"],
            }
            for arm in result["arms"]
        },
        "pairs": [{name: value for name, value in pair.items() if name != "curve"} for pair in result["pairs"]],
        "verdicts": result["verdicts"],
    }


def short_verdict(result: dict[str, Any]) -> dict[str, Any]:
    """Return what is kept of a result when its stream is judged again: the commit, the action and the difference."""
    (pair,), (verdict,) = result["pairs"], result["verdicts"]
    return {"commit": result["commit"], "action": verdict["action"], "difference": pair["difference"]}


def main() -> None:
    """Judge the streams that have a file, and print one line for each."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("data", type=Path)
    parser.add_argument("result", type=Path)
    parser.add_argument("--streams", default=",".join(STREAMS))
    parser.add_argument("--flights-3m", type=Path)
    parser.add_argument("--online-retail", type=Path)
    parser.add_argument("--cache", type=Path, default=Path("results/cache/evidence"))
    parser.add_argument("--commit")
    options, more = parser.parse_known_args()
    commit = options.commit or protocol_commit()
    options.cache.mkdir(parents=True, exist_ok=True)
    given = {"flights-3m": options.flights_3m, "retail": options.online_retail}
    results = json.loads(options.result.read_text()) if options.result.exists() else {}
    for name in options.streams.split(","):
        file, arguments = STREAMS[name]
        if results.get(name, {}).get("commit") == commit:
            continue
        path = given.get(name) or options.data / file
        if name == "turnover":
            path = options.cache / file
            write_stream(path, "turnover", TURNOVER_EVENTS)
        if not path.exists():
            print(f"{name}: skipped, because there is no {path}", flush=True)
            continue
        before = results.get(name)
        earlier = [*before.get("earlier", []), short_verdict(before)] if before else []
        try:
            results[name] = {
                "commit": commit,
                "earlier": earlier,
                **judge(path, (*arguments, *PREFIXES.get(name, ())), options.cache, more),
            }
        except subprocess.CalledProcessError as error:
            print(f"{name}: failed with exit code {error.returncode}; the others continue", flush=True)
            continue
        part = options.result.with_suffix(".part")
        part.write_text(json.dumps(results, indent=1))
        part.replace(options.result)
        headlines = " ".join(verdict["headline"] for verdict in results[name]["verdicts"])
        print(
            f"{name} ({results[name]['processed_events']:,} events, {results[name]['seconds']} s): {headlines}",
            flush=True,
        )


if __name__ == "__main__":
    main()
