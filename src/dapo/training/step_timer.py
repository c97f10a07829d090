"""Times the phases of a training step; a profiled step also gets a trace for Perfetto and a table
by operation.
"""

import resource
import sys
import time
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

PHASE_PREFIX = "phase: "
OPERATIONS_PER_PHASE = 6


class StepTimer:
    """Measures how long a step and each of its phases take."""

    def __init__(self) -> None:
        self._started = time.perf_counter()
        self._seconds: dict[str, float] = {}

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Add the time that the block takes to a phase, one of `metric_table.PHASES`."""
        started = time.perf_counter()
        try:
            yield
        finally:
            self.add(name, time.perf_counter() - started)

    def add(self, name: str, seconds: float) -> None:
        """Add measured seconds to a phase; phases may overlap in time."""
        self._seconds[name] = self._seconds.get(name, 0.0) + seconds

    def metrics(self, *, tokens: int) -> dict[str, float]:
        """Compute `time/*`: seconds of phases and the step, tokens per second, peak memory."""
        total = time.perf_counter() - self._started
        metrics = {f"time/{name}_s": round(seconds, 4) for name, seconds in self._seconds.items()}
        metrics["time/step_s"] = round(total, 4)
        metrics["time/tokens_per_s"] = round(tokens / total, 2)
        metrics["time/peak_memory_gib"] = round(peak_memory_gib(), 3)
        return metrics


def peak_memory_gib() -> float:
    """Return the peak main memory of this process."""
    unit = 1 if sys.platform == "darwin" else 1024  # macOS counts bytes, Linux kibibytes
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 2**30


@contextmanager
def profiled_step(
    step: int, steps: Collection[int], folder: Path, log: Callable[[str], None]
) -> Iterator[StepTimer]:
    """Yield the step's timer; if `step` is in `steps`, also write a trace and log a table.

    A trace holds every operation of torch, and on GPUs every kernel: tens of megabytes. Recording
    slows the step down; other steps are not affected. A step that raises leaves no trace.
    """
    if step not in steps:
        yield StepTimer()
        return
    import torch  # a process that trains has imported it already

    activities = [torch.profiler.ProfilerActivity.CPU]
    if torch.cuda.is_available():
        activities.append(torch.profiler.ProfilerActivity.CUDA)
    with torch.profiler.profile(activities=activities) as profiler:
        timer = _ProfiledTimer()
        yield timer
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"step_{step:06d}.json.gz"
    path.unlink(missing_ok=True)  # never write through a link
    started = time.perf_counter()
    profiler.export_chrome_trace(str(path))
    for line in phase_table(profiler.events()):
        log(line)
    log(
        f"trace of step {step}: {path} (open it at https://ui.perfetto.dev;"
        f" {time.perf_counter() - started:.0f} s)"
    )


class _ProfiledTimer(StepTimer):
    """A timer whose phases appear in the trace."""

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        import torch

        with super().phase(name), torch.profiler.record_function(PHASE_PREFIX + name):
            yield


def phase_table(events: Any) -> list[str]:
    """Return the lines of a table: seconds per phase, and the slowest operations of each phase.

    The time of an operation excludes the operations that it calls. It is GPU time where a GPU was
    used, else CPU time.
    """
    on_gpu = any(event.self_device_time_total for event in events)
    phases = sorted(
        (event.time_range.start, event.time_range.end, event.name.removeprefix(PHASE_PREFIX))
        for event in events
        if event.name.startswith(PHASE_PREFIX)
        and not event.is_async
        and event.device_type.name == "CPU"
    )
    starts = [start for start, _, _ in phases]
    seconds: Counter[str] = Counter()
    operations: dict[str, Counter[str]] = {name: Counter() for _, _, name in phases}
    calls: Counter[tuple[str, str]] = Counter()
    for start, end, name in phases:
        seconds[name] += (end - start) / 1e6
    for event in events:
        index = bisect_right(starts, event.time_range.start) - 1
        if (
            event.name.startswith(PHASE_PREFIX)
            or index < 0
            or event.time_range.start > phases[index][1]
        ):
            continue
        self_time = event.self_device_time_total if on_gpu else event.self_cpu_time_total
        operations[phases[index][2]][event.name] += self_time / 1e6
        calls[phases[index][2], event.name] += 1
    lines = [f"{'phase, operation':<44} {'seconds':>8} {'calls':>8}"]
    for phase, total in seconds.most_common():
        lines.append(f"{phase:<44} {total:>8.3f}")
        for name, operation_s in operations[phase].most_common(OPERATIONS_PER_PHASE):
            lines.append(f"  {name[:42]:<42} {operation_s:>8.3f} {calls[phase, name]:>8,}")
    return lines
