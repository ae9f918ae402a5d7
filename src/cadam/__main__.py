"""`python -m cadam` is the command `cadam`, also from a source tree that is not installed."""

import sys

from .cli import main

sys.exit(main())
