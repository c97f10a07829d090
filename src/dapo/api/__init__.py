"""The Python interface: runs, sessions and their results."""

import sys
import warnings

if "ipykernel" in sys.modules:
    with warnings.catch_warnings():
        # tqdm warns once that it has no widgets; transformers imports it
        warnings.simplefilter("ignore")
        import tqdm.auto  # noqa: F401
