"""Puts a run together: the only file that names concrete classes."""

import copy
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

import torch
from transformers import PreTrainedTokenizerBase

from dapo.algo.sampling import ScoreThresholds
from dapo.config import Config, ScoreThresholdsConfig
from dapo.config.data_spec import Source, kinds
from dapo.config.load import resolve_auto_verifier
from dapo.core.errors import ConfigError
from dapo.core.loading import load_callable
from dapo.data.problems import remove_overlap, unique_problems
from dapo.data.prompts import PromptEncoder
from dapo.data.stream import ProblemStream
from dapo.data.turn_end import TurnEnd
from dapo.distributed.engine_pool import EnginePool, WeightSettings
from dapo.distributed.engine_specs import engine_specs, processes_per_gpu, require_vllm
from dapo.distributed.launch import open_launcher, weight_transfer
from dapo.distributed.protocol import Launcher
from dapo.distributed.trainer_group import TrainerGroup
from dapo.engines.checked import CheckedEngine
from dapo.engines.engine import RolloutEngine
from dapo.engines.native.engine import NativeEngine
from dapo.engines.native.formulation import formulation_for
from dapo.engines.native.linear_probe import choices_file, choose_kernels, linear_shapes
from dapo.engines.native.prepacked_linear import BY_PROCESSOR
from dapo.evaluation.scores import EvaluationPlan
from dapo.policy.lora import check_adapters
from dapo.policy.memory_model import GIB, FreeMemory, settle_microbatches
from dapo.policy.model import LoadedModel, load_model
from dapo.policy.model_dimensions import find_dimensions
from dapo.policy.policy import Policy
from dapo.policy.varlen_attention import has_operators, padded_attention_notes
from dapo.rewards.judge import Judge
from dapo.rewards.workers.output import VerifierOutput
from dapo.rewards.workers.pool import VerifierPool
from dapo.telemetry.sinks import Display, JsonlSink, Sink, TensorBoardSink, Tracker, TrackioSink, WandbSink
from dapo.training.audit import Audit
from dapo.training.dynamic_sampling import MAX_ERROR_RATE, DynamicSampler
from dapo.training.rollout import Sampling, sampling_plan
from dapo.training.rows import NO_COLUMNS, load_rows
from dapo.training.run_directory import RunDirectory
from dapo.training.samples import shaped_reward
from dapo.training.shortfall import reward_test_command
from dapo.training.state import Run, TrainablePolicy
from dapo.training.token_advantages import ValueFunction
from dapo.types import Group, Problem

ASSUMED_GIB = 80.0
"""Memory of a GPU that is not seen: an H100's or an A100's."""


@dataclass
class Inputs:
    """What a run reads: all of it is checked before anything is written."""

    loaded: LoadedModel
    encoder: PromptEncoder
    train: list[Problem]
    held_out: list[Problem]
    notes: list[str]
    copies: int = 1  # how often the file of held-out problems has each of them, where it is the same for all
    kernels: Mapping[str, str] = field(default_factory=dict)  # of the native engine's prepacked weights


@contextmanager
def build_run(
    config: Config,
    inputs: Inputs,
    judge: VerifierPool,
    directory: RunDirectory,
    display: Display,
    *,
    first_step: int,
    listeners: Sequence[Sink] = (),
) -> Iterator[Run]:
    """A run with everything that it needs, before its first step; engines and policy are closed at the end."""
    stop_ids = inputs.loaded.stop_ids
    judge.log = display.message
    with ExitStack() as stack:
        launcher = stack.enter_context(open_launcher(config, directory.logs))
        engine = build_engine(config, inputs.loaded, launcher, kernels=inputs.kernels, log=display.message)
        stack.callback(engine.close)
        policy = stack.enter_context(open_policy(config, inputs.loaded, launcher))
        yield Run(
            config=config,
            sampling=build_sampling(config, inputs.train, engine, judge, inputs.encoder, stop_ids),
            policy=policy,
            critic=value_function_of(policy),
            tracker=Tracker(build_sinks(config, directory, first_step=first_step), display, listeners),
            directory=directory,
            held_out=inputs.held_out,
            eval_plan=evaluation_plan(config, stop_ids) if inputs.held_out else None,
            audit=stack.enter_context(open_audit(config, display.message)),
        )


