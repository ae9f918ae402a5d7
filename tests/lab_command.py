"""The command `cadam` with the experiments of the tests, to be run as a process of its own."""

import sys

from cadam import cli
from cadam.lab import catalogue

if __name__ == "__main__":
    catalogue.PLACES = {"walk": "lab_experiments:WALK", "tuned": "lab_experiments:TUNED"}
    sys.exit(cli.main(sys.argv[1:]))
