"""`python -m cadam`: runs the command line without an installed script."""

from __future__ import annotations

import sys

from .cli.main import main

sys.exit(main())
