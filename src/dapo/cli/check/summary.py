"""`dapo check`: what a configuration would run, in words."""

from collections import Counter
from collections.abc import Generator, Iterator
from typing import Literal

from dapo.config import Config, DataSpec
from dapo.config.data_spec import spec_kind, spec_name
from dapo.config.load import resolve_auto_verifier
from dapo.core.errors import ConfigError
from dapo.data.problems import load_problems, remove_overlap
from dapo.types import Problem

# What the paper trains with (section 4.1); option -> (value, unit)
PAPER: dict[str, object] = {
    "rollout.prompts_per_step": 512,
    "rollout.group_size": 16,
    "rollout.max_response_tokens": 20480,
    "rollout.min_response_tokens": 0,
    "rollout.temperature": 1.0,
    "dynamic_sampling.enabled": True,
    "dynamic_sampling.filter": None,
    "overlong.mode": "soft",
    "overlong.buffer_tokens": 4096,
    "overlong.penalty": 1.0,
    "advantage.scale": "std",
    "loss.clip_low": 0.2,
    "loss.clip_high": 0.28,
    "loss.dual_clip": None,
    "loss.aggregate": "token",
    "loss.kl_coef": 0.0,
    "loss.entropy_coef": 0.0,
    "loss.engine_correction": None,
    "optim.lr": 1e-6,
    "optim.warmup_steps": 20,
    "optim.weight_decay": 0.1,
    "optim.max_grad_norm": 1.0,
    "train.minibatch_groups": 32,
    "schedule": "sync",
    "eval.samples_per_problem": 32,
    "eval.temperature": 1.0,
    "eval.top_p": 0.7,
}

BINARY_VERIFIERS = ("math", "math_dapo", "exact", "gsm8k", "choice", "regex", "json_schema", "code")
"""Verifiers without grades, for which a threshold says nothing."""


def explain(config: Config) -> Iterator[str]:
    """Lines for a person. Raises DataError where a data source that is at hand cannot be read."""
    config = resolve_auto_verifier(config)
    dtype = "bfloat16 where the processor is fast at it, else float32" if config.model.dtype == "auto" else None
    yield f"model     {config.model.name} (computed in {dtype or config.model.dtype})"
    yield from _adapters(config)
    yield from _data(config)
    yield ""
    yield from _step(config)
    yield ""
    yield from _run(config)
    for title, lines in (
        ("ignored", list(ignored_options(config))),
        ("differs from the paper", list(differences_from_paper(config))),
    ):
        yield ""
        yield f"{title}:" if lines else f"{title}: nothing"
        yield from (f"  - {line}" for line in lines)


def option(config: Config, name: str) -> object:
    """The value of an option by its dotted name."""
    value: object = config
    for part in name.split("."):
        value = getattr(value, part)
    return value


def differences_from_paper(config: Config) -> Iterator[str]:
    """Where a configuration leaves the paper's values."""
    for name, paper in PAPER.items():
        value = option(config, name)
        if value != paper:
            yield f"{name}: {_show(value)} (paper: {_show(paper)})"


def ignored_options(config: Config) -> Iterator[str]:
    """Options that are set but have no effect, and why."""
    set_sections = config.model_fields_set
    if config.overlong.mode != "soft":
        for name in ("buffer_tokens", "penalty"):
            if "overlong" in set_sections and name in config.overlong.model_fields_set:
                yield f"overlong.{name}: overlong.mode is {config.overlong.mode}"
    if not config.dynamic_sampling.enabled:
        if config.dynamic_sampling.filter:
            yield "dynamic_sampling.filter: dynamic_sampling.enabled is false"
        if config.dynamic_sampling.max_groups_per_step is not None:
            yield (
                "dynamic_sampling.max_groups_per_step: without dynamic sampling it only bounds the groups that "
                "verifier errors make invalid"
            )
    if config.updates_per_step == 1:
        clips = [name for name in ("clip_low", "clip_high", "dual_clip") if name in config.loss.model_fields_set]
        if clips:
            yield (
                f"loss.{', loss.'.join(clips)}: with one update a step the policy is still the one that the step began "
                "with, so the ratio is 1 and nothing is clipped"
            )
    if config.data.eval is None:
        if "eval" in set_sections:
            yield "eval.*: data.eval is not set"
        if "eval_every" in config.train.model_fields_set:
            yield "train.eval_every: data.eval is not set"
    if config.reward.threshold is not None and config.reward.verifier in BINARY_VERIFIERS:
        yield "reward.threshold: the verifier says right or wrong, not a grade"
    yield from _ignored_of_processes(config)
    if not config.log.sinks and "project" in config.log.model_fields_set:
        yield "log.project: log.sinks names neither wandb nor trackio"


