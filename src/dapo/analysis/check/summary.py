"""The lines of `dapo check` about data, step, run, ignored options and the paper's values."""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from dapo.algo.surrogate_table import SURROGATES
from dapo.config import Config, LossConfig
from dapo.config.data_spec import Source, kinds
from dapo.config.lengths import agent_context
from dapo.config.load import resolve_auto_verifier
from dapo.config.model_options import MODEL_ALIASES
from dapo.config.option_fields import changed_paper_values, option_text
from dapo.core.model_files import is_model_here
from dapo.core.text import weighted
from dapo.data.demonstrations import load_demonstrations
from dapo.data.problems import remove_overlap
from dapo.data.stream import sizes_by
from dapo.start.check import Checked, UserCode
from dapo.start.ignored_options import ignored_options
from dapo.start.rows import load_rows
from dapo.types import Problem

_TOKEN_BYTES = 8  # a token's id and log-probability, in the controller and in a checkpoint


def explain(config: Config, data: "tuple[Sequence[DataFacts], int] | None" = None) -> Iterator[str]:
    """Describe a configuration in lines; `data` are the facts of `data_facts`, if read already.

    Raises DataError if a local data source cannot be read or lacks a column that the reward reads,
    and RewardError if the reward can judge none of its rows.
    """
    config = resolve_auto_verifier(config)
    dtype = None
    if config.model.dtype == "auto":
        dtype = "bfloat16 where the processor is fast at it, else float32"
    yield f"model     {config.model.name} (computed in {dtype or config.model.dtype})"
    yield from _data(config, *(data or data_facts(Checked(config, UserCode()))))
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


def in_short(config: Config, data: "Sequence[DataFacts]", num_removed: int) -> Iterator[str]:
    """Yield the model, the data, a step and the mistakes in a few lines."""
    config = resolve_auto_verifier(config)
    train = config.train
    yield f"model     {_named_model(config.model.name)}"
    if config.has_kl and config.loss.has_teacher and config.loss.teacher is not None:
        yield f"teacher   {_named_model(config.loss.teacher)}"
    yield from _data(config, data, num_removed)
    if config.is_supervised:
        yield f"step      {train.minibatch_groups} demonstrations; {train.length}"
    else:
        prompts = config.rollout.prompts_per_step
        responses = prompts * config.rollout.group_size
        yield (
            f"step      {responses:,} responses to {prompts:,} prompts, of at most"
            f" {config.rollout.max_response_tokens:,} tokens; {train.length}"
        )
        yield f"reward    {weighted(config.reward.verifier)}"
    for line in ignored_options(config):
        yield f"ignored   {line}"


def _named_model(name: str) -> str:
    """Return the name of a model, and that nothing of it is checked if it is not here."""
    if name in MODEL_ALIASES or is_model_here(name):
        return name
    return f"{name} (not on this machine)"


def differences_from_paper(config: Config) -> Iterator[str]:
    """Describe each option whose value differs from the paper's (section 4.1)."""
    for name, value, paper in changed_paper_values(config):
        yield f"{name}: {option_text(value)} (paper: {option_text(paper)})"


@dataclass(frozen=True)
class DataFacts:
    """The training or the evaluation data of a configuration."""

    role: Literal["train", "eval"]
    label: str
    problems: Sequence[Problem] | None  # the problems; None where they are not on this machine
    warnings: Sequence[str] = ()

    @property
    def num_distinct(self) -> int:
        return len({problem.id for problem in self.problems or ()})

    @property
    def sources(self) -> Counter[str]:
        return Counter(problem.source for problem in self.problems or ())


def data_facts(checked: Checked) -> tuple[list[DataFacts], int]:
    """Read the training and the evaluation data, if any, and count the problems that are in both.

    Raises DataError and RewardError, as `explain` does.
    """
    config = checked.config
    facts = [_facts("train", config.data.train_source, checked)]
    if facts[0].problems and config.data.order is not None:
        sizes_by(facts[0].problems, config.data.order)
    if config.data.eval_source is None:
        return facts, 0
    demonstrations = facts[0].problems if config.is_supervised else None
    facts.append(_facts("eval", config.data.eval_source, checked, demonstrations or ()))
    train, held_out = (source.problems for source in facts)
    if not train or not held_out:
        return facts, 0
    _, num_removed = remove_overlap(train, held_out, option=config.data_option)
    return facts, num_removed