def build_sampling(
    config: Config,
    problems: Sequence[Problem],
    engine: RolloutEngine,
    judge: Judge,
    encoder: PromptEncoder,
    stop_ids: tuple[int, ...],
) -> Sampling:
    """What batches are sampled with, at the beginning of the problems. Raises ConfigError for the user's filter."""
    return Sampling(
        stream=ProblemStream(problems, seed=config.train.seed),
        engine=engine,
        judge=judge,
        sampler=dynamic_sampler(config),
        encoder=encoder,
        plan=sampling_plan(config, stop_ids),
        reward=partial(shaped_reward, config=config),
    )


def dynamic_sampler(config: Config, *, max_error_rate: float = MAX_ERROR_RATE) -> DynamicSampler:
    """What decides which groups train. Raises ConfigError for the user's filter."""
    keep = config.dynamic_sampling.filter
    thresholds = (
        ScoreThresholds(keep.min_spread, *keep.mean_between) if isinstance(keep, ScoreThresholdsConfig) else None
    )
    return DynamicSampler(
        prompts_per_step=config.rollout.prompts_per_step,
        max_groups_per_step=config.max_groups_per_step,
        enabled=config.dynamic_sampling.enabled,
        keep=load_filter(keep),
        thresholds=thresholds,
        max_error_rate=max_error_rate,
        reward_test=reward_test_command(config),
    )


@contextmanager
def open_audit(config: Config, log: Callable[[str], None]) -> Iterator[Audit | None]:
    """The second verifier in a process of its own; None where the run has no audit."""
    if config.audit_reward is None:
        yield None
        return
    output = VerifierOutput()
    with VerifierPool(config.audit_reward, output=output) as judge:
        judge.log = log
        yield Audit(judge, share=config.audit.share, seed=config.train.seed, output=output)


@contextmanager
def open_policy(config: Config, loaded: LoadedModel, launcher: Launcher | None) -> Iterator[TrainablePolicy]:
    """The policy: in this process, which then trains `loaded.model` in place, or in processes of its own."""
    if launcher is None or not config.uses_trainer_group:
        yield Policy(config, loaded)
        return
    with closing(TrainerGroup(config, launcher)) as trainer_group:
        yield trainer_group


def value_function_of(policy: TrainablePolicy) -> ValueFunction | None:
    """The policy as what estimates its own rewards, where a critic is trained beside it; else None."""
    return policy if isinstance(policy, Policy) and policy.critic is not None else None


def read_inputs(
    config: Config,
    needed_columns: Mapping[str, Collection[str]] = NO_COLUMNS,
    *,
    training: bool = True,
    on_progress: Callable[[int, int], None] | None = None,
) -> Inputs:
    """Load data (for `dapo eval` only the held-out problems) and model, check that they fit; writes nothing."""
    load_filter(config.dynamic_sampling.filter)
    problems, notes = load_rows(config, "train", needed_columns) if training else ([], [])
    held_out: list[Problem] = []
    copies = 1
    if (source := config.data.eval_source) is not None:
        rows, warnings = load_rows(config, "eval", needed_columns)
        held_out, copies = distinct(rows, source)
        notes += warnings
    problems, removed = remove_overlap(problems, held_out)
    if removed:
        notes.append(f"{removed} training problems left out: their text is in the evaluation set")
    require_hardware(config)
    loaded, encoder, about_model = read_model_and_encoder(config, training=training)
    notes += about_model
    problems, dropped = encoder.split_by_length(problems, on_progress=on_progress) if training else ([], 0)
    if dropped:
        notes.append(f"{dropped} training prompts left out: longer than data.max_prompt_tokens")
    if held_out:
        held_out, dropped = encoder.split_by_length(held_out)
        if dropped:
            notes.append(f"{dropped} evaluation prompts left out: longer than data.max_prompt_tokens")
    response_tokens = response_limit(config, training=training)
    if (positions := max_positions(loaded)) is not None:
        longest = encoder.measure([*problems, *held_out], above=positions - response_tokens)
        require_context(loaded, longest, response_tokens)
    return Inputs(loaded, encoder, problems, held_out, notes, copies)