def _ignored_of_processes(config: Config) -> Iterator[str]:
    rollout, distributed = config.rollout, config.distributed.model_fields_set
    sampled_here = "no process is started to sample (rollout.engines is 0)"
    for engine in ("native", "vllm"):
        if rollout.engine != engine and engine in rollout.model_fields_set:
            yield f"rollout.{engine}.*: rollout.engine is {rollout.engine}"
    if not config.engine_processes:
        for name in ("engine_threads", "reproducible"):
            if name in rollout.model_fields_set:
                yield f"rollout.{name}: {sampled_here}"
    if not config.uses_trainer_group:
        for name in ("max_restarts",):
            if name in distributed:
                yield f"distributed.{name}: distributed.trainer_ranks is 1"
    if not config.is_multiprocess and "start_timeout_s" in distributed:
        yield "distributed.start_timeout_s: everything runs in one process"
    if not config.uses_ray and "gpus_per_process" in distributed:
        yield "distributed.gpus_per_process: launcher is local"


def _adapters(config: Config) -> Iterator[str]:
    lora = config.model.lora
    if lora is None:
        return
    from dapo.cli.check.sizes import ParameterCounts, count_parameters  # counts on the model's layers, with torch

    label = f"trains    adapters of rank {lora.rank}, scaled by {lora.alpha / lora.rank:g}"
    try:
        sizes = count_parameters(config.model)
    except ConfigError as error:
        if "model.lora" in str(error):
            raise
        yield f"{label}; not counted here: {error}"
        return
    fraction = sizes.adapters / sizes.model
    yield (
        f"{label}, on {sizes.adapted_layers} linear layers: {sizes.adapters:,} numbers, {fraction:.2%} of the model's "
        f"{sizes.model:,}"
    )
    of_all = ParameterCounts(sizes.model)
    for dtype in ("bfloat16", "float32") if config.model.dtype == "auto" else (config.model.dtype,):
        state, checkpoint = _gib(sizes.state_bytes(dtype)), _gib(sizes.checkpoint_bytes(dtype))
        yield (
            f"memory    {state} in {dtype} for weights, gradients and optimiser, and {checkpoint} a checkpoint "
            f"(training all weights: {_gib(of_all.state_bytes(dtype))} and {_gib(of_all.checkpoint_bytes(dtype))})"
        )


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / 2**30:.3g} GiB"


def _data(config: Config) -> Iterator[str]:
    train = yield from _source("train", config.data.train)
    if config.data.eval is None:
        yield "eval      none: data.eval is not set, so nothing measures progress on held-out problems"
        return
    held_out = yield from _source("eval", config.data.eval)
    if train and held_out:
        _, removed = remove_overlap(train, held_out)
        if removed:
            yield f"          {removed} training problems are left out because their text is in the evaluation set"


def _source(role: Literal["train", "eval"], spec: DataSpec) -> "Generator[str, None, list[Problem]]":
    label = f"{role:9} {spec_name(spec)}"
    if spec_kind(spec) == "hub":
        yield f"{label}: not counted here, it lies on the hub"
        return []
    problems = load_problems(spec, split=role)
    distinct = len({problem.id for problem in problems})
    sources = Counter(problem.source for problem in problems)
    counts = ", ".join(f"{count} {source}" for source, count in sources.most_common(6))
    yield f"{label}: {len(problems):,} problems, {distinct:,} distinct ({counts})"
    return problems