def _facts(
    role: Literal["train", "eval"],
    source: Source,
    checked: Checked,
    demonstrations: Sequence[Problem] = (),
) -> DataFacts:
    if "hub" in kinds(source):
        return DataFacts(role, source.label, None)
    if role == "train" and checked.config.is_supervised:
        demonstrations, warnings = load_demonstrations(source)
        return DataFacts(role, source.label, demonstrations, warnings)
    config = checked.config
    columns = checked.code.needed_columns
    problems, warnings = load_rows(
        config.data,
        config.reward,
        columns,
        role,
        has_trained=checked.has_trained,
        demonstrations=demonstrations,
    )
    return DataFacts(role, source.label, problems, warnings)


def _data(config: Config, facts: Sequence[DataFacts], num_removed: int) -> Iterator[str]:
    for source_facts in facts:
        label = f"{source_facts.role:9} {source_facts.label}"
        if source_facts.problems is None:
            yield f"{label}: not counted: it is on the hub"
            continue
        counts = ", ".join(
            f"{count} {source}" for source, count in source_facts.sources.most_common(6)
        )
        kind = "problems"
        if config.is_supervised and source_facts.role == "train":
            kind = "demonstrations"
        number = f"{len(source_facts.problems):,} {kind}"
        yield f"{label}: {number}, {source_facts.num_distinct:,} distinct ({counts})"
        for line in source_facts.warnings:
            yield f"          warning: {line}"
    if config.data.eval_source is None:
        yield (
            "eval      none: data.eval is not set, so nothing measures progress on held-out"
            " problems"
        )
    if num_removed:
        kind = "demonstrations" if config.is_supervised else "training problems"
        yield (
            f"          {num_removed} {kind} are dropped because their text is in the"
            " evaluation set"
        )


def _episodes_line(config: Config) -> str:
    environment = config.environment
    if config.runs_agent:
        return (
            f"  episodes    {environment.title}: at most {environment.max_turns} calls, each with its answer in"
            f" {agent_context(config):,} tokens"
        )
    label = ", ".join(filter(None, [environment.title, *environment.tools]))
    return (
        f"  episodes    {label}: at most {environment.max_turns} turns; up to"
        f" {config.max_observed_tokens:,} observed tokens, which never train"
    )


def _step(config: Config) -> Iterator[str]:
    rollout = config.rollout
    train = config.train
    responses = rollout.prompts_per_step * rollout.group_size
    microbatch = (
        "as many tokens as fit"
        if train.microbatch_tokens is None
        else f"at most {train.microbatch_tokens:,} tokens"
    )
    yield "one step:"
    if config.is_supervised:
        yield (
            f"  update      1 of {train.minibatch_groups} demonstrations, of at most"
            f" {rollout.max_response_tokens:,} answer tokens each, in microbatches of {microbatch}"
        )
        yield (
            "  loss        mean negative log-probability of the answers' tokens; nothing is sampled"
            " or judged"
        )
        return
    quantity = (
        "that carry a signal (Eq. 11)" if config.dynamic_sampling.enabled else "with any verdicts"
    )
    yield (
        f"  prompts     {rollout.prompts_per_step:,} {quantity}; at most"
        f" {config.max_groups_per_step:,} are judged"
    )
    yield f"  responses   {responses:,} train: {rollout.group_size} per prompt"
    yield (
        f"  tokens      at most {responses * rollout.max_response_tokens:,} response tokens train "
        f"({rollout.max_response_tokens:,} per response)"
    )
    if config.plays_episodes:
        yield _episodes_line(config)
    yield (
        f"  updates     {config.updates_per_step} of {train.minibatch_groups} prompts ="
        f" {train.minibatch_groups * rollout.group_size:,} responses each, in microbatches of"
        f" {microbatch}"
    )
    shaping = {
        "soft": (
            f"minus up to {config.overlong.penalty:g} over the last"
            f" {config.overlong.buffer_tokens:,} tokens"
        ),
        "filter": "truncated responses do not train",
        "off": "no length term",
    }[config.overlong.mode]
    options = ", ".join(f"{key}: {value}" for key, value in config.reward.options.items())
    label = weighted(config.reward.verifier)
    if options:
        label += f" ({options})"
    yield f"  reward      {label}, {shaping}"
    if (audit := config.audit_reward) is not None:
        yield (
            f"  audit       {audit.verifier} judges {config.audit.share:.3g} of the trained"
            " responses, never trains"
        )
    if config.has_critic:
        critic = config.critic
        first = (
            f"; alone in the first {critic.pretrain_steps} steps" if critic.pretrain_steps else ""
        )
        yield (
            f"  critic      a value of each token, learning rate {critic.lr:g}{first}; advantages"
            f" by GAE with lambda {critic.gae_lambda:g}, whitened over the tokens of the batch"
        )
    loss = config.loss
    surrogate = SURROGATES[loss.surrogate].summary.format(
        low=1 - loss.clip_low, high=1 + loss.clip_high
    )
    kl = f", KL {loss.kl_coef:g} ({loss.kl_estimator} in the {loss.kl_in})" if loss.kl_coef else ""
    if config.has_kl and loss.has_teacher:
        rewards = "rewards do not train"
        if config.trains_on_rewards:
            rewards = f"rewards weigh {config.reward.coef:g}"
        yield f"  teacher     {loss.teacher_name}; {rewards}"
        if config.reuses_samples and loss.has_kl_term:
            yield (
                f"              biased in updates 2 to {config.updates_per_step} of a step; "
                f"train.minibatch_groups={rollout.prompts_per_step} makes one"
            )
    yield f"  loss        {loss.function or surrogate}, averaged by {loss.aggregate}{kl}"
    if config.reuses_samples and loss.has_ratio_to_engine:
        yield f"              r = pi / pi_engine, {_bound_of_ratio(loss)}; no pass for pi_old"


