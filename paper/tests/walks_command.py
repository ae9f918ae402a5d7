"""The command `cadam` with the experiments of the tests, to be run as a process of its own."""

import sys

from cadam.cli import main
from cadam_paper import catalogue, commands

if __name__ == "__main__":
    catalogue.PLACES = {"walk": "walks:WALK", "tuned": "walks:TUNED"}
    sys.exit(main.main(sys.argv[1:], (commands.add_commands,)))
