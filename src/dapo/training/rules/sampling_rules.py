"""Rules over a run's sampling: groups without a signal, verifier errors, and the responses'
form.
"""

from dapo.config import Config
from dapo.config.lengths import limit_of_response
from dapo.rewards.verifier import VERIFIERS
from dapo.training.rules.finding import Symptom
from dapo.training.rules.history import GAIN, LONG, MIN_KEEP_RATE, MIN_STEPS, MetricHistory

MIN_GROUPS = 32  # judged groups that are enough for a keep rate, however few their steps
ERROR_RATE = 0.05  # the fraction of responses without a verdict above which a run warns
# failures of an audit, in all the window's steps, that say nothing: it may judge a few responses
FEW_ERRORS = 2
TRUNCATED = 0.5  # the fraction of responses that end at the limit of tokens above which a run warns
# the growth since the first steps that is an explosion, unless accuracy grew as well
LENGTH_GROWTH = 2.0
# the fraction of the first steps' length that is a collapse, unless accuracy grew
LENGTH_SHRINKAGE = 2 / 3
WELL_SOLVED = 0.9  # the accuracy from which shorter responses lose nothing
# the fraction of cut responses in the first steps from which shorter ones are what is wanted
_CUT_AT_FIRST = 0.2
# the mean of advantage times relative length below which the advantages favour short responses: in
# five steps of 128 responses of GSM8K its standard error is 0.01
_FAVOURS_SHORT = -0.02
LOOPS = 0.1  # the fraction of responses that end in a loop above which a run warns
# the fraction of responses with three or more marked answers above which a run warns
MANY_ANSWERS = 0.1
TOP_PROBLEM = 0.5  # the fraction of a step's trained tokens that one problem may have
EASIER_PROBLEMS = (
    "mix in problems that the model solves at times, data.train={mix: {easy: SOURCE, hard: SOURCE}}"
    " (dynamic_sampling.predict=true samples the others less often), or train on easier ones first"
    " and continue with dapo fork"
)
"""Advice where a model solves none of its problems."""
_MANY_TOKENS = 8


def too_hard(history: MetricHistory, config: Config) -> Symptom | None:
    """No response is correct, or most groups are all wrong."""
    return _none_right(history, config) or starvation(history, config, "too_hard")


def _none_right(history: MetricHistory, config: Config) -> Symptom | None:
    """Wrong responses alone teach nothing of a task, unless their scores decide what trains."""
    keep_rate = signal_rate(history, config)
    if keep_rate and config.dynamic_sampling.metric == "score":
        return None
    groups = round(decided(history))
    steps = len(history.window())
    is_sure = not keep_rate or steps >= MIN_STEPS or groups >= MIN_GROUPS
    if (
        any(history.values("reward/accuracy", LONG))
        or history.mean("reward/accuracy") is None
        or not is_sure
    ):
        return None
    if _starvation_cause(history, config) != "too_hard":
        return None
    result = "all that is learned is the penalty on length" if keep_rate else "nothing is learned"
    truncated = history.mean("rollout/truncated_fraction") or 0.0
    option, limit = limit_of_response(config)
    is_cut = truncated > TRUNCATED
    if is_cut and config.plays_episodes:
        cause = f"{truncated:.0%} of the episodes are cut at {option}={limit}"
    elif is_cut:
        cause = f"{truncated:.0%} of the responses reach {limit} tokens, the limit"
    else:
        cause = "problems are too hard"
    return Symptom(
        f"{cause}: every response to {groups:,} prompts is wrong, so {result}",
        {"rollout/keep_rate": keep_rate}
        | history.means("reward/accuracy", "rollout/truncated_fraction"),
        (f"{option}={2 * limit}",) if is_cut else (),
        advice=(
            f"{EASIER_PROBLEMS}; if it should solve these, read its responses: an answer that is"
            " cut off, or in a form that the reward does not expect, is wrong too"
        ),
        severity="error",
    )


