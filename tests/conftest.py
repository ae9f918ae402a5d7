"""Settings of the whole test run."""

import os

import torch

# Workers that share the processors only wait for each other's threads.
if "PYTEST_XDIST_WORKER" in os.environ:
    torch.set_num_threads(1)
