"""The load of `serve_load` on other services: the Flask example and a daemon of Vowpal Wabbit.

    python -m benchmarks.serve_peers flask --seconds 60
    python -m benchmarks.serve_peers vw --seconds 60            # needs pip install vowpalwabbit

Neither has a durable log, so that an acknowledged label is lost if the process is killed. A daemon of Vowpal Wabbit
speaks its own protocol, one line per event, and joins no labels: the client keeps each event and sends it again with
its label. A connection is served by one process, so the client uses one connection, on which requests take turns.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.serve_load import SCHEMA, Connection, Load, report

VW_DAEMON = """
import sys
from vowpalwabbit import pyvw
workspace = pyvw.Workspace(arg_list=sys.argv[1:])
pyvw.pylibvw.vw.run_parser(workspace)
"""
"""The daemon is a program that the Python package does not contain."""


class VwConnection(Connection):
    """A connection to a daemon of Vowpal Wabbit, which answers each line with a score."""

    events: dict[str, dict[str, Any]] = {}
    shared: VwConnection | None = None

    def __init__(self, port: int) -> None:
        super().__init__(port)
        self.turn = asyncio.Lock()

    @classmethod
    def open(cls, port: int) -> VwConnection:
        cls.shared = cls.shared or cls(port)
        return cls.shared

    async def post(self, path: str, content: Any) -> tuple[int, bytes]:
        async with self.turn:
            return await self._post(path, content)

    async def _post(self, path: str, content: Any) -> tuple[int, bytes]:
        if self.streams is None:
            self.streams = await asyncio.open_connection("127.0.0.1", self.port)
        reader, writer = self.streams
        if path == "/predict":
            key, label = content["event_id"], ""
            self.events[key] = content
        else:
            key, label = content["id"], "1" if content["label"] else "-1"
        event = self.events[key] if path == "/predict" else self.events.pop(key)
        names = [f"{name}={value}" for name, value in event.items() if name.startswith("field")]
        writer.write(f"{label} |a {' '.join(names)} |n price:{event['price']} age:{event['age']}\n".encode())
        score = float(await reader.readline())
        return 200, json.dumps({"predictions": [{"id": key, "score": score}]}).encode()


class PeerLoad(Load):
    """Load whose ids are chosen by the client."""

    is_vw = False
    count = 0

    def event(self) -> dict[str, Any]:
        PeerLoad.count += 1
        return {"event_id": f"e{PeerLoad.count}", **super().event()}

    def connect(self) -> Connection:
        return VwConnection.open(self.port) if self.is_vw else Connection(self.port)


def processor_seconds(process: int) -> float:
    """Return the processor time of a process and of its children (Linux)."""
    children = Path(f"/proc/{process}/task/{process}/children").read_text().split()
    fields = [Path(f"/proc/{each}/stat").read_text().rpartition(")")[2].split() for each in (process, *children)]
    return sum(int(each[11]) + int(each[12]) for each in fields) / os.sysconf("SC_CLK_TCK")


def wait_for_port(port: int, service: subprocess.Popen[bytes], output: Path) -> None:
    """Wait until a service accepts connections, or stop with its output if it does not."""
    for _ in range(300):
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)) == 0:
                return
        if service.poll() is not None:
            break
        time.sleep(0.1)
    sys.exit(f"the service did not start; it printed:\n{output.read_text()}")


async def measure(port: int, options: argparse.Namespace, process: int) -> None:
    rates = {"/predict": options.predict, "/feedback": options.feedback}
    await PeerLoad(port).run({path: rate / 2 for path, rate in rates.items()}, options.warm_up)
    load, before, used = PeerLoad(port), os.getloadavg()[0], processor_seconds(process)
    await load.run(rates, options.seconds)
    report(load, [], options.seconds)
    print(f"server   {(processor_seconds(process) - used) / options.seconds:6.1%} of a core")
    print(f"load average of the machine: {before:.1f} before, {os.getloadavg()[0]:.1f} after; {os.cpu_count()} cores")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("peer", choices=("flask", "vw"))
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--predict", type=float, default=500, help="predictions per second")
    parser.add_argument("--feedback", type=float, default=100, help="labels per second")
    parser.add_argument("--warm-up", type=float, default=3, help="seconds of half the load that are not measured")
    options = parser.parse_args()
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with tempfile.TemporaryDirectory() as folder:
        schema = Path(folder, "schema.json")
        schema.write_text(json.dumps(SCHEMA))
        example = Path(__file__).parents[1] / "examples" / "flask_service.py"
        command = [sys.executable, str(example), str(schema), folder, str(port)]
        if options.peer == "vw":
            PeerLoad.is_vw = True
            # A factorization machine with the log loss is the closest model.
            words = f"--daemon --foreground --port {port} --loss_function logistic --lrqfa an8 --quiet"
            command = [sys.executable, "-c", VW_DAEMON, *words.split()]
        with open(Path(folder, "output.txt"), "w") as output:
            service = subprocess.Popen(command, stdout=output, stderr=output)
        try:
            wait_for_port(port, service, Path(folder, "output.txt"))
            asyncio.run(measure(port, options, service.pid))
        finally:
            service.terminate()
            service.wait()


if __name__ == "__main__":
    main()
