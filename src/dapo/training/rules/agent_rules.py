"""Rules over episodes of agents: what rewrites histories, waits, is refused, or does not train."""

from dapo.config import Config
from dapo.environments.agents.branches import REWRITTEN
from dapo.training.rules.finding import Symptom
from dapo.training.rules.history import MIN_STEPS, MetricHistory
from dapo.training.rules.sampling_rules import decided

BRANCHES = 0.5  # the fraction of calls behind another one that rewrite its history
WAITING = 0.5  # the fraction of a step's seconds in which the engine waits for agents
MIN_WAITING_S = 1.0  # seconds of waiting per step below which nothing is worth changing
REFUSED = 0.05  # the fraction of requests that are refused, or whose answer is empty
OVERRIDDEN = 0.5  # the fraction of requests that are overridden
MASKED = 0.25  # the fraction of sampled tokens that do not train


def rewritten_history(history: MetricHistory, config: Config) -> Symptom | None:
    """Most calls behind another one do not continue it."""
    if not config.runs_agent:
        return None
    rewritten = history.total("rollout/rewritten_histories")
    later_calls = _calls(history, config) - _episodes(history, config)
    if history.steps < MIN_STEPS or rewritten <= BRANCHES * later_calls or not rewritten:
        return None
    return Symptom(
        f"{rewritten / max(1.0, later_calls):.0%} of the calls behind another one change a message of its"
        " history, and begin a branch, which is read from its start",
        history.means("rollout/rewritten_histories", "rollout/branches_mean", "rollout/turns_mean"),
        advice=(
            "send earlier messages as they were; the finding shows the first one that differs. An"
            " agent that compacts its history on purpose trains exactly, too"
        ),
    )


def slow_agent(history: MetricHistory, config: Config) -> Symptom | None:
    """A step mostly waits for agents."""
    if not config.runs_agent:
        return None
    waiting_s = history.mean("time/environment_s")
    step_s = history.mean("time/step_s")
    if waiting_s is None or step_s is None:
        return None
    if waiting_s < MIN_WAITING_S or waiting_s <= WAITING * step_s:
        return None
    change: tuple[str, ...] = ()
    if config.rollout.is_reproducible:  # with rollout.clock=load answers count when they come
        polls = min(8 * config.environment.lag_polls, 10**6)
        change = (f"environment.lag_polls={polls}", "rollout.clock=load")
    return Symptom(
        f"{waiting_s:.3g} of the {step_s:.3g} s of a step wait for agents",
        history.means("time/environment_s", "time/step_s"),
        change,
        advice="import and open what all episodes share when the agent's module is imported",
    )


def refused_requests(history: MetricHistory, config: Config) -> Symptom | None:
    """The endpoint answers many requests with an error."""
    if not config.runs_agent:
        return None
    refused = history.total("rollout/refused_requests")
    requests = _calls(history, config) + refused
    if history.steps < MIN_STEPS or refused <= REFUSED * requests:
        return None
    return Symptom(
        f"{refused / max(1.0, requests):.0%} of the agent's requests are refused: another distribution than"
        " the run's, a chat that is too long, or a form that the endpoint does not read",
        history.means("rollout/refused_requests", "rollout/turns_mean"),
        ("environment.foreign_sampling=override",),
        advice="print the error in the agent: it says what was expected",
    )


def overridden_requests(history: MetricHistory, config: Config) -> Symptom | None:
    """Most requests ask for another distribution than the run's."""
    if not config.runs_agent:
        return None
    overridden = history.total("rollout/overridden_requests")
    calls = _calls(history, config)
    if history.steps < MIN_STEPS or overridden <= OVERRIDDEN * calls or not overridden:
        return None
    return Symptom(
        f"{overridden / max(1.0, calls):.0%} of the agent's requests ask for another"
        f" distribution than the run's, and are sampled at {config.rollout.temperature:g}",
        history.means("rollout/overridden_requests"),
        advice="leave temperature and the like out of the agent, or set rollout.temperature to it",
    )


def empty_answers(history: MetricHistory, config: Config) -> Symptom | None:
    """Many calls find no tokens or turns left."""
    if not config.runs_agent:
        return None
    empty = history.total("rollout/empty_answers")
    calls = _calls(history, config)
    if history.steps < MIN_STEPS or empty <= REFUSED * calls:
        return None
    turns = config.environment.max_turns
    tokens = config.rollout.max_response_tokens
    return Symptom(
        f"{empty / max(1.0, calls):.0%} of the calls get an empty answer: nothing is left of"
        f" environment.max_turns={turns} or rollout.max_response_tokens={tokens}",
        history.means(
            "rollout/empty_answers", "rollout/turns_mean", "rollout/response_tokens_mean"
        ),
        (
            f"environment.max_turns={min(2 * turns, 1000)}",
            f"rollout.max_response_tokens={2 * tokens}",
        ),
        advice="or let the agent send max_tokens, and end after fewer calls",
    )


def masked_tokens(history: MetricHistory, config: Config) -> Symptom | None:
    """Much of what is sampled does not train."""
    if not config.runs_agent:
        return None
    masked = history.total("rollout/masked_tokens")
    sampled = (history.mean("rollout/response_tokens_mean") or 0.0) * _episodes(history, config)
    if history.steps < MIN_STEPS or masked <= MASKED * sampled or not masked:
        return None
    return Symptom(
        f"{masked / max(1.0, sampled):.0%} of the sampled tokens do not train: the agent did not wait for the"
        " answer, or its rewards refer to other calls",
        history.means("rollout/masked_tokens", "rollout/response_tokens_mean"),
        advice=(
            "cancel no requests, and return one reward for the episode, or rewards by the ids of"
            " all last answers"
        ),
    )


def first_rewritten(calls: object) -> str | None:
    """Return the first message of an episode's calls that differs from its history, in words."""
    if not isinstance(calls, list):
        return None
    reasons = [str(call.get("branch_reason", "")) for call in calls if isinstance(call, dict)]
    return next((reason for reason in reasons if reason.startswith(REWRITTEN)), None)


def _episodes(history: MetricHistory, config: Config) -> float:
    return decided(history) * config.rollout.group_size


def _calls(history: MetricHistory, config: Config) -> float:
    return (history.mean("rollout/turns_mean") or 0.0) * _episodes(history, config)