def starvation(history: MetricHistory, config: Config, name: str) -> Symptom | None:
    """Few groups carry a signal, mostly for the reason that the rule `name` stands for."""
    keep_rate = signal_rate(history, config)
    if keep_rate is None or not _lacks_signal(history, config):
        return None
    if _starvation_cause(history, config) != name or _is_cut_off(history, config, name):
        return None
    cause, change, advice = _STARVATION[name]
    if name == "filtered":
        change = _without_filter(config)
    # without any signal larger groups have none either, and dynamic sampling fills no batch
    if keep_rate:
        change = (*_sampling_change(config), *change)
    elif name != "filtered":
        change = ()
    sides = history.means("rollout/all_correct_fraction", "rollout/all_wrong_fraction")
    if (
        config.dynamic_sampling.enabled
        and name in ("too_easy", "too_hard")
        and None not in sides.values()
    ):
        cause += " (all correct in {:.0%} of the groups, all wrong in {:.0%})".format(
            *sides.values()
        )
    if ENABLE in change:  # its batch has 1 / keep_rate times the signal (docs/lab/when.md)
        advice += (
            f"; with dynamic sampling optim.lr may be up to {keep_rate**-0.5:.1f} times as high"
        )
    bigger = 2 * config.rollout.group_size
    return Symptom(
        f"only {keep_rate:.0%} of the judged groups carry a signal, as {cause}",
        {"rollout/keep_rate": keep_rate}
        | sides
        | history.means("rollout/shortfall_groups", "reward/accuracy"),
        tuple(option.format(bigger=bigger) for option in change),
        advice=advice,
    )


_STARVATION = {
    "too_easy": (
        "problems are too easy",
        (),
        (
            "choose harder problems in data.train; if these are hard, the reward accepts too much:"
            " try dapo test"
        ),
    ),
    "too_hard": (
        "problems are too hard",
        ("rollout.group_size={bigger}",),
        (
            "choose easier problems in data.train (dapo data select), or mix some in; or the reward"
            " expects another form of the answer than the model writes: read its responses"
        ),
    ),
    "equal_rewards": (
        "the reward gives the responses of most groups the same score",
        ("rollout.group_size={bigger}",),
        (
            "a reward without spread teaches nothing: make it tell better responses from worse"
            " ones; dapo test shows its scores"
        ),
    ),
    "filtered": ("a filter of dynamic_sampling rejects the others", (), "loosen the filter"),
}


def _without_filter(config: Config) -> tuple[str, ...]:
    """Return the options that leave out the filter of groups."""
    sampling = config.dynamic_sampling
    change = []
    if sampling.filter is not None:
        change.append("dynamic_sampling.filter=null")
    if sampling.min_spread > 0:
        change.append("dynamic_sampling.min_spread=0")
    if sampling.mean_between != (None, None):
        change.append("dynamic_sampling.mean_between=[null,null]")
    return tuple(change)


ENABLE = "dynamic_sampling.enabled=true"


def _lacks_signal(history: MetricHistory, config: Config) -> bool:
    """Return True if few groups carry a signal: of some steps, of many groups, or none at all."""
    keep_rate = signal_rate(history, config)
    if keep_rate is None or keep_rate >= MIN_KEEP_RATE:
        return False
    return keep_rate == 0 or len(history.window()) >= MIN_STEPS or decided(history) >= MIN_GROUPS


def _is_cut_off(history: MetricHistory, config: Config, name: str) -> bool:
    """Return True if groups lack a signal because of truncation, which `truncation` reports."""
    truncated = history.mean("rollout/truncated_fraction") or 0.0
    may_hide = name in ("too_hard", "equal_rewards") or config.overlong.mode == "filter"
    return may_hide and truncated > TRUNCATED


def _sampling_change(config: Config) -> tuple[str, ...]:
    """Return the unused option of dynamic sampling that would skip problems without a signal."""
    sampling = config.dynamic_sampling
    if not sampling.enabled:
        return (ENABLE,)
    return () if sampling.predict or sampling.has_filter else ("dynamic_sampling.predict=true",)


def signal_rate(history: MetricHistory, config: Config) -> float | None:
    """The fraction of judged groups with an advantage other than 0; None before the first."""
    judged = decided(history)
    flat = history.total("rollout/zero_advantage_fraction") / max(1, len(history.window()))
    if not config.dynamic_sampling.enabled and history.window():
        return 1 - flat
    return (1 - flat) * history.total("rollout/groups_trained") / judged if judged else None


