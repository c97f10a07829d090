"""Runs the `dapo` command as `python -m dapo`."""

import os
import sys

if not sys.flags.safe_path and sys.path[:1] == [os.getcwd()]:
    del sys.path[0]  # as for `dapo`: a queue.py in the current directory must not run

from dapo.cli.main import main

main()
