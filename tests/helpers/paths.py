"""Where the repository keeps what tests read."""

from pathlib import Path

TESTS = Path(__file__).parents[1]
ROOT = TESTS.parent
CONFIGS = ROOT / "configs"
TINY = CONFIGS / "tiny.yaml"
SHARED_DATA = ROOT.parent / "shared" / "data"
"""Published data sets, beside the checkout; tests that need them skip where they are not."""
