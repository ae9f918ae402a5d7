"""The command `cadam` with the experiments of the tests, for tests that start it as a separate process."""

import sys

from cadam.cli import main
from cadam_paper import catalog, commands

if __name__ == "__main__":
    catalog.EXPERIMENTS = {"walk": "walks:WALK", "tuned": "walks:TUNED"}
    sys.exit(main.main(sys.argv[1:], (commands.add_commands,)))
