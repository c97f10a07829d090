"""A run as a Python object: files as tables and figures, and a model that generates."""

import os
import shlex
import signal
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from html import escape
from math import fsum
from numbers import Integral
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dapo.api.chat import Chat
from dapo.api.in_memory_data import HELD_OUT_FILE, Data, Reward, row_errors, stored_data
from dapo.api.keywords import as_overrides, read_keywords
from dapo.api.plain_values import described, model_name, plain_value, plain_values
from dapo.api.play import Episodes, PlayedEpisode
from dapo.api.python_errors import CallInterrupted, python_interface
from dapo.api.result_types import (
    Comparison,
    Curves,
    EvaluationResult,
    PageAddress,
    table_of,
    with_score,
)
from dapo.api.rollout_frames import PREFIXES, expanded, selected, stored_columns
from dapo.config import Config
from dapo.core.errors import (
    AgentFailed,
    CheckpointError,
    ConfigError,
    DapoError,
    DataError,
    EnvironmentFailed,
    LossFailed,
    VerifierFailed,
)
from dapo.core.files import damage_of, read_json
from dapo.core.loading import add_code_folder
from dapo.core.model_files import DtypeName
from dapo.core.terminal import print_text, printable, warn
from dapo.core.text import did_you_mean
from dapo.core.waiting import Interrupted
from dapo.runs.console import columns_of, notebook_display
from dapo.runs.curves import curves_figure, marks_of
from dapo.runs.directory import RunDirectory
from dapo.runs.metric_table import accuracy_text, is_mean_score
from dapo.runs.metrics_file import metrics_by_step
from dapo.runs.stages import run_path_of
from dapo.runs.status import RunStatus, run_status
from dapo.runs.stored_config import CODE_FOLDER, command_of, load_run_config
from dapo.training.signals import ListenerFailed

if TYPE_CHECKING:
    import pandas as pd

    from dapo.start.evaluate import EvalRequest
    from dapo.start.generate import OpenModel
    from dapo.training.state import Run as TrainingRun

SHOWN_METRICS = (
    "reward/mean",
    "reward/accuracy",
    "reward/score_mean",
    "rollout/keep_rate",
    "rollout/response_tokens_mean",
    "loss/entropy",
)
_CHAT = 'run.chat("TEXT") talks to the model'
_GENERATE = 'run.generate("PROMPT") samples answers'
_EXPORT = 'run.export("DIR") writes the model'
_RESUME = "dapo.resume(run, steps=N) trains on"
_METRICS = "run.metrics has the metrics of each step"
_STEP = "run.state.step is its newest step"
_CONFIG = "run.config has its options"
_PATH = "run.path is its directory"
_ROLLOUTS = "run.rollouts has every response"
_PUSH = 'run.export("DIR", push="OWNER/NAME") uploads the model to the Hugging Face hub'
OTHER_NAMES = {
    "ask": _CHAT,
    "talk": _CHAT,
    "sample": _GENERATE,
    "predict": _GENERATE,
    "infer": _GENERATE,
    "complete": _GENERATE,
    "answer": _GENERATE,
    "push_to_hub": _PUSH,
    "push": _PUSH,
    "upload": _PUSH,
    "save_pretrained": _EXPORT,
    "save": _EXPORT,
    "save_model": _EXPORT,
    "model": f"{_EXPORT}, and run.config.model.name is the one with which it began",
    "train": _RESUME,
    "resume": _RESUME,
    "stop": "`return dapo.STOP` in on_step=FUNCTION ends a run",
    "wait": "dapo.train returns when the run has ended",
    "plot": "run.curves() is the figure",
    "history": _METRICS,
    "log_history": _METRICS,
    "logs": _METRICS,
    "log": _METRICS,
    "loss": _METRICS,
    "step": _STEP,
    "global_step": _STEP,
    "args": _CONFIG,
    "options": _CONFIG,
    "samples": _ROLLOUTS,
    "completions": _ROLLOUTS,
    "responses": _ROLLOUTS,
    "name": _PATH,
    "output_dir": _PATH,
    "run_dir": _PATH,
    "eval": "run.evaluate() evaluates the newest checkpoint",
    "test": "run.evaluate() evaluates the newest checkpoint",
    "delete": "the command dapo clean frees its disk space",
}
"""What there is instead of methods that one might try."""


