"""A run as a Python object: what it has written, and what its model answers."""

import signal
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dapo.config import Config
from dapo.core.files import read_json
from dapo.training.run_config import load_run_config
from dapo.training.run_directory import RunDirectory

if TYPE_CHECKING:
    import pandas as pd

    from dapo.api.execute import Frontend
    from dapo.api.train import OnStep, StepSink


class Run:
    """A run directory: `dapo.train` and `dapo.load` return one. Everything is read when it is asked for."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        """The run directory."""
        self._directory = RunDirectory(self.path)

    @property
    def config(self) -> Config:
        """Every option, as run: `run.config.optim.lr`."""
        return load_run_config(self._directory)

    @property
    def metrics(self) -> "pd.DataFrame":
        """The metrics, a row per step; an evaluation before the first step is the row of step 0."""
        import pandas as pd

        from dapo.telemetry.sinks import read_metrics

        path = self._directory.metrics
        table = pd.DataFrame(read_metrics(path) if path.exists() else [], columns=None)
        return table.groupby("step").first() if len(table) else table

    @property
    def summary(self) -> dict[str, Any] | None:
        """How the run has ended: steps, seconds, tokens, first and last evaluation; None until then."""
        path = self._directory.summary
        return dict(read_json(path)) if path.exists() else None

    def frontend(self, on_step: "OnStep | Sequence[OnStep]", sinks: "Sequence[StepSink]") -> "Frontend":
        """How this run is shown when it trains, and what is called after each step."""
        import sys

        from dapo.api.execute import Frontend
        from dapo.core.terminal import print_text

        calls = [on_step] if callable(on_step) else list(on_step)

        def after_step(step: int, metrics: Mapping[str, float]) -> None:
            for sink in sinks:
                sink.write(step, metrics)
            if any(not name.startswith("eval/") for name in metrics):  # not an evaluation before or after all steps
                for call in calls:
                    call(self, {"step": step, **metrics})

        return Frontend(
            warn=lambda text: print_text(f"warning: {text}", file=sys.stderr),
            on_step=[after_step],
            on_second_interrupt=signal.default_int_handler,
        )

    def __repr__(self) -> str:
        return f"Run({str(self.path)!r})"
