"""`python -m megabatch`: the same as the `megabatch` command."""

from __future__ import annotations

import sys

from megabatch.cli import main

if __name__ == "__main__":
    sys.exit(main())