def decided(history: MetricHistory) -> float:
    """The number of groups whose responses were judged and not given up."""
    return history.total("rollout/groups_generated") - history.total(
        "rollout/groups_excess", "rollout/groups_aborted", "rollout/groups_stale"
    )


def _starvation_cause(history: MetricHistory, config: Config) -> str:
    """Return the most frequent outcome of the groups without a signal."""
    if not config.dynamic_sampling.enabled:
        if _error_rate(history, config) > 1 - MIN_KEEP_RATE:
            return "verifier_errors"
        accuracy = history.mean("reward/accuracy")
        if accuracy is None:
            return "equal_rewards"
        if accuracy > 0.5:
            return "too_easy"
        return "too_hard"
    counts = {
        "too_easy": history.total("rollout/groups_all_correct"),
        "too_hard": history.total("rollout/groups_all_wrong"),
        "equal_rewards": history.total("rollout/groups_zero_variance"),
        "filtered": history.total("rollout/groups_filtered"),
        "verifier_errors": history.total("rollout/groups_invalid"),
    }
    return max(counts, key=lambda name: counts[name])


def _error_rate(history: MetricHistory, config: Config, *, but: str | None = None) -> float:
    """Return the fraction of responses without a verdict, except those that metric `but` counts."""
    responses = decided(history) * config.rollout.group_size
    errors = history.total("rollout/verifier_errors") - (history.total(but) if but else 0.0)
    return errors / responses if responses else 0.0


def verifier_errors(history: MetricHistory, config: Config) -> Symptom | None:
    """Many responses have no verdict of the reward, or many audited ones none of the audit."""
    # these have a rule of their own
    rate = _error_rate(history, config, but="rollout/environment_errors")
    per_call = history.mean("time/verifier_call_s")
    limit = config.reward.timeout_s
    if rate <= ERROR_RATE or len(history.window()) < MIN_STEPS:
        return _audit_errors(history)
    # calls that end at the limit last that long
    may_time_out = per_call is None or per_call >= rate * limit / 2
    return Symptom(
        f"{rate:.0%} of the responses have no verdict, and train nothing: the verifier fails on"
        " them",
        history.means("rollout/verifier_errors", "time/verifier_call_s"),
        (f"reward.timeout_s={2 * limit:g}",) if may_time_out else (),
        advice="dapo test shows what the verifier says",
    )


def _audit_errors(history: MetricHistory) -> Symptom | None:
    errors = history.total("audit/errors")
    responses = history.total("audit/responses")
    if (
        not responses
        or errors <= max(ERROR_RATE * responses, FEW_ERRORS)
        or history.steps < MIN_STEPS
    ):
        return None
    return Symptom(
        f"{errors / responses:.0%} of the audited responses have no verdict of audit.verifier, and"
        " audit/gap leaves them out: the audit fails on them",
        history.means("audit/errors", "audit/responses"),
        advice=(
            "correct audit.verifier: rollouts/*.parquet has the reasons in the column audit_error"
        ),
    )


def truncation(history: MetricHistory, config: Config) -> Symptom | None:
    """Most responses end at the limit, and not because they repeat themselves."""
    truncated = history.mean("rollout/truncated_fraction")
    evaluation = history.last_evaluation
    # before the first step, of the untrained model; a supervised step samples no response either
    if truncated is None and evaluation is not None:
        option = "rollout" if config.eval.max_response_tokens is None else "eval"
        accuracy = None if evaluation.is_score else evaluation.accuracy
        which = " of the last evaluation" if history.steps else " of the first evaluation"
        return _cut_off(evaluation.truncated, accuracy, config, option, which)
    # as soon as too few groups carry a signal, because then the problems would be blamed
    is_sure = history.steps >= MIN_STEPS or _lacks_signal(history, config)
    looping = history.total("rollout/looping_fraction") / max(1, len(history.window()))
    if truncated is None or not is_sure or looping > truncated / 2:
        return None
    effect = {"soft": " and are penalised", "filter": " and do not train"}.get(
        config.overlong.mode, ""
    )
    if config.overlong.mode == "filter":
        rate = signal_rate(history, config) or 0.0
        if rate < MIN_KEEP_RATE:
            effect += f", so that {rate:.0%} of the groups have a token with an advantage"
    return _cut_off(truncated, history.mean("reward/accuracy"), config, "rollout", "", effect)