def read_model_and_encoder(config: Config, *, training: bool) -> tuple[LoadedModel, PromptEncoder, list[str]]:
    """The model with all that ends a response, what encodes its prompts, and notes. Raises ConfigError."""
    loaded = read_model(config, device_for_inputs(config, training=training))
    if training and config.model.lora is not None:
        check_adapters(loaded.model, config.model.lora)
    encoder = PromptEncoder(loaded.tokenizer, config.data)
    notes = turn_end_notes(loaded.tokenizer, loaded.stop_ids, encoder.turn_end)
    if training:
        # a controller may have no GPU itself
        device = device_of(config) if config.train.device == "auto" else config.train.device
        notes += padded_attention_notes(getattr(torch, config.model.dtype), device, has_kernel=has_operators)
    return stop_at_turn_end(loaded, encoder), encoder, notes


def stop_at_turn_end(loaded: LoadedModel, encoder: PromptEncoder) -> LoadedModel:
    """The model with the token that the chat template in use puts behind an assistant's turn among its stop ids.

    Raises ConfigError if nothing ends a response: neither the model's files nor the template name a token.
    """
    turn_end = encoder.turn_end.token_id if encoder.turn_end is not None else None
    stop_ids = {*loaded.stop_ids, *([] if turn_end is None else [turn_end])}
    if not stop_ids:
        raise ConfigError(
            f"model {loaded.name!r} names no end token, and its chat template puts none behind an assistant's turn: "
            "set eos_token_id in its generation_config.json, or no response ends"
        )
    return replace(loaded, stop_ids=tuple(sorted(stop_ids)))


def turn_end_notes(tokenizer: PreTrainedTokenizerBase, stop_ids: Sequence[int], turn_end: TurnEnd | None) -> list[str]:
    """What a user should know of how responses end, where the chat template in use and the model's files differ.

    Args:
        tokenizer: The model's.
        stop_ids: The end tokens that the model's files name.
        turn_end: What the template puts behind an assistant's turn; None without a template.
    """
    if turn_end is None:
        return []
    known = ", ".join(repr(tokenizer.convert_ids_to_tokens(i)) for i in stop_ids) or "none"
    if turn_end.token_id is None:
        return [
            f"the chat template puts no special token behind an assistant's turn ({turn_end.text[:40]!r} there): only "
            f"the end tokens of the model's files ({known}) stop a response, and a model may go on to the length limit"
        ]
    name, notes = repr(tokenizer.convert_ids_to_tokens(turn_end.token_id)), []
    if turn_end.token_id not in stop_ids:
        notes.append(f"responses also stop at {name}, which ends an assistant's turn; the model's files name {known}")
    if turn_end.text_before:
        notes.append(
            f"the chat template ends an assistant's turn with {turn_end.text[:40]!r}, no single special token: "
            f"responses stop at {name}, and what stands before it is a part of them"
        )
    return notes


def device_for_inputs(config: Config, *, training: bool) -> str:
    """Where the controller needs the model's weights: with engines of their own it samples nothing itself.

    An evaluation then only hands them on. In training the policy may be elsewhere too: `meta` takes no memory.
    """
    if not config.engine_processes:
        return device_of(config)
    if not training:
        return "cpu"
    return "meta" if config.uses_trainer_group else device_of(config)


def read_model(config: Config, device: str) -> LoadedModel:
    """The model as the config names it; on the device `meta` without its weights."""
    if config.train.threads is not None:
        torch.set_num_threads(config.train.threads)
    return load_model(
        config.model.name,
        dtype=getattr(torch, config.model.dtype),
        device=device,
        trust_remote_code=config.model.trust_remote_code,
    )


def response_limit(config: Config, *, training: bool) -> int:
    """The longest response that will be sampled."""
    evaluation = config.eval.max_response_tokens or config.rollout.max_response_tokens
    return max(evaluation, config.rollout.max_response_tokens) if training else evaluation


