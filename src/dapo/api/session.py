"""Algorithm 1 in a notebook (`dapo.session`): collect a batch, inspect it, update the model."""

import hashlib
import json
import os
import signal
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, closing, contextmanager
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from dapo.api.batch import CollectedBatch
from dapo.api.code_writer import CodeWriter
from dapo.api.in_memory_data import (
    Data,
    Reward,
    row_errors,
    stored_data,
    verifier_option,
    weights_by_name,
)
from dapo.api.keywords import (
    build_scaled,
    load_base,
    named_functions,
    options_from,
    require_set_once_in_call,
    with_teacher,
)
from dapo.api.plain_values import model_name, plain_value, plain_values
from dapo.api.python_errors import python_interface
from dapo.api.result_types import EvaluationResult, table_of
from dapo.config import Config
from dapo.config.data_spec import MIX
from dapo.config.load import merge_options, resolve_auto_verifier
from dapo.core.errors import ConfigError, DataError
from dapo.core.loading import add_code_folder
from dapo.core.terminal import print_text
from dapo.core.text import quoted
from dapo.evaluation.evaluate import EngineSampler, evaluate
from dapo.evaluation.scores import evaluation_plan
from dapo.policy.custom_loss import CustomLoss, LossFunction, load_loss
from dapo.policy.model import export_model
from dapo.policy.policy import Policy
from dapo.rewards.combine import InlineJudge
from dapo.rewards.pool import VerifierPool
from dapo.runs.console import progress
from dapo.runs.stored_config import CODE_FOLDER
from dapo.sampling.batch import Sampling, collect
from dapo.sampling.rollout_metrics import mean_of_updates
from dapo.start.build import build_engine, build_sampling, open_policy
from dapo.start.card.facts import has_trained
from dapo.start.check import UserCode, load_functions, open_environment
from dapo.start.generate import SamplingOptions, answers_of
from dapo.start.read import drop_long, read_model_and_encoder, require_fit
from dapo.start.resolve import require_hardware, resolve_auto, resolve_engine
from dapo.start.rows import load_rows
from dapo.training.signals import signals_as_requests
from dapo.training.stopping import require_groups
from dapo.training.updates import estimate_advantages, prepare_updates
from dapo.types import Problem

if TYPE_CHECKING:
    import pandas as pd

SHOW_AFTER_S = 1.0
"""Seconds after which progress is shown."""
NO_DATA = "no-problems-yet.jsonl"
"""Placeholder for `data.train` in a session whose problems are passed to `collect`."""
ROWS_FILE = "rows.jsonl"