def _bound_of_ratio(loss: LossConfig) -> str:
    """Describe what becomes of a ratio to the engine beyond the cap."""
    cap = loss.engine_correction or 0.0
    if loss.engine_over_cap == "mask":
        return f"and tokens outside {1 / cap:g} to {cap:g} do not train"
    return f"at most {cap:g}"


def _run(config: Config) -> Iterator[str]:
    train = config.train
    yield "the run:"
    yield (
        f"  {train.num_steps} steps, {train.num_steps * config.updates_per_step:,} updates,"
        f" learning rate {config.optim.lr:g} after {config.optim.warmup(train.num_steps)} steps of"
        " warm-up"
    )
    if train.token_budget is not None:
        yield f"  ends earlier with the step that reaches {train.token_budget:,} generated tokens"
    if config.data.eval is not None:
        when = (
            f"after every {train.eval_every} steps" if train.eval_every else "after the last step"
        )
        yield (
            f"  evaluation before the first step and {when}: avg@{config.eval.samples_per_problem}"
            f" at temperature {config.eval.temperature:g}, top_p {config.eval.top_p:g}"
        )
    when = f"every {train.save_every} steps" if train.save_every else "at the end"
    yield f"  checkpoints {when}, newest {train.kept_in_training} kept"
    if config.samples_ahead:
        cap = config.loss.engine_correction or 0.0
        ratio = "pi_old / pi_sampler"
        if config.loss.engine_ratio == "sequence":
            ratio += " of its response"
        factor = f"min({ratio}, {cap:g})"
        if config.loss.engine_over_cap == "mask":
            factor = f"{ratio}, or 0 where that is outside {1 / cap:g} to {cap:g}"
        correction = f"each token's loss is multiplied by {factor}"
        if config.reuses_samples and config.loss.has_ratio_to_engine:
            correction = "the ratio of each token is the one to the policy that sampled it"
        eta = config.max_staleness
        rollout = config.rollout
        yield (
            "  schedule    async: while a step trains, the engine samples with the weights from"
            f" its start; {correction}"
        )
        least = 1
        if rollout.clock == "load":
            least = 0
            yield (
                "              rollout.clock load: the engine takes new weights in the middle of a"
                " batch"
            )
        elif eta == 1:
            yield "              max_staleness 1: every token but the first batch's is 1 step stale"
            return
        responses = (1 + config.lookahead(1)) * rollout.prompts_per_step * rollout.group_size
        tokens = responses * rollout.max_response_tokens
        yield (
            f"              max_staleness {eta}: {least} to {eta} steps stale, expected"
            f" {(least + eta) / 2:g}, in flight {responses:,} responses / keep rate, of at most"
            f" {tokens:,} tokens / keep rate with {_TOKEN_BYTES} bytes each"
        )