def _cut_off(
    truncated: float,
    accuracy: float | None,
    config: Config,
    section: str,
    sampled: str,
    effect: str = "",
) -> Symptom | None:
    if not truncated > TRUNCATED:
        return None
    option, limit = limit_of_response(config, section)
    # so most truncated responses are right
    has_answered = accuracy is not None and accuracy > 1 - truncated / 2
    if has_answered:
        reason = "they continue after their answer"
    elif config.runs_agent:
        reason = "their agent reads answers that are cut, and then empty ones"
    elif config.plays_episodes:
        reason = "their environment does not answer a turn that is cut"
    else:
        reason = "they are judged before they have answered"
    shorter = "request shorter answers in data.instruction"
    what = "responses"
    where = f"the limit of {limit} tokens"
    if config.plays_episodes:
        shorter = "request shorter turns in the prompt of reset, or in data.instruction"
        if config.runs_agent:
            shorter = "let the agent ask for shorter answers, or send a smaller max_tokens"
        what = "episodes"
        is_of_turn = option == "environment.max_turn_tokens"
        where += " of a turn" if is_of_turn else ", which all turns of an episode share"
    return Symptom(
        f"{truncated:.1%} of the {what}{sampled} end at {where}{effect}: {reason}",
        {
            "eval truncated_fraction" if sampled else "rollout/truncated_fraction": truncated,
            "accuracy": accuracy,
        },
        () if has_answered else (f"{option}={2 * limit}",),
        advice=shorter,
    )


def length_explosion(history: MetricHistory, config: Config) -> Symptom | None:
    """Responses grow without a gain in accuracy."""
    lengths = _lengths(history)
    if lengths is None:
        return None
    now, first = lengths
    if now < max(LENGTH_GROWTH * first, first + _MANY_TOKENS):
        return None
    result = _result_without_gain(history, config)
    if result is None:
        return None
    mode = config.overlong.mode
    buffer = config.overlong.buffer_tokens
    shorter = max(round(LENGTH_GROWTH * first), buffer if mode == "soft" else 1)
    change = [] if mode == "soft" else ["overlong.mode=filter"]
    if shorter < config.rollout.max_response_tokens:
        change.append(f"rollout.max_response_tokens={shorter}")
    return Symptom(
        _length_cause(now, first, result),
        _length_evidence(history),
        tuple(change),
        advice=(
            "look at the longest responses below: a reward that counts words or steps rewards"
            " more of them"
        ),
    )


def length_collapse(history: MetricHistory, config: Config) -> Symptom | None:
    """Responses get short without a gain in accuracy."""
    lengths = _lengths(history)
    if lengths is None:
        return None
    now, first = lengths
    if now > min(LENGTH_SHRINKAGE * first, first - _MANY_TOKENS):
        return None
    accuracy = history.mean("reward/accuracy")
    cut_at_first = history.first_mean("rollout/truncated_fraction") or 0.0
    if (accuracy is not None and accuracy >= WELL_SOLVED) or cut_at_first >= _CUT_AT_FIRST:
        return None
    result = _result_without_gain(history, config)
    if result is None:
        return None
    cause = _length_cause(now, first, result)
    preference = history.mean("rollout/length_preference")
    if preference is not None and preference < _FAVOURS_SHORT:
        cause += "; the advantages favour the shorter responses of a group"
    advice = (
        "where short problems are the ones solved, right and wrong teach brevity: mix in longer"
        " problems that are solved at times; partial credit with dynamic_sampling.metric=score"
        " keeps the length"
    )
    if accuracy is None or config.dynamic_sampling.metric == "score":
        advice = "look at the scores of short and long responses: the reward may pay for brevity"
    return Symptom(
        cause,
        _length_evidence(history) | {"rollout/length_preference": preference},
        ("overlong.mode=filter",) if _has_paid_for_length(history, config) else (),
        advice=advice,
    )


