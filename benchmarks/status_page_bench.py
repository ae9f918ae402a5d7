"""Measure what --status costs the learner: with the status page requested 100 times per second, and without a page.

    python benchmarks/status_page_bench.py [--seconds N] [--rate N] [--threads N]

One learner (the DeepFM of online_bench.py, batches of 1,024 from memory) takes turns of one second. In every other
turn it updates the status server once a second, and a client in a separate process requests /metrics, /status.json, /
and /healthz. In the rest there is neither. Each pair of turns gives the ratio of the time an event took: by the
clock, and by the processor time of the learner's process, which is less disturbed by whatever else runs on the
machine.
"""

from __future__ import annotations

import argparse
import http.client
import multiprocessing
import os
import resource
import statistics
import time
from multiprocessing.connection import Connection

import numpy as np
import torch
from torch import nn

from cadam import CAdam
from cadam.online import Events, Learner
from cadam.online.monitoring.status_page import StatusPage
from peers.cases import DeepFM

ROWS, FIELDS, BATCH, TURN = 100_000, 39, 1024, 1.0
PATHS = ("/metrics", "/status.json", "/", "/healthz")


def client(line: Connection, address: str, rate: float) -> None:
    """Send requests at a steady rate while told to, and report their number, successes and milliseconds."""
    line.send("ready")
    while line.recv():
        connection = http.client.HTTPConnection(address, timeout=10)
        start, number, good, took = time.monotonic(), 0, 0, []
        while not line.poll():
            wait = start + number / rate - time.monotonic()
            if wait > 0:
                time.sleep(wait)
            asked = time.monotonic()
            connection.request("GET", PATHS[number % len(PATHS)])
            answer = connection.getresponse()
            answer.read()
            took.append(1000 * (time.monotonic() - asked))
            good += answer.status == 200
            number += 1
        line.recv()
        connection.close()
        line.send((number, good, statistics.median(took or [0]), max(took or [0])))


def batches(count: int) -> list[Events]:
    random = np.random.default_rng(0)
    found = []
    for _ in range(count):
        ids = (ROWS * random.random((BATCH, FIELDS)) ** 3).astype(np.int64)
        found.append(Events({"fields": ids}, (random.random(BATCH) < 0.25).astype(np.float32)))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seconds", type=float, default=60.0, help="with requests; as many without (default: 60)")
    parser.add_argument("--rate", type=float, default=100.0, help="requests a second (default: 100)")
    parser.add_argument("--threads", type=int, default=1, help="threads of torch (default: 1)")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    torch.manual_seed(0)
    model = DeepFM(ROWS, 8, 64, sparse=True)
    learner = Learner(model, CAdam(model.named_parameters()), nn.functional.binary_cross_entropy_with_logits)
    report = StatusPage("127.0.0.1:0", "benchmark")
    ours, theirs = multiprocessing.get_context("spawn").Pipe()
    process = multiprocessing.get_context("spawn").Process(
        target=client, args=(theirs, report.server.url.split("/")[2], options.rate), daemon=True
    )
    process.start()
    stream, place = batches(200), 0

    def turn(serve: bool) -> tuple[float, float]:
        """Return the seconds per event by the clock and by the processor."""
        nonlocal place
        seen, clock, processor = learner.events, time.perf_counter(), time.process_time()
        while time.perf_counter() - clock < TURN:
            learner.learn(stream[place % len(stream)])
            place += 1
            if serve:
                report(learner)
        count = learner.events - seen
        return (time.perf_counter() - clock) / count, (time.process_time() - processor) / count

    turn(serve=True)
    ours.recv()  # the client is ready
    pairs, answers = [], []
    for number in range(round(options.seconds / TURN)):
        found = {}
        for serve in (True, False) if number % 2 else (False, True):
            if serve:
                ours.send(True)
            found[serve] = turn(serve)
            if serve:
                ours.send(False)
                answers.append(ours.recv())
        pairs.append(found)
    ours.send(False)
    report.close()
    # Only the children of the server, because the client is still running.
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    load = f"load {os.getloadavg()[0]:.1f} (a shared machine)"
    print(f"{os.cpu_count()} processors, {load}, torch {torch.__version__}, {options.threads} threads")
    asked, good, slowest = sum(a[0] for a in answers), sum(a[1] for a in answers), max(a[3] for a in answers)
    usual = statistics.median(a[2] for a in answers)
    print(f"requests: {asked} in {len(answers) * TURN:.0f} s, {good} answered with 200; ", end="")
    print(f"median of turns {usual:.1f} ms, slowest {slowest:.0f} ms")
    share = (used.ru_utime + used.ru_stime) / (len(answers) * TURN)
    print(f"the server's process: {share:.1%} of a processor while it was asked, its start included")
    for name, at in (("the clock", 0), ("processor time", 1)):
        ratios = sorted(pair[True][at] / pair[False][at] - 1 for pair in pairs)
        speed = 1 / statistics.median(pair[False][at] for pair in pairs)
        low, high = ratios[len(ratios) // 4], ratios[-1 - len(ratios) // 4]
        print(f"by {name}: {speed:,.0f} events a second without; {statistics.median(ratios):+.1%} time with ", end="")
        print(f"(median of {len(ratios)} pairs; middle half {low:+.1%} to {high:+.1%})")


if __name__ == "__main__":
    main()
