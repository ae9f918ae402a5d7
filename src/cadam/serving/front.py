"""A front process: answers HTTP requests.

    python -m cadam.serving.front CONFIG DESCRIPTOR

CONFIG is a `ServiceConfig` as JSON, and DESCRIPTOR a listening socket. The process ends when its standard input is
closed.
"""

from __future__ import annotations

import asyncio
import logging
import os
import resource
import socket
import sys
from collections.abc import Sequence
from pathlib import Path

import torch
import uvicorn

from ..online.models.model_file import UsageError
from .config import TOKEN_VARIABLE, ServiceConfig
from .front_state import FrontState
from .http_protocol import BoundedProtocol
from .processes import prepare_process, watch_parent

RESERVED_FILES = 64
"""The number of open files that are left for the log, snapshots and libraries."""
SWITCH_SECONDS = 0.0005
"""The time that one thread may run before another gets its turn. Python's default is ten times as long."""
METRIC_FILES = ("counter", "histogram", "gauge_livemax", "gauge_livesum")
METRIC_FILE_BYTES = 1 << 16
"""The initial size of the files of prometheus_client, which the metrics of a front do not exceed."""

logger = logging.getLogger("cadam.serving")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the process and return its exit code."""
    text, descriptor = sys.argv[1:] if arguments is None else arguments
    config = ServiceConfig.from_json(text)
    prepare_process("front")
    reserve_metric_files()
    from .app import Api  # opens the files of its metrics

    torch.set_num_threads(1)
    sys.setswitchinterval(SWITCH_SECONDS)
    BoundedProtocol.max_connections = min(config.limits.connections, _raise_file_limit() - RESERVED_FILES)
    try:
        state = FrontState(config)
    except UsageError as error:
        logger.error("%s", error)
        return 1
    server = uvicorn.Server(
        uvicorn.Config(
            Api(state, os.environ.get(TOKEN_VARIABLE)).app(),
            http=BoundedProtocol,
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            server_header=False,
            timeout_keep_alive=30,
            timeout_graceful_shutdown=int(config.limits.seconds) + 1,
        )
    )
    logging.getLogger("uvicorn.error").setLevel(logging.ERROR)

    def end() -> None:
        server.should_exit = True

    watch_parent(end)
    state.start()
    listener = socket.socket(fileno=int(descriptor))
    asyncio.set_event_loop_policy(None)
    server.run(sockets=[listener])
    state.close()
    return 0


def reserve_metric_files() -> None:
    """Write the files that the metrics of this process will use; without space, its metrics are not shared.

    prometheus_client maps files with holes into memory. If the shared memory is full, the system ends a process that
    writes to a hole with SIGBUS.
    """
    folder = os.environ.get("PROMETHEUS_MULTIPROC_DIR")
    if folder is None:
        return
    paths = [Path(folder, f"{name}_{os.getpid()}.db") for name in METRIC_FILES]
    try:
        for path in paths:
            path.write_bytes(bytes(METRIC_FILE_BYTES))
    except OSError as error:
        logger.warning("/metrics has the requests of one front process only: %s", error)
        for path in paths:
            path.unlink(missing_ok=True)
        del os.environ["PROMETHEUS_MULTIPROC_DIR"]


def _raise_file_limit() -> int:
    """Allow as many open files as the system does, and return the number."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    limit = 65_536 if hard == resource.RLIM_INFINITY else hard
    resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))
    return limit


if __name__ == "__main__":
    sys.exit(main())
