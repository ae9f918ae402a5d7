"""`python -m cadam`: the command where no script of it is installed."""

from __future__ import annotations

import sys

from .cli.main import main

sys.exit(main())