@python_interface
class Session(AbstractContextManager["Session"]):
    """A model, its optimiser and an engine in this process; close it, or use `with`."""

    def __init__(
        self,
        config: Config,
        *,
        data: Data = None,
        reward: Reward = None,
        code: Sequence[CodeWriter] = (),
    ) -> None:
        """Load the model. `data` and `reward` are the defaults of `collect`."""
        if config.rollout.engine == "auto":
            config = config.changed("rollout", engine="native")
        _require_one_process(config)
        require_hardware(config)
        self.config = resolve_auto(config, log=print_text)
        """The options, with `auto` resolved."""
        self.step = 0
        """The number of finished steps, also the version of the weights."""
        self._data = _rereadable(data)
        self._reward = reward
        self._metrics: list[dict[str, float]] = []
        self._samplings: dict[str, Sampling] = {}
        self._problems: dict[str, list[Problem]] = {}
        self._pools: dict[str, VerifierPool] = {}
        self._empty_steps = 0
        self._engine_version: int | None = None
        self._stack = ExitStack()
        with ExitStack() as stack:
            self._folder = Path(stack.enter_context(TemporaryDirectory(prefix="dapo-session-")))
            for writer in code:
                writer.module().write(self._folder / CODE_FOLDER)
            add_code_folder(self._folder / CODE_FOLDER)
            self._functions = load_functions(self.config)
            environment = stack.enter_context(open_environment(self.config))
            self._loaded, self._encoder, notes, self._episodes = read_model_and_encoder(
                self.config, environment, training=True
            )
            self.config = resolve_engine(self.config, self._loaded.model)
            self._engine = build_engine(
                self.config, self._loaded, episodes=self._episodes, log=print_text
            )
            stack.callback(self._engine.close)
            policy = stack.enter_context(
                open_policy(self.config, self._loaded, None, self._functions)
            )
            assert isinstance(policy, Policy)
            self._policy = policy
            self._stack = stack.pop_all()
        for note in notes:
            print_text(note)

    def collect(self, problems: Data = None, reward: Reward = None) -> CollectedBatch:
        """Sample and judge groups until enough carry a signal (Algorithm 1, lines 4 to 9).

        Each set of problems is a stream of its own, which continues where its last batch closed.
        Samples depend only on the seed, the step, the position in the stream and the token, so
        equal calls give equal batches. Ctrl-C undoes the batch and raises KeyboardInterrupt.

        `problems` and `reward` are as for `dapo.train`, by default the session's. Functions are
        called in this process, without a time limit; an exception becomes the error of the
        response. Named verifiers run in other processes. The batch is short, or empty, if
        `max_groups_per_step` was reached.

        Raises:
            DataError: the problems cannot be read.
            RewardError: the reward does not exist or cannot judge these problems.
            VerifierFailed: too many responses have no verdict.
        """
        sampling = self._prepare(problems, reward)
        self._sync_engine()
        step = self.step + 1
        with (
            _stoppable(lambda: sampling.roll_back(finished_steps=self.step)) as check,
            progress("sample", unit="groups", after_s=SHOW_AFTER_S) as show,
        ):
            batch = collect(
                sampling,
                step=step,
                on_progress=lambda done, total, note: show(done, total),
                check=check,
            )
        samples = estimate_advantages(batch.groups, self._policy, self.config, step=step)
        return CollectedBatch(step, batch, tuple(samples), self._encoder.decode_prompt)

    def update(
        self, batch: CollectedBatch, *, loss: LossFunction | str | None = None
    ) -> dict[str, float]:
        """Algorithm 1, lines 10 to 11: the optimiser updates of one step on a batch.

        Args:
            batch: a batch of `collect`, sampled by the current weights; each batch is used once.
            loss: a function `(logprobs, old_logprobs, advantages, mask, weights) -> (loss,
                metrics)`, or its `module:function`, in place of the paper's loss (`dapo show docs
                losses`); None: `loss.function`.

        Returns:
            The metrics of the step, as in a line of metrics.jsonl, without times. `session.metrics`
            keeps them.

        Raises:
            ConfigError: the loss is refused.
            DataError: the batch was sampled by other weights.
            ShortfallError: no group of the batch carries a signal; the message gives the reason.
            LossFailed: the loss raised an exception, or returned an invalid value.
        """
        if batch.step != self.step + 1:
            raise DataError(
                f"this batch was collected for step {batch.step}, and step {self.step} is done: its"
                " responses are of other weights; collect a new one"
            )
        name = f"loss {getattr(loss, '__name__', type(loss).__name__)}"
        if isinstance(loss, str):
            custom = load_loss(loss)
        elif loss:
            custom = CustomLoss(loss, name)
        else:
            custom = None
        config = self.config
        step = self.step + 1
        require_groups(
            batch.batch,
            step=step,
            empty_steps=self._empty_steps,
            reward_test="batch.judged",
            config=config,
        )
        self._engine.drop_weights()
        self._engine_version = None
        updates = prepare_updates(batch.samples, self._policy, config, step=step)
        results = [
            self._policy.update(minibatch, step=step, custom=custom) for minibatch in updates
        ]
        metrics = {"step": step, **batch.metrics, **mean_of_updates(results)}
        self._empty_steps = 0 if batch.groups else self._empty_steps + 1
        self.step = step
        self._metrics.append(metrics)
        return metrics

    @property
    def metrics(self) -> "pd.DataFrame":
        return table_of(self._metrics, "step").set_index("step")

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
        """Sample answers from the current model, as `Run.generate` does."""
        numbers = plain_values(
            samples=samples,
            temperature=temperature,
            top_p=top_p,
            max_new_tokens=max_new_tokens,
            seed=seed,
        )
        options = SamplingOptions(**numbers)
        plan = options.plan(self.config, self._loaded.stop_ids)
        self._sync_engine()
        sampler = EngineSampler(self._engine, self._encoder, plan)
        with _stoppable(sampler.abort) as check:
            return answers_of(sampler, prompt, check=check)

    def evaluate(
        self, problems: Data, reward: Reward = None, *, samples_per_problem: int | None = None
    ) -> EvaluationResult:
        """Evaluate the current model, like `dapo eval`, with arguments of `collect`."""
        samples = plain_value(samples_per_problem, "samples_per_problem")
        if samples is not None and not (isinstance(samples, int) and samples >= 1):
            raise ConfigError(
                f"samples_per_problem: expected a whole number of at least 1, got {quoted(samples)}"
            )
        config, key, code = self._resolve(problems, reward)
        held_out = self._read(config, key, code)
        plan = evaluation_plan(
            config.changed("data", eval=config.data.train), self._loaded.stop_ids
        )
        plan = replace(plan, samples_per_problem=samples or plan.samples_per_problem)
        self._sync_engine()
        sampler = EngineSampler(self._engine, self._encoder, plan)
        with _stoppable(sampler.abort) as check, progress("evaluate", after_s=SHOW_AFTER_S) as show:
            assert code.judge is not None
            result = evaluate(sampler, code.judge, held_out, on_progress=show, check=check)
        return EvaluationResult.of(
            {"model": self.config.model.name, **result.summary(), "table": result.table()}
        )

    def export(self, path: str | Path) -> Path:
        """Write the current model as a new Hugging Face model directory; return its path."""
        weights = self._policy.weights(version=self.step)
        export_model(weights.named_tensors(), self._loaded, path, layout=weights.layout())
        return Path(path)

    def close(self) -> None:
        """Free the engine and the verifiers. May be called twice."""
        self._stack.close()

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"Session({self.config.model.name!r}, step={self.step})"

    def _prepare(self, problems: Data, reward: Reward) -> Sampling:
        config, key, code = self._resolve(problems, reward)
        rows = self._read(config, key, code)
        judge = code.judge
        assert judge is not None
        if key not in self._samplings:
            stop_ids = self._loaded.stop_ids
            test = "calling the function on it" if isinstance(judge, InlineJudge) else None
            self._samplings[key] = build_sampling(
                config, rows, self._engine, code, self._encoder, stop_ids, test
            )
        return replace(self._samplings[key], judge=judge)

    def _resolve(self, problems: Data, reward: Reward) -> tuple[Config, str, UserCode]:
        """Return the configuration, the key of the problems, and the user's code."""
        problems = self._data if problems is None else problems
        reward = self._reward if reward is None else reward
        config = self.config
        if problems is not None:
            config = config.changed("data", train=self._source(problems))
        elif self.config.data.train == NO_DATA:
            raise DataError(
                "there are no problems: pass them to session(data=...) or collect(problems, reward)"
            )
        functions: dict[str, Callable[..., Any]] = {}
        if reward is not None:

            def name_of(function: Callable[..., Any]) -> str:
                kind = function if hasattr(function, "__qualname__") else type(function)
                name = f"{kind.__module__}:{kind.__qualname__}"
                # of another cell
                while functions.setdefault(name, function) is not function:
                    name += "_"
                return name

            verifier = verifier_option(weights_by_name(reward, name_of))
            is_same = verifier == config.reward.verifier
            config = config.changed(
                "reward", verifier=verifier, options=config.reward.options if is_same else {}
            )
        config = resolve_auto_verifier(config)
        return (
            config,
            json.dumps(config.data.train, sort_keys=True, default=str),
            replace(self._functions, judge=self._judge(config, functions)),
        )

    def _source(self, problems: Data) -> Any:
        """Return the data source of problems; rows become a file named by their content."""
        stored = stored_data(problems, self._folder / ROWS_FILE, argument="problems")
        stored.write()
        moved = {}
        for path in stored.rows:
            digest = hashlib.blake2b(path.read_bytes(), digest_size=8).hexdigest()
            folder = self._folder / digest
            folder.mkdir(exist_ok=True)
            moved[str(path)] = str(path.replace(folder / path.name))
        if isinstance(stored.source, str):
            return moved.get(stored.source, stored.source)
        if stored.rows:
            parts = stored.source[MIX]
            return {MIX: {name: moved.get(str(part), part) for name, part in parts.items()}}
        return stored.source

    def _judge(
        self, config: Config, functions: Mapping[str, Callable[..., Any]]
    ) -> "InlineJudge | VerifierPool":
        reward = config.reward
        if functions:
            return InlineJudge(
                reward.verifier,
                options=reward.options,
                threshold=reward.threshold,
                functions=functions,
                template_time=config.data.template_time,
            )
        key = reward.model_dump_json()
        if key not in self._pools:
            pool = VerifierPool(reward, template_time=config.data.template_time)
            self._pools[key] = self._stack.enter_context(closing(pool))
        return self._pools[key]

    def _read(self, config: Config, key: str, code: UserCode) -> list[Problem]:
        """Return the problems of a source that fit the model, checked once per reward."""
        key = f"{key} {json.dumps(config.reward.verifier)} {sorted(code.needed_columns.items())}"
        if key not in self._problems:
            with row_errors({"problems": config.data.train} if str(self._folder) in key else {}):
                rows, notes = load_rows(
                    config.data,
                    config.reward,
                    code.needed_columns,
                    "train",
                    has_trained=has_trained(config.model.name),
                )
            if self._episodes is not None:
                rows = self._episodes.with_prompts(rows)
            problems = drop_long(rows, self._encoder, notes)
            limit = config.rollout.max_response_tokens
            require_fit(problems, self._encoder, self._loaded, config, limit)
            for note in notes:
                print_text(note)
            self._problems[key] = problems
        return self._problems[key]

    def _sync_engine(self) -> None:
        if self._engine_version != self.step:
            self._engine.load_weights(self._policy.weights(version=self.step), version=self.step)
            self._engine_version = self.step


