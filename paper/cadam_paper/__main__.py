"""Run the command `cadam` with the commands of the paper: ``python -m cadam_paper ...``.

This works without installing the packages, if PYTHONPATH contains the folders of both.
"""

import sys

from cadam.cli.main import main

from .commands import add_commands

if __name__ == "__main__":
    sys.exit(main(extra=(add_commands,)))
