"""`python -m dapo` is the `dapo` command."""

from dapo.cli.main import main

main()
