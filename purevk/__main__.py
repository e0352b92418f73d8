"""`python -m purevk` is the command `purevk`."""

import sys


def main() -> int:
    """Runs the command line of the process; the exit code. Ctrl-C ends it quietly, also while the
    modules of the command are imported."""
    try:
        from purevk.cli import main as run

        return run()
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130


if __name__ == "__main__":
    sys.exit(main())