def resolve_auto(
    config: Config,
    *,
    cuda: bool | None = None,
    training: bool = True,
    log: Callable[[str], None] = lambda text: None,
) -> Config:
    """`auto` of options replaced by what they stand for on this machine, for this model and this data.

    Args:
        config: The configuration.
        cuda: There is a GPU, though it may not be here; None: whether there is one here.
        training: Settle also what only an update needs: `train.microbatch_tokens` and `train.recompute`.
        log: Takes a line about what was chosen for an update and why.

    On Ray the device stays `auto`: each process takes what its own machine has. Raises ConfigError where an update
    does not fit on the GPU.
    """
    cuda = torch.cuda.is_available() if cuda is None else cuda
    device = config.train.device if config.train.device != "auto" else "cuda" if cuda else "cpu"
    if not config.uses_ray:
        config = config.changed("train", device=device)
    if config.model.dtype == "auto":
        config = config.changed("model", dtype="bfloat16" if multiplies_bfloat16_fast(device) else "float32")
    config = resolve_auto_verifier(config)
    if training:
        gpu = trainer_gpu(config, device)
        config, reason = settle_microbatches(config, find_dimensions(config.model.name), gpu)
        if reason is not None:
            log(reason)
    return config


def trainer_gpu(config: Config, device: str) -> FreeMemory | None:
    """The memory of the GPU that a process trains on; None: processes train on a CPU.

    Several processes that share a GPU get equal parts of it. Where the controller sees no GPU of the cluster, that of
    the paper's hardware is assumed.
    """
    if not torch.cuda.is_available():
        is_elsewhere = device == "cuda" or (config.ray_address is not None and config.train.device == "auto")
        return FreeMemory(ASSUMED_GIB * GIB, "assumed: no GPU is seen from here") if is_elsewhere else None
    if device == "cpu":
        return None
    sharing = processes_per_gpu(config, torch.cuda.device_count())
    name = torch.cuda.get_device_name() + (f", which {sharing:g} processes share" if sharing > 1 else "")
    capacity = torch.cuda.get_device_properties(0).total_memory / sharing
    if config.uses_trainer_group:  # what is free there is not asked: that would take memory from the rank
        return FreeMemory(capacity, f"of {name}")
    free = torch.cuda.mem_get_info()[0] + torch.cuda.memory_reserved()
    return FreeMemory(min(free, capacity), f"free on {name}")


def multiplies_bfloat16_fast(device: str) -> bool:
    """Whether the processor has instructions for it; without, bfloat16 is several times slower than float32."""
    path = Path("/proc/cpuinfo")
    if path.is_file():
        flags = set(path.read_text(encoding="utf-8").split("\n\n")[0].split())
    else:  # not Linux; torch tells since 2.12
        flags = {name for name, has in getattr(torch.cpu, "get_capabilities", dict)().items() if has}
    return device == "cuda" or bool({"avx512_bf16", "amx_bf16", "bf16", "arm_bf16"} & flags)


def distinct(problems: Sequence[Problem], source: Source) -> tuple[list[Problem], int]:
    """Copies of a problem count once; and how many there are of each, in a file that has as many of all of them."""
    counted = unique_problems(problems)
    counts = {count for _, count in counted}
    copies = counts.pop() if len(counts) == 1 and kinds(source) <= {"path", "hub"} else 1
    return [problem for problem, _ in counted], copies


def require_context(loaded: LoadedModel, prompt_tokens: int, response_tokens: int) -> None:
    """Raise ConfigError where prompt and response together exceed the model's positions."""
    limit = max_positions(loaded)
    if limit is not None and prompt_tokens + response_tokens > limit:
        raise ConfigError(
            f"a prompt of {prompt_tokens} tokens and a response of {response_tokens} exceed the {limit} positions of "
            f"{loaded.name}; lower rollout.max_response_tokens (or eval.max_response_tokens) or data.max_prompt_tokens"
        )


def max_positions(loaded: LoadedModel) -> int | None:
    """The tokens of prompt and response together that a model was made for; None: it does not say."""
    limit: int | None = getattr(loaded.model.config, "max_position_embeddings", None)
    return limit