class UnknownName(AttributeError):
    """A run has no such attribute."""

    def _render_traceback_(self) -> list[str]:
        """Return the lines that IPython shows: no frames."""
        return [f"AttributeError: {self}"]


@python_interface
class Run:
    """A run directory, from `dapo.train`, `dapo.resume` or `dapo.load`.

    Every property reads the files on each use, so another process may continue the run meanwhile.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = run_path_of(path)
        self._directory = RunDirectory(self.path)
        self._model: OpenModel | None = None
        self._chat: Chat | None = None
        self._live: TrainingRun | None = None  # during a call of `on_step`

    def __fspath__(self) -> str:
        """Return the path of the run directory: a run stands wherever a path may."""
        return str(self.path)

    @property
    def config(self) -> Config:
        return load_run_config(self._directory)

    @property
    def state(self) -> RunStatus:
        """The state of the run: step, seconds left, newest metrics, checkpoint, bytes on disk."""
        return run_status(self.path)

    @property
    def status(self) -> str:
        """`running`, `stopped`, `finished`, `solved` or `failed`.

        A run is stopped by a signal, a kill or a callback; `state.stop_reason` says which.
        """
        return self.state.state

    @property
    def command(self) -> str:
        """The shell command that makes a run with these options, with functions from `code`.

        A comment behind it has each `dapo resume` that changed an option, with the last step
        before.
        """
        manifest = read_json(self._directory.manifest)
        code = self.path / CODE_FOLDER
        folders = ":".join(manifest.get("module_folders", []))
        variables = {"DAPO_CODE": str(code) if code.is_dir() else "", "PYTHONPATH": folders}
        settings = [f"{name}={shlex.quote(value)}" for name, value in variables.items() if value]
        (program, *arguments), resumes = command_of(self._directory)
        command = " ".join([*settings, shlex.join([Path(program).name, *arguments])])
        return "\n".join([command, *(f"# {resume}" for resume in resumes)])

    @property
    def metrics(self) -> "pd.DataFrame":
        """The metrics by step, see `dapo show docs metrics`; row 0: evaluation before training."""
        from dapo.api.shown_frames import metrics_view, shown_frame

        records = metrics_by_step(self._directory.metrics).values()
        return shown_frame(table_of(records, "step").set_index("step"), metrics_view)

    @property
    def rollouts(self) -> "pd.DataFrame":
        """All stored responses, without tokens; `read_rollouts` selects steps and columns.

        `column.NAME` is a column of the data, `component.NAME` the score of one of several rewards.
        """
        from dapo.api.shown_frames import rollouts_view, shown_frame
        from dapo.runs.rollout_table import read_rollouts

        paths = list(self._directory.rollout_tables().values())
        frame = expanded(read_rollouts(paths).to_pandas()) if paths else table_of([])
        return shown_frame(frame, rollouts_view)

    def read_rollouts(
        self,
        *,
        steps: int | Sequence[int] | None = None,
        columns: str | Sequence[str] | None = None,
    ) -> "pd.DataFrame":
        """Read stored responses of some `steps`, by default all that `log.rollouts` keeps.

        `columns` are such as `["step", "response", "reward", "column.level"]`; None: all, also
        tokens and log-probabilities. Raises DataError for a step without a table, and for a column
        that there is not.
        """
        from dapo.runs.rollout_table import all_columns, read_rollouts

        tables = self._directory.rollout_tables()
        chosen: Any = tables if steps is None else steps
        # also a number of NumPy, such as an entry of `metrics.index`
        if isinstance(chosen, Integral):
            chosen = [chosen]
        chosen = list(chosen)
        if absent := [step for step in chosen if step not in tables]:
            raise DataError(
                f"{self.path} has no rollouts of step {absent[0]} (log.rollouts sets which are"
                " kept)"
            )
        paths = [tables[step] for step in chosen]
        if not paths:
            return table_of([])
        known = all_columns(*paths)
        if columns is None:
            return expanded(read_rollouts(paths, known).to_pandas())
        names = [columns] if isinstance(columns, str) else list(columns)
        frame = read_rollouts(paths, stored_columns(names, known)).to_pandas()
        raw = {name: frame[name] for name in PREFIXES if name in names}
        return selected(expanded(frame).assign(**raw), names)

    @property
    def problems(self) -> "pd.DataFrame":
        """The sampled problems with visits and correct responses, as of the newest checkpoint."""
        from dapo.api.shown_frames import ProblemsView, shown_frame
        from dapo.runs.stored_table import stored_table

        path = self._directory.problem_stats
        frame = table_of([])
        if path.exists():
            with stored_table(path) as table:
                frame = table.read(table.names).to_pandas()
        return shown_frame(frame, ProblemsView(self.path))

    @property
    def summary(self) -> dict[str, Any] | None:
        """Steps, seconds, tokens and evaluations of a run that has ended; None before."""
        return self.state.summary

    @property
    def evaluations(self) -> "pd.DataFrame":
        """The evaluations during training by step: accuracy, its interval, and more.

        The column `score` has the mean score of a verifier that does not decide right or wrong.
        """
        from dapo.api.shown_frames import evaluations_view, shown_frame

        rows = []
        for path in self._directory.evaluations().values():
            summary = with_score(read_json(path))
            rows.append({k: v for k, v in summary.items() if not isinstance(v, dict | list)})
        frame = table_of(rows, "step", "accuracy").set_index("step")
        return shown_frame(frame, evaluations_view)

    def evaluation(self, step: int | None = None) -> EvaluationResult:
        """Return an evaluation during training, by default the last, with every response.

        Raises DataError if the run has no such evaluation.
        """
        paths = self._directory.evaluations()
        path = paths.get(max(paths, default=0) if step is None else step)
        if path is None:
            raise DataError(
                f"{self.path} has no evaluation{'' if step is None else f' after step {step}'}"
            )
        return EvaluationResult.of(read_json(path))

    def curves(self) -> Curves:
        """Return a figure of accuracy or mean score, length, entropy and outcomes of groups.

        A vertical line marks where `dapo.resume` changed the reward or another option.
        Raises DataError without metrics.
        """
        from dapo.start.run import title_of

        marks = marks_of(self._directory)
        figure = curves_figure(self._directory.metrics, title=title_of(self.config), marks=marks)
        return Curves(figure)

    def view(self) -> PageAddress:
        """Serve the page of `dapo view` until this process ends, and return its address.

        In a notebook the address shows the page as it is now, inside of the cell; the address itself
        opens on the machine of the kernel only.
        """
        from dapo.analysis.view.queries import Runs
        from dapo.analysis.view.server import serve_in_background

        return PageAddress(serve_in_background(Runs([self.path])), self.path)

    def report(self, path: str | Path | None = None) -> Path:
        """Write the page as an HTML file, by default in the current folder; return its path."""
        from dapo.analysis.view.report import write_report

        return Path(write_report(self.path, None if path is None else Path(path))["output"])

    def doctor(self) -> "pd.DataFrame":
        """Return the findings of `dapo doctor`, the most severe first; empty if none.

        The table, a row for each finding, shows itself as the verdict and a card for each.
        """
        from dapo.analysis.doctor import diagnose
        from dapo.api.shown_frames import FindingsView, shown_frame

        with damage_of(self.path):
            diagnosis = diagnose(self.path)
        rows = diagnosis.to_json()["findings"]
        frame = table_of(rows, "name", "severity", "cause", "change", "advice")
        return shown_frame(frame, FindingsView(diagnosis))

    def generate(
        self,
        prompt: str | Sequence[Any],
        *,
        samples: int = 1,
        temperature: float = 1.0,
        top_p: float = 1.0,
        max_new_tokens: int | None = None,
        seed: int = 0,
    ) -> Any:
        """Sample answers from the newest checkpoint, with prompts formatted as in training.

        Within `on_step` they come from the present weights instead, those after the step, without a
        checkpoint.

        The model stays loaded for the next call, until `close()`. `prompt` is a question, a list of
        chat messages, or a list of questions. Temperature 0 takes the most likely token; `top_p`
        samples only the most likely tokens, up to this sum of their probabilities; without
        `max_new_tokens`, the length limit is `rollout.max_response_tokens`; equal seeds give equal
        answers. Returns the answer as text, or `samples` of them in a list; for a list of
        questions, a list of these. Raises CheckpointError if the run has no checkpoint yet.

        Example:
            >>> answers = run.generate(["17 + 25?", "3 + 4?"], samples=2, max_new_tokens=4)
            >>> [len(each) for each in answers]
            [2, 2]
        """
        from dapo.start.generate import SamplingOptions, answers_of, live_sampler

        numbers = plain_values(
            samples=samples,
            temperature=temperature,
            top_p=top_p,
            max_new_tokens=max_new_tokens,
            seed=seed,
        )
        options = SamplingOptions(**numbers)
        if self._live is not None:
            return answers_of(live_sampler(self._live, options), prompt)
        return answers_of(self._open_model().sampler(options), prompt)

    def play(self, n: int = 1, *, seed: int = 0, temperature: float | None = None) -> Episodes:
        """Play `n` episodes of the newest checkpoint in the run's environment, and show them.

        Their problems are the first held-out ones, or those of training. `temperature` is
        `eval.temperature` by default; equal seeds give equal episodes. Raises ConfigError for a run
        without an environment, CheckpointError without a checkpoint.
        """
        from dapo.start.play import play_run

        self._require_idle("play")
        if n < 1:
            raise ConfigError(f"n: expected a number of episodes, at least 1, got {n}")
        played = play_run(self.path, n, seed=seed, temperature=temperature)
        shown = [
            PlayedEpisode.of(f"problem {each.problem.id}", each.problem.prompt, each.episode)
            for each in played
        ]
        noun = "episode" if len(shown) == 1 else "episodes"
        mean = fsum(each.reward for each in shown) / len(shown)
        headline = f"{len(shown)} {noun} of {self.path}, mean reward {mean:.3g}"
        if all(each.correct is not None for each in shown):
            headline += f", {sum(each.correct is True for each in shown)} correct"
        return Episodes(headline, tuple(shown))

    @property
    def chat(self) -> Chat:
        """A conversation with the newest checkpoint: `run.chat("17 + 25?")` answers.

        Later calls continue it; see `Chat`. The model stays loaded until `close()`.
        """
        if self._live is not None:
            raise ConfigError("within on_step, run.generate answers with the present weights")
        if self._chat is None:
            self._chat = Chat(self._directory, self._open_model)
        return self._chat

    def _open_model(self) -> "OpenModel":
        """Return the newest checkpoint's model, which stays loaded until `close()`."""
        from dapo.start.generate import OpenModel

        if self._model is None or self._model.is_outdated(self._directory):
            self.close()
            self._model = OpenModel.of_run(self.path)
        return self._model

    if not TYPE_CHECKING:  # otherwise any name would be right for a type checker

        def __getattr__(self, name: str) -> Any:
            """Name the method that there is for a name that one might try."""
            text = f"a run has no attribute {name!r}"
            if name.startswith("_"):  # of a protocol that a run does not have
                raise UnknownName(text)
            names = [own for own in dir(type(self)) if not own.startswith("_")]
            advice = OTHER_NAMES.get(name) or did_you_mean(name, names)
            raise UnknownName(f"{text}; {advice}")

    @contextmanager
    def _training(self, live: "TrainingRun") -> Iterator[None]:
        """Let `generate` use the idle engine of a run that trains in this process."""
        self._live = live
        try:
            yield
        finally:
            self._live = None

    def _require_idle(self, method: str) -> None:
        """Raise CheckpointError within a callback, where the newest checkpoint is an older step's."""
        if self._live is not None:
            raise CheckpointError(
                f"run.{method} reads a checkpoint, and within a callback there is none of step"
                f" {self._live.state.step} yet: call it after the run; run.generate uses the"
                " present weights, and on_evaluation gets the evaluations on eval_data"
            )

    def close(self) -> None:
        """Free the model that `generate` and `chat` loaded."""
        if self._model is not None:
            self._model.close()
        self._model = None

    def evaluate(
        self,
        data: Data = None,
        *,
        reward: Reward = None,
        samples_per_problem: int | None = None,
        until_width: float | None = None,
        **options: Any,
    ) -> EvaluationResult:
        """Evaluate the newest checkpoint, like `dapo eval`.

        `data` is a data source or rows, as for `dapo.train`, by default the run's `data.eval`;
        `reward` is one as for `dapo.train`, by default the run's; `samples_per_problem` is the k of
        avg@k; `until_width` ends it when the 95 % interval is at most so many points wide, with
        problems drawn at random; `options` change the run's, first of all those of `eval`:
        `temperature`, `top_p`, `max_response_tokens`. Raises ConfigError without data,
        CheckpointError without checkpoint.

        Example:
            >>> run.evaluate([{"prompt": "2 + 2 =", "answer": "4"}], samples_per_problem=4).table["responses"].map(len)
            0    4
            Name: responses, dtype: int64
        """
        from dapo.start.evaluate import evaluate_model

        if until_width is not None and not 0 < until_width < 100:
            raise ConfigError(
                f"until_width: expected points between 0 and 100, got {until_width!r}"
            )
        with self._evaluation_request(data, reward, samples_per_problem, options) as request:
            request = replace(request, until_width=until_width)
            return EvaluationResult.of(evaluate_model(str(self.path), request))

    def compare(
        self,
        other: "str | os.PathLike[str]",
        data: Data = None,
        *,
        reward: Reward = None,
        samples_per_problem: int | None = None,
        **options: Any,
    ) -> Comparison:
        """Compare this run with another run or model on the same problems and random numbers.

        The difference is this run minus the other. The other arguments are those of `evaluate`.
        """
        from dapo.start.evaluate import compare_models

        second = model_name(other, "other")
        if not isinstance(second, str):
            raise ConfigError(
                f"other: expected a name, a directory or a run, got {described(other)}"
            )
        with self._evaluation_request(data, reward, samples_per_problem, options) as request:
            return Comparison.of(compare_models(second, str(self.path), request))

    @contextmanager
    def _evaluation_request(
        self,
        data: Data,
        reward: Reward,
        samples_per_problem: int | None,
        options: Mapping[str, Any],
    ) -> "Iterator[EvalRequest]":
        """The request of an evaluation, whose files are in a temporary folder until it ends."""
        from dapo.start.evaluate import EvalRequest

        self._require_idle("evaluate")
        if isinstance(reward, Mapping) and "verifier" in reward:  # the section of options
            options = {**options, "reward": reward}
            reward = None
        values, modules, _ = read_keywords({}, reward, options, section="eval")
        with tempfile.TemporaryDirectory() as folder:
            stored = stored_data(data, Path(folder) / HELD_OUT_FILE, argument="data")
            for module in modules:
                module.write(Path(folder) / CODE_FOLDER)
            add_code_folder(Path(folder) / CODE_FOLDER)
            with row_errors(stored.labels):
                stored.write()
                yield EvalRequest(
                    stored.source,
                    plain_value(samples_per_problem, "samples_per_problem"),
                    overrides=tuple(as_overrides(values)),
                    on_second_interrupt=signal.default_int_handler,
                )

    def export(
        self,
        path: str | Path,
        *,
        step: int | None = None,
        adapter: bool = False,
        push: str | None = None,
        private: bool = False,
        dtype: DtypeName = "auto",
    ) -> Path:
        """Write a checkpoint, by default the newest, as a new Hugging Face model; return its path.

        It has a model card, README.md. `adapter` writes only the adapter of a run with
        `model.lora`. `dtype` is the type of the weights, `auto` the run's. `push="OWNER/NAME"` also
        uploads it to the Hugging Face hub, with the token of `hf auth login` or HF_TOKEN, makes the
        repository if it is missing, `private` if wanted, and prints its address. Raises
        CheckpointError without such a checkpoint, and PushFailed if the hub does not take the
        model, which stays in `path`.
        """
        from dapo.start.export import export_model_of

        if step is None:
            self._require_idle("export")
        exported = export_model_of(
            self.path,
            Path(path),
            step=step,
            adapter=adapter,
            push=push,
            private=private,
            dtype=dtype,
            warn=warn,
        )
        if exported.address is not None:
            print_text(f"published: {exported.address}")
        return Path(path)

    def __repr__(self) -> str:
        facts = self._facts()
        parts = [facts.pop("state"), *(f"{label} {value}" for label, value in facts.items())]
        return printable(f"<Run {self.path}: {', '.join(parts)}>")

    def _facts(self) -> dict[str, str]:
        try:
            state = self.state
        except (DapoError, OSError) as error:
            return {"state": f"cannot be read ({error})"}
        facts = {"state": state.state, "step": f"{state.step}/{state.num_steps or '?'}"}
        reason = state.exit_reason if state.state == "failed" else state.stop_reason
        if reason is not None:
            facts["state"] = f"{state.state} ({reason.partition(chr(10))[0]})"
        numbers = {name: value for name, value in state.metrics.items() if value is not None}
        for column in columns_of(numbers):
            if column.metric in SHOWN_METRICS and column.metric in numbers:
                facts[column.label] = column.show(numbers).strip()
        for name, result in state.evaluations.items():
            if (accuracy := result.get("accuracy")) is not None:
                metrics = {f"eval/{name}/{key}": value for key, value in result.items()}
                text = accuracy_text(accuracy, is_score=is_mean_score(metrics, name))
                facts[f"evaluation {name}"] = f"{text} after step {result['step']:.0f}"
        return facts

    def _repr_html_(self) -> str:
        rows = "".join(
            f"<tr><th style='text-align:left'>{escape(label)}</th><td"
            f" style='text-align:left'>{escape(text)}</td></tr>"
            for label, text in {"run": str(self.path), **self._facts()}.items()
        )
        return f"<table>{rows}</table>"


