"""The command `cadam serve`: predicts over HTTP and learns from feedback."""

from __future__ import annotations

import argparse
import ipaddress
import logging
import sys
from dataclasses import replace
from pathlib import Path

from ..online.models.model_file import UsageError
from ..online.monitoring.status_page import parse_address
from ..printable import printable
from ..serving.config import read_config
from ..serving.event_log import EventLog
from ..serving.supervisor import Supervisor
from . import writable_paths
from .exit_codes import DONE, NO_PACKAGE, USAGE, fail


def run(options: argparse.Namespace) -> int:
    """Run the command and return its exit code."""
    logging.basicConfig(stream=sys.stderr, format="cadam serve: %(message)s")
    try:
        host, port = parse_address(options.address, "--address")
        is_local = _is_local(host)
        if not is_local and options.token_file is None:
            raise UsageError(
                f"--address {options.address}: everyone who can reach this machine could teach the model. Give "
                "--token-file too, or listen on 127.0.0.1 behind a proxy"
            )
        writable_paths.check_folder(options.folder or Path("runs"), "FOLDER")
        config = replace(read_config(options), has_local_address=is_local)
        EventLog(config.log_path).close()  # finds a log that cannot be used before anything is started
        supervisor = Supervisor(config, host, port, options.workers)
    except (ValueError, RuntimeError, OSError, ImportError) as error:
        return fail("serve", error, NO_PACKAGE if isinstance(error, ImportError) else USAGE)
    supervisor.stop_on_signals()

    def announce() -> None:
        print(f"serving {supervisor.url} from {printable(config.folder)}", flush=True)

    print("cadam serve: starting, which takes a few seconds", file=sys.stderr, flush=True)
    supervisor.run(announce)
    return DONE


def _is_local(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
