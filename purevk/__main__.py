"""`python -m purevk` is the command `purevk`."""

import sys

from purevk.cli import main

if __name__ == "__main__":
    sys.exit(main())