class TrainingInterrupted(CallInterrupted):
    """Ctrl-C stopped a run; its state is saved. `dapo.resume(error.run)` continues it."""

    def __init__(self, run: Run, reason: str, *, is_saved: bool = True) -> None:
        """`is_saved`: the state was saved before the run ended; False: Ctrl-C came twice."""
        self.run = run
        self.is_saved = is_saved
        self.reason = reason
        path = str(run.path)
        super().__init__(
            f"{reason}; continue with: run = dapo.resume({path!r}), inspect with: run ="
            f" dapo.load({path!r})"
        )

    def name_variable(self, name: str) -> None:
        """Write the advice for a caller whose variable `name` is the run."""
        self.args = (
            f"{self.reason}; {name} is the stopped run: {name}.curves() shows it,"
            f" dapo.resume({name}) continues it",
        )


@contextmanager
def translate_errors(run: Run) -> Iterator[None]:
    """Turn Ctrl-C into TrainingInterrupted, add advice to failures of functions, and the run to
    every error that ends it.
    """
    try:
        yield
    except (Interrupted, KeyboardInterrupt) as error:
        if isinstance(error, TrainingInterrupted):
            raise
        if getattr(error, "exit_code", 130) != 130:
            add_run(error, run)
            raise
        if not RunDirectory.is_run(run.path):
            raise CallInterrupted(
                "stopped by Ctrl-C before the run began; nothing is written"
            ) from None
        is_saved = isinstance(error, Interrupted)
        reason = "stopped at once"
        if is_saved:
            reason = "stopped by the stop button" if notebook_display() else str(error)
        raise TrainingInterrupted(run, f"{reason}, {_saved_step(run)}", is_saved=is_saved) from None
    except (VerifierFailed, LossFailed) as error:
        corrected = "loss=FUNCTION" if isinstance(error, LossFailed) else "reward=FUNCTION"
        kind = "function"
        if isinstance(error, EnvironmentFailed):
            corrected = "environment=CLASS"
            kind = "class"
        if isinstance(error, AgentFailed):
            corrected = "agent=FUNCTION"
        call = f"dapo.resume({str(run.path)!r}, {corrected})"
        error.args = (f"{error}; with a corrected {kind}: {call}",)
        add_run(error, run)
        raise
    except ListenerFailed as error:
        add_run(error.__cause__ or error, run)
        raise
    except Exception as error:
        add_run(error, run)
        raise


def add_run(error: BaseException, run: Run) -> None:
    """Set `error.run`, unless the run has not begun."""
    if RunDirectory.is_run(run.path):
        error.run = run  # type: ignore[attr-defined]


def _saved_step(run: Run) -> str:
    """Say which step of a run is saved: `step 2 of 4 is saved`."""
    newest = RunDirectory(run.path).checkpoints.newest_step()
    if newest is None:
        return "before anything was saved"
    return f"step {newest} of {run.config.train.num_steps} is saved"