@python_interface
def session(
    model: str | os.PathLike[str] | None = None,
    *,
    data: Data = None,
    reward: Reward = None,
    config: str | Path | Mapping[str, Any] | None = None,
    **options: Any,
) -> Session:
    """Load a model for your own loop: `collect` a batch, inspect it, `update` the model with it.

    Everything runs in this process, and only `export` writes files. Use `dapo.train` for runs that
    are recorded, evaluated and resumed; a step of a session computes the same as a step of such a
    run.

    The arguments are those of `dapo.train`; `data` and `reward` are the defaults of `collect`.
    `steps` is the length of the warm-up and of `optim.schedule`; the session may take more or fewer
    steps. Use the session in a `with` block, or close it. Raises ConfigError for an option that is
    unknown, impossible, or needs other processes.

    Example:
        >>> import dapo
        >>> def has_digit(completions, **columns):
        ...     return [any(character.isdigit() for character in text) for text in completions]
        >>> rows = [{"prompt": f"{a} + 1 =", "answer": str(a + 1)} for a in range(8)]
        >>> with dapo.session("tiny-random", prompts_per_step=2, group_size=4, max_response_tokens=8, lr=1e-3) as s:
        ...     batch = s.collect(rows, has_digit)
        ...     metrics = s.update(batch)
        >>> int(metrics["step"])
        1
    """
    base = merge_options({"data": {"train": NO_DATA}}, load_base(config)[0])
    name = model_name(model)
    values = {} if name is None else {"model.name": name}
    options, code = named_functions(with_teacher(options, has_reward=True))
    named_options = options_from(options)
    require_set_once_in_call(values | named_options)
    built, _ = build_scaled(base, values | named_options, where="dapo.session")
    return Session(
        built, data=data, reward=reward, code=[writer for writer in code if not writer.is_empty]
    )


