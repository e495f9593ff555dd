"""`python -m pagoda.server.api_server --model MODEL ...`: the older spelling of `pagoda serve MODEL ...`."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from pagoda.server.cli import main as cli


def main(argv: Sequence[str] | None = None) -> int:
    """Warn, then serve; the exit status."""
    print("this spelling is deprecated; use pagoda serve MODEL", file=sys.stderr)
    return cli.main(["serve", *(sys.argv[1:] if argv is None else argv)])


if __name__ == "__main__":
    sys.exit(main())
