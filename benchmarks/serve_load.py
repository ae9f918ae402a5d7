"""Load on a learning service: predictions and labels at a fixed rate, from another process on loopback.

    python -m benchmarks.serve_load --seconds 60                    # 500 predictions and 100 labels a second
    python -m benchmarks.serve_load --seconds 20 --predict 3000     # beyond the point of overload

It starts `cadam serve` with a DeepFM in a temporary folder, sends requests at the times of an open-loop schedule (a
slow answer does not delay the next request), and prints latencies, statuses and staleness, and the processor time of
each process, which does not depend on other programs on the machine. All requests go to 127.0.0.1.
The latency of a request counts from its scheduled time, so waiting in the client counts too.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from collections import Counter, deque
from pathlib import Path
from typing import Any

import numpy as np

SCHEMA = {
    "features": {**{f"field_{n}": "hash:20000" for n in range(8)}, "price": "number?", "age": "number"},
    "label": "click",
}

MAX_IN_FLIGHT = 400
"""Requests beyond this number that wait for an answer are counted, but not sent."""


class Connection:
    """One HTTP connection with keep-alive, without a library, so that the client costs little."""

    def __init__(self, port: int) -> None:
        self.port = port
        self.streams: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None

    def is_closed(self) -> bool:
        return self.streams is not None and self.streams[0].at_eof()

    async def post(self, path: str, content: Any) -> tuple[int, bytes]:
        if self.streams is None:
            self.streams = await asyncio.open_connection("127.0.0.1", self.port)
        reader, writer = self.streams
        body = json.dumps(content).encode()
        head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}\r\n\r\n"
        writer.write(head.encode() + body)
        header = await reader.readuntil(b"\r\n\r\n")
        length = int(header.lower().split(b"content-length: ")[1].split(b"\r\n")[0])
        return int(header[9:12]), await reader.readexactly(length)


class Load:
    def __init__(self, port: int) -> None:
        self.port, self.generator = port, random.Random(0)
        self.free: list[Connection] = []
        self.latencies: dict[str, list[float]] = {"/predict": [], "/feedback": []}
        self.statuses: dict[str, Counter[Any]] = {"/predict": Counter(), "/feedback": Counter()}
        self.answered: deque[str] = deque(maxlen=10_000)
        self.in_flight = 0

    def event(self) -> dict[str, Any]:
        fields = {f"field_{n}": self.generator.randrange(5_000) for n in range(8)}
        return {**fields, "price": self.generator.random(), "age": self.generator.randrange(90)}

    def connect(self) -> Connection:
        return Connection(self.port)

    async def send(self, path: str, content: Any, due: float) -> None:
        if self.in_flight >= MAX_IN_FLIGHT:
            self.statuses[path]["not sent"] += 1
            return
        self.in_flight += 1
        try:
            await self._send(path, content, due)
        finally:
            self.in_flight -= 1

    async def _send(self, path: str, content: Any, due: float) -> None:
        while self.free and self.free[-1].is_closed():  # the service closes connections that were idle for 30 seconds
            self.free.pop()
        connection = self.free.pop() if self.free else self.connect()
        try:
            status, body = await asyncio.wait_for(connection.post(path, content), 15)
            self.free.append(connection)
        except (OSError, asyncio.IncompleteReadError, TimeoutError) as error:
            self.statuses[path][type(error).__name__] += 1
            return
        self.statuses[path][status] += 1
        if status == 200:
            self.latencies[path].append(time.perf_counter() - due)
            if path == "/predict":
                self.answered.append(json.loads(body)["predictions"][0]["id"])

    async def run(self, rates: dict[str, float], seconds: float) -> None:
        start = time.perf_counter()
        due = {path: start for path in rates if rates[path]}
        tasks: set[asyncio.Task[None]] = set()
        while due and min(due.values()) < start + seconds:
            path = min(due, key=lambda name: due[name])
            if (wait := due[path] - time.perf_counter()) > 0:
                await asyncio.sleep(wait)
            content: Any = self.event() if path == "/predict" else None
            if path == "/feedback" and self.answered:
                key = self.answered.popleft()
                content = {"id": key, "label": self.generator.randrange(2)}
            if content is not None:
                task = asyncio.create_task(self.send(path, content, due[path]))
                tasks.add(task)
                task.add_done_callback(tasks.discard)
            due[path] += self.generator.expovariate(rates[path])
        await asyncio.gather(*tasks)


async def watch_staleness(port: int, values: list[float]) -> None:
    while True:
        await asyncio.sleep(0.5)
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(b"GET /model HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
        content = json.loads((await reader.read()).partition(b"\r\n\r\n")[2])
        writer.close()
        if "staleness_seconds" in content:
            values.append(content["staleness_seconds"])


def report(load: Load, staleness: list[float], seconds: float) -> None:
    for path, latencies in load.latencies.items():
        if latencies:
            p50, p90, p99, p999 = (1e3 * np.quantile(latencies, q) for q in (0.5, 0.9, 0.99, 0.999))
            rate = len(latencies) / seconds
            print(
                f"{path:10} {rate:7.0f}/s ok  p50 {p50:6.1f}  p90 {p90:6.1f}  p99 {p99:6.1f}  p99.9 {p999:6.1f} ms",
                end="",
            )
            print(f"  {dict(load.statuses[path])}")
    if staleness:
        print(f"staleness  median {np.median(staleness):.2f}  largest {max(staleness):.2f} s")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--predict", type=float, default=500, help="predictions per second")
    parser.add_argument("--feedback", type=float, default=100, help="labels per second")
    parser.add_argument("--workers", default="1")
    parser.add_argument("--max-waiting", default="2000", help="events that may wait in the service")
    parser.add_argument("--warm-up", type=float, default=3, help="seconds of half the load that are not measured")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        schema = Path(folder, "schema.json")
        schema.write_text(json.dumps(SCHEMA))
        command = [sys.executable, "-m", "cadam", "serve", f"{folder}/service", "--schema", str(schema)]
        command += ["--address", "0", "--workers", options.workers, "--max-waiting", options.max_waiting]
        service = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        try:
            assert service.stdout is not None
            port = int(service.stdout.readline().split()[1].rstrip("/").rpartition(":")[2])
            asyncio.run(measure(port, options, service.pid))
        finally:
            service.terminate()
            service.wait()


def processor_seconds(supervisor: int) -> dict[str, float]:
    """The processor time of the client and of each process of the service, where the system tells it (Linux)."""
    seconds = {"client": time.process_time()}
    for child in Path(f"/proc/{supervisor}/task/{supervisor}/children").read_text().split():
        name = Path(f"/proc/{child}/cmdline").read_bytes().split(b"\0")[2].decode().rpartition(".")[2]
        fields = Path(f"/proc/{child}/stat").read_text().rpartition(")")[2].split()
        seconds[f"{name} {child}"] = (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
    return seconds


async def measure(port: int, options: argparse.Namespace, supervisor: int) -> None:
    rates = {"/predict": options.predict, "/feedback": options.feedback}
    warm_up = Load(port)
    while (await warm_up_status(warm_up)) != 200:
        await asyncio.sleep(0.2)
    await warm_up.run({path: rate / 2 for path, rate in rates.items()}, options.warm_up)
    load, staleness = Load(port), list[float]()
    watcher = asyncio.create_task(watch_staleness(port, staleness))
    before, used = os.getloadavg()[0], processor_seconds(supervisor)
    await load.run(rates, options.seconds)
    watcher.cancel()
    report(load, staleness, options.seconds)
    for name, value in processor_seconds(supervisor).items():
        print(f"{name:24} {(value - used.get(name, 0)) / options.seconds:6.1%} of a core")
    print(f"load average of the machine: {before:.1f} before, {os.getloadavg()[0]:.1f} after; {os.cpu_count()} cores")


async def warm_up_status(load: Load) -> int:
    try:
        return (await Connection(load.port).post("/predict", load.event()))[0]
    except OSError:
        return 0


if __name__ == "__main__":
    main()