def _rereadable(data: Data) -> Data:
    """Return data that each batch can read: the rows of a generator, which ends, as a list."""
    if type(data) is dict:
        return {name: _rereadable(part) for name, part in data.items()}
    return list(data) if isinstance(data, Iterator) else data


def _require_one_process(config: Config) -> None:
    """Raise ConfigError for options that need further processes or a history over steps."""
    if config.schedule != "sync":
        raise ConfigError(
            f"dapo.session takes one step at a time; schedule={config.schedule} needs dapo.train"
        )
    if config.is_multiprocess:
        raise ConfigError(
            "dapo.session samples and trains in this process: rollout.engines, rollout.engine=vllm,"
            " launcher=ray and distributed.trainer_ranks above 1 need dapo.train"
        )
    if config.dynamic_sampling.predict:
        raise ConfigError(
            "dynamic_sampling.predict=true predicts from a run's history, which a session does not"
            " keep: it needs dapo.train"
        )


@contextmanager
def _stoppable(undo: Callable[[], None]) -> Iterator[Callable[[], None]]:
    """Yield a check that raises after Ctrl-C; call `undo` on any error."""
    try:
        with signals_as_requests(
            "stopping; Ctrl-C once more stops at once", on_second=signal.default_int_handler
        ) as stop:
            yield stop.check
            stop.check()  # Ctrl-C may have come after the last check in the block
    except BaseException:
        undo()
        raise
