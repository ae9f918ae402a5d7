"""``python -m cadam_paper ...``: the command `cadam`, also where no package is installed and PYTHONPATH names both."""

import sys

from cadam.cli.main import main

from .commands import add_commands

if __name__ == "__main__":
    sys.exit(main(extra=(add_commands,)))
