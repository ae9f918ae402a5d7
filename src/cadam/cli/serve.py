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
from ..online.persistence.checkpoints import list_checkpoints, read_newest
from ..printable import printable
from ..serving.config import ServiceConfig, read_config
from ..serving.event_log import open_log
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
                "--token-file too, or listen on 127.0.0.1"
            )
        writable_paths.check_folder(options.folder or Path("runs"), "FOLDER")
        config = replace(read_config(options), has_local_address=is_local)
        _check_log(config)
        supervisor = Supervisor(config, host, port, options.workers)
    except (ValueError, RuntimeError, OSError, ImportError) as error:
        return fail("serve", error, NO_PACKAGE if isinstance(error, ImportError) else USAGE)
    supervisor.stop_on_signals()

    def announce() -> None:
        print(f"serving {supervisor.url} from {printable(config.folder)}", flush=True)

    print("cadam serve: starting, which takes a few seconds", file=sys.stderr, flush=True)
    supervisor.run(announce)
    return DONE


def _check_log(config: ServiceConfig) -> None:
    """Open the log before anything is started, and check that it has the entries that the learner has read."""
    log = open_log(config.path, creates=True)
    try:
        last = log.last_number()
    finally:
        log.close()
    position = read_newest(config.path)[1]["source"]["position"] if list_checkpoints(config.path) else 0
    if position > last:
        raise UsageError(
            f"{config.folder} has learned {position:,} entries of its log, but the log ({printable(log.location)}) has "
            f"only {last:,}: it is another log, or it has lost entries. Restore it, or give another FOLDER"
        )


def _is_local(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
