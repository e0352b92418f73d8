"""`python -m purevk` is the command `purevk`."""

import sys
import traceback
from typing import Any


def main() -> int:
    """Runs the command line of the process; the exit code. Ctrl-C ends it quietly, also while the
    modules of the command are imported."""
    sys.excepthook = _show_traceback
    try:
        from purevk.cli import main as run

        return run()
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130


def _show_traceback(*error: Any) -> None:
    """Tracebacks with escapes in place of what a terminal would take as commands."""
    from purevk.plain_text import printable

    print(printable("".join(traceback.format_exception(*error))), end="", file=sys.stderr)


if __name__ == "__main__":
    sys.exit(main())
