"""`python -m dapo` is the `dapo` command."""

import os
import sys

if not sys.flags.safe_path and sys.path[:1] == [os.getcwd()]:
    del sys.path[0]  # as with `dapo`: a file of the current directory called queue.py must not run

from dapo.cli.main import main

main()
