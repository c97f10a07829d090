"""A run as a Python object: what it has written, and what its model answers."""

import signal
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dapo.api.callbacks import translate_errors
from dapo.api.in_memory_data import HELD_OUT_FILE, Data, is_source, write_rows
from dapo.api.keywords import as_overrides, command_line, options_from
from dapo.api.result_types import Comparison, Curves, EvaluationResult
from dapo.config import Config
from dapo.core.errors import DapoError, DataError
from dapo.core.files import read_json
from dapo.core.terminal import warn
from dapo.runs.console import METRIC_COLUMNS
from dapo.runs.directory import RunDirectory
from dapo.runs.status import RunStatus, run_status
from dapo.runs.stored_config import CODE_FOLDER, load_run_config

if TYPE_CHECKING:
    import pandas as pd

    from dapo.api.callbacks import OnStep, StepSink
    from dapo.api.lifecycle.evaluate_models import EvalRequest
    from dapo.api.lifecycle.execute import Frontend
    from dapo.api.lifecycle.generate import OpenModel

"""The columns of rollouts with a number per token, which `Run.rollouts` leaves out."""
SHOWN_METRICS = ("reward/mean", "reward/accuracy", "rollout/keep_rate", "rollout/response_tokens_mean", "loss/entropy")


class Run:
    """A run directory: `dapo.train`, `dapo.resume` and `dapo.load` return one.

    Everything is read when it is asked for, so the run may go on in another process meanwhile.
    """

    def __init__(self, path: str | Path) -> None:
        """`path` is the run directory."""
        self.path = Path(path)
        """The run directory."""
        self._directory = RunDirectory(self.path)
        self._model: OpenModel | None = None

    @property
    def config(self) -> Config:
        """Every option, as run: `run.config.optim.lr`."""
        return load_run_config(self._directory)

    @property
    def state(self) -> RunStatus:
        """How the run stands: step, seconds left, newest metrics, checkpoint, bytes on disk."""
        return run_status(self.path)

    @property
    def status(self) -> str:
        """`running`, `stopped` (by a signal or a kill), `finished`, `solved` or `failed`."""
        return self.state.state

    @property
    def command(self) -> str:
        """The command line that starts such a run, for a shell; functions of the run are imported from its `code`."""
        manifest = read_json(self._directory.manifest)
        code = self.path / CODE_FOLDER
        folders = [*([str(code)] if code.is_dir() else []), *manifest.get("module_folders", [])]
        environment = {"PYTHONPATH": ":".join(folders)} if folders else {}
        program, *arguments = manifest["command"]
        return command_line([Path(program).name, *arguments], environment=environment)

    @property
    def metrics(self) -> "pd.DataFrame":
        """The metrics by step; an evaluation before the first step is row 0. docs/metrics.md explains the columns."""
        import pandas as pd

        from dapo.runs.metrics_file import metrics_by_step

        rows = metrics_by_step(self._directory.metrics)
        return pd.DataFrame(list(rows.values()), columns=None if rows else ["step"]).set_index("step")

    @property
    def rollouts(self) -> "pd.DataFrame":
        """Every judged response of every step that is kept, without its tokens.

        A large run has millions of them: `read_rollouts` reads some steps and some columns.
        """
        import pandas as pd

        from dapo.runs.rollout_table import read_rollouts

        paths = list(self._directory.rollout_tables().values())
        return read_rollouts(paths).to_pandas() if paths else pd.DataFrame()

    def read_rollouts(
        self, *, steps: Sequence[int] | None = None, columns: Sequence[str] | None = None
    ) -> "pd.DataFrame":
        """The judged responses of some steps.

        Args:
            steps: the steps; None: all that are kept (`log.rollouts`).
            columns: the columns, such as `["step", "response", "reward", "outcome"]`; None: all, with the tokens and
                their log-probabilities.

        Raises:
            DataError: a step has no table.
        """
        import pandas as pd

        from dapo.runs.rollout_table import all_columns, read_rollouts

        tables = self._directory.rollout_tables()
        if missing := [step for step in steps or () if step not in tables]:
            raise DataError(f"{self.path} has no rollouts of step {missing[0]} (log.rollouts says which are kept)")
        paths = list(tables.values()) if steps is None else [tables[step] for step in steps]
        return read_rollouts(paths, columns or all_columns(paths[0])).to_pandas() if paths else pd.DataFrame()

    @property
    def problems(self) -> "pd.DataFrame":
        """Each problem that was sampled, with its visits, right answers and last step, as of the newest checkpoint."""
        import pandas as pd

        from dapo.runs.rollout_table import read_rollouts

        path = self._directory.problem_stats
        return read_rollouts([path]).to_pandas() if path.exists() else pd.DataFrame()

    @property
    def summary(self) -> dict[str, Any] | None:
        """How the run has ended: steps, seconds, tokens, first and last evaluation; None until then."""
        return self.state.summary

    @property
    def evaluations(self) -> "pd.DataFrame":
        """The run's own evaluations by step: accuracy (avg@k) with its 95 % interval, and what else was measured."""
        import pandas as pd

        paths = self._directory.evaluations().values()
        rows = [{k: v for k, v in read_json(path).items() if not isinstance(v, dict | list)} for path in paths]
        return pd.DataFrame(rows, columns=None if rows else ["step", "accuracy"]).set_index("step")

    def evaluation(self, step: int | None = None) -> EvaluationResult:
        """One of the run's own evaluations with every response.

        Args:
            step: the step after which it was made; None: the last one.

        Raises:
            DataError: there is none.
        """
        stored = self._directory.evaluations()
        path = stored.get(max(stored, default=0) if step is None else step)
        if path is None:
            raise DataError(f"{self.path} has no evaluation{'' if step is None else f' after step {step}'}")
        return EvaluationResult.of(read_json(path))

    def curves(self) -> Curves:
        """The curves of the run as a figure, which a notebook shows: accuracy, length, entropy, outcomes of groups.

        Raises:
            DataError: there are no metrics yet.
        """
        from dapo.api.lifecycle.execute import title_of
        from dapo.runs.curves import curves_figure

        return Curves(curves_figure(self._directory.metrics, title=title_of(self.config)))

    def generate(
        self,
        prompt: str | Sequence[Any],
        *,
        samples: int = 1,
        temperature: float = 1.0,
        max_new_tokens: int | None = None,
        seed: int = 0,
    ) -> Any:
        """What the model answers, as of the newest checkpoint, with the prompts written as in training.

        The model stays loaded for the next call, until `close()`.

        Args:
            prompt: a question, a list of chat messages, or a list of questions.
            samples: how many answers to each.
            temperature: 0 takes the most probable token each time.
            max_new_tokens: the most tokens of an answer; None: as many as in training.
            seed: another one gives other answers; the same one the same.

        Returns:
            The answer as text, or a list of `samples` of them; for several questions, a list of that.

        Raises:
            CheckpointError: there is no checkpoint yet.

        Example:
            >>> answers = run.generate(["17 + 25?", "3 + 4?"], samples=2, max_new_tokens=4)
            >>> [len(each) for each in answers]
            [2, 2]
        """
        from dapo.api.lifecycle.generate import OpenModel, generate

        if self._model is None or self._model.is_outdated(self._directory):
            self.close()
            self._model = OpenModel(self._directory)
        return generate(
            self._model, prompt, samples=samples, temperature=temperature, max_new_tokens=max_new_tokens, seed=seed
        )

    def close(self) -> None:
        """Free the model that `generate` has loaded."""
        if self._model is not None:
            self._model.close()
        self._model = None

    def evaluate(
        self, data: Data = None, *, samples_per_problem: int | None = None, **options: Any
    ) -> EvaluationResult:
        """Evaluate the newest checkpoint, as `dapo eval` does.

        Args:
            data: a data source or rows, as for `dapo.train`; None: those on which the run was evaluated.
            samples_per_problem: the k of avg@k.
            **options: options that are to be others than the run's, named as for `dapo.train`.

        Raises:
            ConfigError: there is no data.
            CheckpointError: there is no checkpoint yet.

        Example:
            >>> run.evaluate([{"prompt": "2 + 2 =", "answer": "4"}], samples_per_problem=4).table["responses"].map(len)
            0    4
            Name: responses, dtype: int64
        """
        from dapo.api.lifecycle.evaluate_models import evaluate_model

        with self._evaluation_request(data, samples_per_problem, options) as request:
            return EvaluationResult.of(evaluate_model(str(self.path), request))

    def compare(
        self,
        other: "str | Path | Run",
        data: Data = None,
        *,
        samples_per_problem: int | None = None,
        **options: Any,
    ) -> Comparison:
        """Evaluate this run and another model on the same problems with the same random numbers, as pairs.

        Args:
            other: a run, a run directory, or a model: an alias, a Hugging Face id, a directory.
            data: as for `evaluate`.
            samples_per_problem: the k of avg@k.
            **options: as for `evaluate`.

        Returns:
            The difference, this run minus the other, with its 95 % interval.
        """
        from dapo.api.lifecycle.evaluate_models import compare_models

        second = other.path if isinstance(other, Run) else other
        with self._evaluation_request(data, samples_per_problem, options) as request:
            return Comparison.of(compare_models(str(second), str(self.path), request))

    @contextmanager
    def _evaluation_request(
        self, data: Data, samples_per_problem: int | None, options: Mapping[str, Any]
    ) -> "Iterator[EvalRequest]":
        """The arguments of an evaluation, whose rows stand in a file while the block runs."""
        from dapo.api.lifecycle.evaluate_models import EvalRequest

        overrides = tuple(as_overrides(options_from(options)))
        with tempfile.TemporaryDirectory() as folder, translate_errors(self):
            if data is not None and not is_source(data):
                file = Path(folder) / HELD_OUT_FILE
                write_rows(file, data)
                data = str(file)
            yield EvalRequest(
                str(data) if isinstance(data, Path) else data,
                samples_per_problem,
                overrides=overrides,
                on_second_interrupt=signal.default_int_handler,
            )

    def export(self, path: str | Path, *, step: int | None = None, adapter: bool = False) -> Path:
        """Write the model as a Hugging Face model directory, as `dapo export` does.

        Args:
            path: the directory to write; must not exist.
            step: the checkpoint; None: the newest.
            adapter: write only the adapter, of a run with `lora`.

        Returns:
            The directory.

        Raises:
            CheckpointError: there is no such checkpoint.
        """
        from dapo.api.lifecycle.execute import export_model_of

        export_model_of(self.path, Path(path), step=step, adapter=adapter, warn=warn)
        return Path(path)

    def frontend(self, on_step: "OnStep | Sequence[OnStep]", sinks: "Sequence[StepSink]") -> "Frontend":
        """How this run is shown when it trains, and what is called after each step."""
        from dapo.api.lifecycle.execute import Frontend
        from dapo.api.notebook import open_display

        calls = [on_step] if callable(on_step) else list(on_step)

        def after_step(step: int, metrics: Mapping[str, float]) -> None:
            for sink in sinks:
                sink.write(step, metrics)
            if step and any(
                not name.startswith("eval/") for name in metrics
            ):  # no evaluation before or after all steps
                for call in calls:
                    call(self, {"step": step, **metrics})

        return Frontend(
            warn=warn,
            open_display=open_display,
            on_step=[after_step],
            on_second_interrupt=signal.default_int_handler,
        )

    def __repr__(self) -> str:
        return f"<Run {self.path}: {', '.join(self._facts().values())}>"

    def _facts(self) -> dict[str, str]:
        """What a person wants to know first, by a label."""
        try:
            state = self.state
        except (DapoError, OSError) as error:
            return {"state": f"cannot be read ({error})"}
        facts = {"state": state.state, "step": f"step {state.step}/{state.num_steps or '?'}"}
        if state.state == "failed":
            facts["state"] = f"failed ({(state.exit_reason or '').partition(chr(10))[0]})"
        known = {name: value for name, value in state.metrics.items() if value is not None}
        for column in METRIC_COLUMNS:
            if column.metric in SHOWN_METRICS and column.metric in known:
                facts[column.label] = f"{column.label} {column.show(known).strip()}"
        for name, result in state.evaluations.items():
            if (accuracy := result.get("accuracy")) is not None:
                style = ".1%" if 0 <= accuracy <= 1 else ".3f"  # the score of a verifier need not be a fraction
                facts[f"evaluation {name}"] = f"{name} {accuracy:{style}} after step {result['step']:.0f}"
        return facts

    def _repr_html_(self) -> str:
        """The same for a notebook, with what to do next."""
        rows = "".join(
            f"<tr><th style='text-align:left'>{escape(label)}</th><td style='text-align:left'>{escape(text)}</td></tr>"
            for label, text in {"run": str(self.path), **self._facts()}.items()
        )
        return f"<table>{rows}</table>"
