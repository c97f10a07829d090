"""The last step of a start: builds a run from its inputs. Only this file names concrete classes."""

import copy
import os
import pkgutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

import torch

from dapo.algo.sampling import SignalRule
from dapo.config import Config
from dapo.config.run_options import START_TIMEOUT_S
from dapo.core.terminal import warn
from dapo.data.prompts import PromptEncoder
from dapo.data.stream import ProblemStream
from dapo.distributed.engine_pool import EnginePool
from dapo.distributed.engine_specs import engine_specs, open_in_process
from dapo.distributed.protocol import Launcher
from dapo.distributed.trainer_group import TrainerGroup
from dapo.engines.checked import CheckedEngine
from dapo.engines.continuation import ContinuingEngine
from dapo.engines.engine import RolloutEngine, SuspendableEngine
from dapo.evaluation.scores import evaluation_plan
from dapo.libs.vllm_weights import WeightSender, WeightTransfer
from dapo.policy.model import LoadedModel
from dapo.policy.policy import Policy
from dapo.rewards.pool import VerifierPool
from dapo.runs.directory import RunDirectory
from dapo.runs.metrics_file import JsonlSink
from dapo.runs.optional_sink import OpenSink, OptionalSink
from dapo.runs.sinks import (
    Display,
    MlflowSink,
    Sink,
    TensorBoardSink,
    Tracker,
    TrackioSink,
    WandbSink,
    require_tracker,
)
from dapo.sampling.batch import Sampling, sampling_plan
from dapo.sampling.continuous import ContinuousSampling
from dapo.sampling.dynamic_sampling import MAX_ERROR_RATE, DynamicSampler
from dapo.sampling.samples import shaped_reward
from dapo.sampling.second_verifier import Audit
from dapo.start.check import UserCode
from dapo.start.episodes import AgentEpisodes, Episodes
from dapo.start.read import Inputs
from dapo.training.state import Run, TrainablePolicy
from dapo.training.stopping import reward_test_command
from dapo.types import Problem


@contextmanager
def build(
    inputs: Inputs,
    directory: RunDirectory,
    display: Display,
    *,
    first_step: int,
    listeners: Sequence[Sink] = (),
) -> Iterator[Run]:
    """Build a run before its first step; engines and policy are closed after the block.

    Args:
        inputs: Options, verifiers, model, prompts and problems.
        directory: The run on disk.
        display: Shows the progress.
        first_step: The step that this process begins with, from 1.
        listeners: Further sinks of metrics.
    """
    config = inputs.config
    stop_ids = inputs.loaded.stop_ids
    judge = inputs.code.judge
    assert judge is not None, "a run needs verifiers"
    test = reward_test_command(config.reward, config.data, config.environment.title, directory.path)
    judge.log_to(display.message)
    with ExitStack() as stack:
        launcher = stack.enter_context(open_launcher(config, directory.logs, display.message))
        engine = build_engine(
            config, inputs.loaded, launcher, episodes=inputs.episodes, log=display.message
        )
        stack.callback(engine.close)
        policy = stack.enter_context(open_policy(config, inputs.loaded, launcher, inputs.code))
        sinks = build_sinks(
            config,
            directory,
            first_step=first_step,
            warn=lambda text: display.message(f"warning: {text}"),
        )
        sampling = build_sampling(
            config, inputs.train, engine, inputs.code, inputs.encoder, stop_ids, test
        )
        if config.samples_ahead:
            sampling = ContinuousSampling.of(
                sampling, max_staleness=config.max_staleness, lookahead=config.lookahead
            )
        yield Run(
            config=config,
            sampling=sampling,
            policy=policy,
            tracker=Tracker(sinks, display, listeners),
            directory=directory,
            held_out=inputs.held_out,
            answers=inputs.answers,
            eval_plan=evaluation_plan(config, stop_ids) if inputs.held_out else None,
            audit=audit_of(inputs, display.message),
            verifier_output=judge.output if isinstance(judge, VerifierPool) else None,
            environment=None if inputs.episodes is None else inputs.episodes.pool,
        )


def build_sampling(
    config: Config,
    problems: Sequence[Problem],
    engine: SuspendableEngine,
    code: UserCode,
    encoder: PromptEncoder,
    stop_ids: tuple[int, ...],
    reward_test: str | None = None,
) -> Sampling:
    """Build the parts that sample batches one at a time, at the stream's first problem.

    Args:
        config: The resolved options.
        problems: The training problems.
        engine: Generates the responses.
        code: Its judge gives their verdicts, and its filter keeps groups.
        encoder: Encodes prompts and decodes responses.
        stop_ids: The tokens that end a response.
        reward_test: The command to test the reward, for error messages.
    """
    assert code.judge is not None, "sampling needs verifiers"
    return Sampling(
        stream=ProblemStream(problems, seed=config.train.seed, order=config.data.order),
        engine=engine,
        judge=code.judge,
        sampler=dynamic_sampler(config, code, reward_test=reward_test),
        encoder=encoder,
        plan=sampling_plan(config.rollout, stop_ids, seed=config.train.seed),
        reward=partial(shaped_reward, config=config),
        by_load=not config.rollout.is_reproducible,
        oversampling=config.oversampling,
        slots=engine_slots(config),
    )


def engine_slots(config: Config) -> int | None:
    """Return the sequences that all engines decode at a time; None: not known of the engine."""
    rollout = config.rollout
    slots = rollout.slots
    default = rollout.engine_kind.default_slots
    if slots is None and default is not None:
        slots = max(1, rollout.engines) * pkgutil.resolve_name(default)()
    return slots