def _has_paid_for_length(history: MetricHistory, config: Config) -> bool:
    """Whether the soft punishment has cost reward, in the first steps or the last ones."""
    if config.overlong.mode != "soft":
        return False
    for mean in (history.first_mean, history.mean):
        score = mean("reward/score_mean")
        reward = mean("reward/mean")
        if score is not None and reward is not None and reward < score:
            return True
    return False


def _lengths(history: MetricHistory) -> tuple[float, float] | None:
    """Return the mean length now and in the first steps, in tokens; None before there are both."""
    now = history.mean("rollout/response_tokens_mean")
    first = history.first_mean("rollout/response_tokens_mean")
    if now is None or first is None:
        return None
    return now, first


def _result_without_gain(history: MetricHistory, config: Config) -> str | None:
    """Say what became of the accuracy; None if it has gained GAIN, or nothing can tell."""
    accuracy = history.mean("reward/accuracy")
    gain = None if accuracy is None else history.gain
    # selection keeps the accuracy of sampled problems near one half, and takes harder ones, whose
    # solutions are longer
    is_unknown = config.dynamic_sampling.predict and history.evaluations < 2
    if is_unknown or (gain is not None and gain >= GAIN):
        return None
    if gain is None:
        return "the reward gives only scores: it may reward length, or punish it"
    if history.performance == "reward/accuracy":
        return f"accuracy changed by {gain:+.1%}"
    return f"the mean score changed by {gain:+.3f}"


def _length_cause(now: float, first: float, result: str) -> str:
    return (
        f"responses are {now / first:.1f} times as long as in the first steps"
        f" ({now:.0f} tokens, then {first:.0f}), and {result}"
    )


def _length_evidence(history: MetricHistory) -> dict[str, float | None]:
    name = "rollout/response_tokens_mean"
    return history.means(name) | {
        f"{name} at first": history.first_mean(name),
        "reward/accuracy": history.mean("reward/accuracy"),
    }


def repeated_text(history: MetricHistory, config: Config) -> Symptom | None:
    """Many responses end in a loop."""
    if (rate := history.rate("rollout/looping_fraction")) <= LOOPS:
        return None
    colder = ("rollout.temperature=1.0",) if config.rollout.temperature < 1 else ()
    return Symptom(
        f"{rate:.0%} of the responses end in a loop: the same tokens at least four times in a row",
        {"rollout/looping_fraction": rate},
        (*colder, "overlong.mode=filter"),
        advice="the model repeats itself, or the reward encourages it: compare their rewards below",
    )


def many_answers(history: MetricHistory, config: Config) -> Symptom | None:
    """Many responses mark several answers."""
    if (rate := history.rate("rollout/many_answers_fraction")) <= MANY_ANSWERS:
        return None
    verifier = config.reward.verifier
    reads_marks = (
        isinstance(verifier, str) and verifier in VERIFIERS and bool(VERIFIERS[verifier].markers)
    )
    return Symptom(
        f"{rate:.0%} of the responses mark three or more answers (Answer:, \\boxed or ####): the"
        " model hedges, and a verifier that takes any of them rewards guessing",
        {"rollout/many_answers_fraction": rate},
        ("reward.verifier=math",) if reads_marks else (),  # other tasks need other verifiers
        advice=(
            "take a verifier that refuses several answers: dapo test tries `several marked answers`"
        ),
        severity="warning" if verifier == "math" else None,  # which refuses several answers
    )


def one_problem(history: MetricHistory, config: Config) -> Symptom | None:
    """One problem has most of the tokens that train."""
    if (share := history.rate("rollout/top_problem_fraction")) <= TOP_PROBLEM:
        return None
    return Symptom(
        f"one problem has {share:.0%} of the tokens that train, so the run learns that problem",
        {"rollout/top_problem_fraction": share},
        ("loss.aggregate=sequence",),
        advice=(
            "remove the copies of the problem below (dapo data dedupe), or add problems of middle"
            " difficulty"
        ),
    )