def _step(config: Config) -> Iterator[str]:
    rollout, train = config.rollout, config.train
    responses = rollout.prompts_per_step * rollout.group_size
    yield "a step:"
    kept = "that carry a signal (Eq. 11)" if config.dynamic_sampling.enabled else "whatever their verdicts"
    yield f"  prompts     {rollout.prompts_per_step:,} {kept}; at most {config.max_groups_per_step:,} are judged"
    yield f"  responses   {responses:,} train: {rollout.group_size} to each prompt"
    yield (
        f"  tokens      at most {responses * rollout.max_response_tokens:,} response tokens train "
        f"({rollout.max_response_tokens:,} a response)"
    )
    yield (
        f"  updates     {config.updates_per_step} of {train.minibatch_groups} prompts = "
        f"{train.minibatch_groups * rollout.group_size:,} responses each, in microbatches of at most "
        f"{train.microbatch_tokens:,} tokens"
    )
    shaping = {
        "soft": f"minus up to {config.overlong.penalty:g} over the last {config.overlong.buffer_tokens:,} tokens",
        "filter": "truncated responses do not train",
        "off": "no length term",
    }[config.overlong.mode]
    yield f"  reward      {_reward(config)}, {shaping}"
    yield (
        f"  loss        ratio clipped to [{1 - config.loss.clip_low:g}, {1 + config.loss.clip_high:g}], averaged by "
        f"{config.loss.aggregate}" + (f", KL {config.loss.kl_coef:g}" if config.loss.kl_coef else "")
    )


def _reward(config: Config) -> str:
    verifier = config.reward.verifier
    named = verifier if isinstance(verifier, str) else " + ".join(f"{w:g} x {name}" for name, w in verifier.items())
    options = ", ".join(f"{key}: {value}" for key, value in config.reward.options.items())
    return f"{named} ({options})" if options else named


def _run(config: Config) -> Iterator[str]:
    train = config.train
    yield "the run:"
    yield (
        f"  {train.num_steps} steps, {train.num_steps * config.updates_per_step:,} updates, learning rate "
        f"{config.optim.lr:g} after {config.optim.warmup_steps} steps of warm-up"
    )
    yield f"  {_processes(config)}"
    if config.data.eval is not None:
        when = f"after every {train.eval_every} steps" if train.eval_every else "after the last step"
        yield (
            f"  evaluation before the first step and {when}: avg@{config.eval.samples_per_problem} at temperature "
            f"{config.eval.temperature:g}, top_p {config.eval.top_p:g}"
        )
    when = f"every {train.save_every} steps" if train.save_every else "at the end"
    yield f"  checkpoints {when}, newest {train.keep_checkpoints} kept"
    if config.schedule == "one_step_off":
        yield (
            "  schedule    one_step_off: while a step trains, the next one's responses are sampled with the weights "
            "that it began with; corrected by each token's loss times "
            f"min(pi_old / pi_sampler, {config.loss.engine_correction:g})"
        )


def _processes(config: Config) -> str:
    """Who samples and who trains."""
    ranks, engines = config.distributed.trainer_ranks, config.engine_processes
    trains = "one trains" if ranks == 1 else f"{ranks} train"
    if not config.is_multiprocess:
        return "one process that samples and trains"
    if not engines:
        return f"{ranks} process{'es' * (ranks > 1)} {_where(config)}: {trains}; the command's own samples"
    sample = "one samples" if engines == 1 else f"{engines} sample"
    shared = "" if engines == 1 else ", in lockstep" if config.rollout.reproducible else ", balanced by load"
    count = ranks + engines
    return f"{count} processes {_where(config)}: {trains}, {sample} ({config.rollout.engine}{shared})"


def _where(config: Config) -> str:
    return "on Ray" if config.uses_ray else "on this machine"


def _show(value: object) -> str:
    return "none" if value is None else f"{value:g}" if isinstance(value, float) else str(value)