def dynamic_sampler(
    config: Config, code: UserCode, *, reward_test: str | None = None
) -> DynamicSampler:
    """Build the sampler that decides which groups train; errors name `reward_test`."""
    sampling = config.dynamic_sampling
    return DynamicSampler(
        prompts_per_step=config.rollout.prompts_per_step,
        max_groups_per_step=config.max_groups_per_step,
        enabled=sampling.enabled,
        keep=code.keep_group,
        rule=SignalRule(sampling.metric, sampling.min_spread, *sampling.mean_between),
        max_error_rate=MAX_ERROR_RATE,
        least_verdicts=2 if config.compares_responses_of_a_group else 1,
        reward_test=reward_test
        or reward_test_command(config.reward, config.data, config.environment.title),
    )


def audit_of(inputs: Inputs, log: Callable[[str], None]) -> Audit | None:
    """Return the audit by the second verifier; None for a run without one."""
    judge = inputs.code.audit
    if judge is None:
        return None
    judge.log_to(log)
    config = inputs.config
    return Audit(judge, share=config.audit.share, seed=config.train.seed, output=judge.output)


@contextmanager
def open_policy(
    config: Config, loaded: LoadedModel, launcher: Launcher | None, code: UserCode
) -> Iterator[TrainablePolicy]:
    """Open the policy: in this process, training `loaded.model` in place, or in others.

    Other processes load the user's loss themselves.
    """
    if launcher is None or not config.uses_trainer_group:
        yield Policy(config, loaded, code.loss)
        return
    with closing(TrainerGroup(config, launcher)) as trainer_group:
        yield trainer_group


def build_engine(
    config: Config,
    loaded: LoadedModel,
    launcher: Launcher | None = None,
    *,
    episodes: Episodes | AgentEpisodes | None = None,
    log: Callable[[str], None] = print,
) -> SuspendableEngine:
    """Build the checked rollout engine, in this process or in processes of `launcher`.

    Args:
        config: The resolved options.
        loaded: The model that the engine samples with.
        launcher: Starts the processes of the engine; None for this process.
        episodes: The engine plays them; None for single responses.
        log: Gets messages for the user.
    """
    engine: RolloutEngine
    shares = config.gpu_shares(torch.cuda.device_count())
    if config.engine_processes:
        assert launcher is not None, "engine processes need a launcher"
        specs = engine_specs(config, launcher.nodes)
        kind = shares.transfer
        engine = EnginePool(
            launcher,
            specs,
            log=log,
            reproducible=config.rollout.is_reproducible,
            shares_gpus=shares.is_shared,
            transfer=kind
            and WeightTransfer(kind, WeightSender(), processes_per_engine=config.gpus_per_engine),
        )
    else:
        # a copy: the policy trains the model, and a run that lost a trainer rank begins here again
        engine = open_in_process(config.rollout, copy.deepcopy(loaded.model), shares.sampling)
    vocabulary = next(loaded.model.get_input_embeddings().parameters()).shape[0]
    return stack_engine(engine, vocabulary, episodes, log)


def stack_engine(
    engine: RolloutEngine,
    vocabulary: int,
    episodes: Episodes | AgentEpisodes | None,
    log: Callable[[str], None],
) -> SuspendableEngine:
    """Put every layer around an engine: the checks first, and any episodes on top."""
    stack = ContinuingEngine(CheckedEngine(engine, vocabulary=vocabulary))
    return stack if episodes is None else episodes.play_in(stack, log)


def build_sinks(
    config: Config, run: RunDirectory, *, first_step: int, warn: Callable[[str], None]
) -> list[Sink]:
    """Open metrics.jsonl, and prepare the trackers of `log.sinks`, whose failures `warn` gets.

    Raises ConfigError if the package of a tracker is not installed.
    """
    options = config.model_dump(mode="json")
    project = os.environ.get("WANDB_PROJECT") or "dapo"
    experiment = os.environ.get("MLFLOW_EXPERIMENT_NAME") or project
    openers: dict[str, OpenSink] = {
        "tensorboard": lambda step: TensorBoardSink(run.path / "tensorboard", first_step=step),
        "wandb": lambda step: WandbSink(project, run.path.name, options, run.path),
        "trackio": lambda step: TrackioSink(project, run.path.name, options),
        "mlflow": lambda step: MlflowSink(experiment, run.path.name, options, run.path),
    }
    for name in config.log.sinks:
        require_tracker(name)
    trackers = [
        OptionalSink(name, openers[name], warn, first_step=first_step) for name in config.log.sinks
    ]
    return [JsonlSink(run.metrics), *trackers]


@contextmanager
def open_launcher(
    config: Config, logs: Path | None = None, log: Callable[[str], None] = warn
) -> Iterator[Launcher | None]:
    """Open the launcher of `config`; None for a run of one process.

    The output of workers goes to files in `logs`, or else in a temporary folder. `log` gets a line
    on connections between several machines that carry no secret.
    """
    if not config.is_multiprocess:
        yield None
        return
    with ExitStack() as stack:
        folder = logs or Path(stack.enter_context(TemporaryDirectory(prefix="dapo-logs-")))
        launcher: Launcher
        if config.uses_ray:
            from dapo.distributed.ray.launcher import RayLauncher

            launcher = stack.enter_context(
                closing(RayLauncher(folder, timeout_s=START_TIMEOUT_S, address=config.ray_address))
            )
            if (note := launcher.exposure_note(config)) is not None:
                log(note)
        else:
            from dapo.distributed.local import LocalLauncher

            launcher = stack.enter_context(
                closing(LocalLauncher(folder, timeout_s=START_TIMEOUT_S))
            )
        yield launcher
