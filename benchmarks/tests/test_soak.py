"""A short soak: handles do not pile up, and the files of a run are readable while it writes
them.
"""

import sys
from pathlib import Path

import pytest

from benchmarks.soak import Snapshot, growth, watch_run


@pytest.mark.skipif(sys.platform != "linux", reason="memory and handles are read from /proc")
def test_sixty_steps_leave_as_many_handles_open_as_twenty(tmp_path: Path):
    snapshots, _ = watch_run(tmp_path / "run", steps=60)
    found = growth(snapshots, from_step=20)
    # of a checkpoint that is being written a file or two are open
    assert found["handles"][1] <= found["handles"][0] + 2
    # one group of four is trained, and more may be judged
    assert all(snapshot.rows >= 4 for snapshot in snapshots)


def test_growth_compares_the_last_snapshots_with_the_first_that_count():
    snapshots = [
        Snapshot(step, rss_bytes=(100 + (step >= 300)) << 20, handles=9 + step // 300, rows=8)
        for step in range(400)
    ]
    assert growth(snapshots, from_step=200) == {
        "steps": [[200, 219], [380, 399]],
        "memory_mib": [100.0, 101.0],
        "memory_growth_percent": 1.0,
        "handles": [9, 10],
    }
    with pytest.raises(ValueError, match="1 snapshots from step 399 on are too few"):
        growth(snapshots, from_step=399)