def build_engine(
    config: Config,
    loaded: LoadedModel,
    launcher: Launcher | None = None,
    *,
    kernels: Mapping[str, str] = BY_PROCESSOR,
    log: Callable[[str], None] = print,
) -> RolloutEngine:
    """The rollout engine: in this process, or in processes that `launcher` starts. All that it answers is checked.

    `kernels` are those of the native engine's prepacked weights, as `probe_kernels` chooses them.
    """
    engine: RolloutEngine
    if config.engine_processes:
        assert launcher is not None, "engine processes need a launcher"
        specs = engine_specs(config, launcher.nodes, kernels)
        engine = EnginePool(
            launcher,
            specs,
            log=log,
            reproducible=config.rollout.reproducible,
            weights=WeightSettings(
                transfer=weight_transfer(),
                overlaps_updates=config.schedule == "one_step_off",
                shares_gpus=config.train.device != "cpu"
                and processes_per_gpu(config, max(1, torch.cuda.device_count())) > 1,
            ),
        )
    else:
        formulation = replace(formulation_for(loaded.model, reproducible=True), kernels=kernels)
        engine = NativeEngine(copy.deepcopy(loaded.model), config.rollout.native, formulation=formulation)
    vocabulary = next(loaded.model.get_input_embeddings().parameters()).shape[0]
    return CheckedEngine(engine, vocabulary=vocabulary)


def probe_kernels(config: Config, loaded: LoadedModel) -> dict[str, str]:
    """The fastest kernels for the native engine's weights, by shape, timed on this processor; none for a GPU."""
    on_gpu = config.train.device == "cuda" or (config.train.device == "auto" and torch.cuda.is_available())
    if on_gpu or config.rollout.engine != "native":
        return {}
    shapes, rows = linear_shapes(loaded.model), config.rollout.native.slots
    return choose_kernels(shapes, loaded.model.dtype, rows, choices=choices_file())


def build_sinks(config: Config, run: RunDirectory, *, first_step: int) -> list[Sink]:
    """metrics.jsonl always; the others as named."""
    options = config.model_dump(mode="json")
    makers: dict[str, Callable[[], Sink]] = {
        "tensorboard": lambda: TensorBoardSink(run.path / "tensorboard", first_step=first_step),
        "wandb": lambda: WandbSink(config.log.project, run.path.name, options, run.path),
        "trackio": lambda: TrackioSink(config.log.project, run.path.name, options),
    }
    return [JsonlSink(run.metrics), *(makers[name]() for name in config.log.sinks)]


def evaluation_plan(config: Config, stop_ids: tuple[int, ...]) -> EvaluationPlan:
    """How held-out problems are sampled."""
    source = config.data.eval_source
    assert source is not None
    return EvaluationPlan(
        name=source.label,
        samples_per_problem=config.eval.samples_per_problem,
        temperature=config.eval.temperature,
        top_p=config.eval.top_p,
        max_response_tokens=config.eval.max_response_tokens or config.rollout.max_response_tokens,
        stop_ids=stop_ids,
        seed=config.train.seed,
    )


def load_filter(name: str | ScoreThresholdsConfig | None) -> Callable[[Group], bool] | None:
    """The user's own filter, if `dynamic_sampling.filter` is `module:function`. Raises ConfigError."""
    if not isinstance(name, str):
        return None
    return load_callable(name, error=ConfigError, option="dynamic_sampling.filter=")


def require_hardware(config: Config) -> None:
    """Raise ConfigError where this machine has not what the configuration names: a GPU, the environment of vLLM."""
    if not config.uses_ray:
        device_of(config)
    if config.rollout.engine == "vllm":
        require_vllm(config)


def device_of(config: Config) -> str:
    """The device to train on. Raises ConfigError where CUDA is asked for and absent."""
    if config.train.device == "cuda" and not torch.cuda.is_available():
        raise ConfigError("train.device=cuda, but torch finds no CUDA device; use train.device=auto or cpu")
    if config.train.device == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    return config.train.device
