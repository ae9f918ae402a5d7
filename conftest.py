"""Settings of the whole test run."""

import os
import signal
from collections.abc import Iterator

import pytest
import torch

# Workers that share the processors only wait for each other's threads.
if "PYTEST_XDIST_WORKER" in os.environ:
    torch.set_num_threads(1)

# Whoever is started in the background by a script ignores SIGINT, and so do its children, which tests interrupt.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


# Processes that tests start import `tests` as a package, too.
_ROOT = os.path.dirname(os.path.abspath(__file__))
os.environ["PYTHONPATH"] = os.pathsep.join([_ROOT, *filter(None, [os.environ.get("PYTHONPATH")])])


# What is published in the repository is not what the commands in tests are about.
os.environ["CADAM_ARCHIVE"] = os.devnull + ".none"


@pytest.fixture(scope="module")
def one_thread() -> Iterator[None]:
    """Torch has one thread while the tests of a module run."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
