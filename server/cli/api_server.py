"""`python -m pagoda.server.cli.api_server --model MODEL ...`: deprecated form of `pagoda serve MODEL ...`."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from pagoda.server.cli import main as cli


def main(argv: Sequence[str] | None = None) -> int:
    """Log a deprecation warning, serve, and return the exit status."""
    print("python -m pagoda.server.cli.api_server is deprecated; use pagoda serve MODEL", file=sys.stderr)
    return cli.main(["serve", *(sys.argv[1:] if argv is None else argv)])


if __name__ == "__main__":
    sys.exit(main())
