"""The table of all metrics that a run logs: unit, meaning, place in the paper, and how a step's updates are combined.

The console, the curves, `mean_of_updates` and docs/metrics.md read it. Run as a program, this module prints that page.
"""

import re
from dataclasses import dataclass
from functools import cache
from typing import Literal

from dapo.core.terminal import print_text
from dapo.runs.outcomes import OUTCOME_MEANINGS, OUTCOMES

SECTIONS = {
    "reward": "Rewards of the step's judged responses.",
    "audit": "Verdicts of a second verifier (`audit.verifier`), which never trains, on a share of trained responses.",
    "rollout": "Responses that a step generated. `groups_*` and `tokens_*` count all of them; the other metrics, "
    "and those of `reward/`, leave out groups with outcome `excess`: none depends on the number of groups in flight.",
    "loss": "The loss, and means over the tokens that train.",
    "critic": "The value function of PPO (`advantage.estimator: gae`, docs/losses.md).",
    "optim": "The optimizer.",
    "time": "Seconds, speed, memory and warnings. Only these depend on the machine and the moment; all other metrics "
    "are the same in every repetition of a run.",
    "eval": "Evaluations: before the first step, then every `train.eval_every` steps. `{data}` is the data set's name.",
}


@dataclass(frozen=True)
class Phase:
    """A part of a step: shown while it goes on, and timed as `time/NAME_s`."""

    meaning: str
    counts: str = ""  # what its progress counts
    when: str = ""  # where not every step has the phase: which ones do
    is_logged: bool = True


# fmt: off
PHASES = {
    "load_weights": Phase("giving the policy's weights to the engine"),
    "generate": Phase("sampling and judging the batch; with `schedule: one_step_off`, of the batch that was sampled in "
                      "the background", "groups"),
    "judge_wait": Phase("waiting for verdicts with nothing left to generate, which is a part of `time/generate_s`"),
    "write_rollouts": Phase("waiting for the table of responses, which is written in the background"),
    "reference_kl": Phase("computing the divergence to the reference for the rewards",
                          when="with `loss.kl_in: reward`"),
    "values": Phase("computing the critic's values of the batch and from them its advantages",
                    when="with `advantage.estimator: gae`"),
    "old_logprobs": Phase("computing the log-probabilities of the policy before the step's first update",
                          when="with more than one update per step"),
    "update": Phase("the optimizer updates", "minibatches"),
    "wait": Phase("waiting for the next batch after the updates", "groups", when="with `schedule: one_step_off`"),
    "evaluate": Phase("evaluation", "problems", when="in steps with an evaluation"),
    "save": Phase("starting a checkpoint", is_logged=False),
}


@dataclass(frozen=True)
class Metric:
    """One metric, or a family of them whose name holds {placeholders}."""

    name: str
    unit: str
    meaning: str  # a full sentence
    paper: str = ""  # the figure, table or equation of the paper that it belongs to
    over_updates: Literal["", "mean", "mean over tokens", "mean over tokens at the upper clip", "sum", "max"] = ""
    """How a step's optimizer updates are combined into one value; empty for a metric of the whole step."""
    when: str = ""  # the condition under which it is logged; empty if every run logs it

    @property
    def scale(self) -> float:
        """Factor of the displayed value: fractions are shown in per cent."""
        return 100.0 if self.unit == "fraction" else 1.0


_CALIBRATION = "with `dynamic_sampling.predict`, in steps with such a group"
_AUDITED = "with `audit.verifier`, in steps with an audited response"
_CRITIC = "with `advantage.estimator: gae`"
METRICS = (
    Metric("reward/mean", "reward", "The mean shaped reward (score plus overlong penalty) of all responses with a "
           "verdict, before groups are filtered.", "Fig. 7b"),
    Metric("reward/trained_mean", "reward", "The mean shaped reward of the groups that train.", "Fig. 7b"),
    Metric("reward/score_mean", "score", "The mean score of the verifier, without the overlong penalty.", "Eq. 7"),
    Metric("reward/accuracy", "fraction", "The fraction of responses with a verdict that are correct.",
           when="where the verifier decides correct or wrong"),
    Metric("reward/component/{verifier}", "score", "The mean score of one of several verifiers, before its weight, "
           "over the responses to which it applied; a colon in its name becomes a dot.", when="with several verifiers"),
    Metric("reward/kl_mean", "nats per token", "The estimate of the KL divergence to the reference, as a mean over "
           "the response tokens of the groups that train. Its sum over a response, times `loss.kl_coef`, is subtracted "
           "from the reward; the other metrics of rewards are of those before.", "", when="with `loss.kl_in: reward`"),
    Metric("audit/responses", "responses", "The number of trained responses that were sent to `audit.verifier`.",
           when="with `audit.verifier`"),
    Metric("audit/errors", "responses", "The number of these without a verdict of the audit; they are in no mean.",
           when="with `audit.verifier`"),
    Metric("audit/mean", "fraction", "The accuracy of these by the audit's verifier; the mean score, where it or the "
           "reward's does not decide right or wrong.", when=_AUDITED),
    Metric("audit/gap", "fraction", "The accuracy (or score) of these by the reward's verifier minus that by the "
           "audit's, as a mean over problems.", when=_AUDITED),
    Metric("audit/gap_low", "fraction", "The lower end of the 95 % interval of the gap; missing where nothing bounds "
           "it.", when=_AUDITED),
    Metric("audit/gap_high", "fraction", "The upper end of the 95 % interval of the gap.", when=_AUDITED),
    Metric("rollout/keep_rate", "fraction", "The fraction of judged groups that train.", "Eq. 11"),
    Metric("rollout/all_correct_fraction", "fraction", "The fraction of judged groups that are all correct, "
           "whether they train or not.", "Fig. 3b"),
    Metric("rollout/all_wrong_fraction", "fraction", "The fraction of judged groups that are all wrong, whether "
           "they train or not.", "Eq. 11"),
    Metric("rollout/trained_pass_rate_mean", "fraction", "The mean fraction of correct responses of the groups that "
           "train and have correct and wrong ones: the difficulty of the problems that the policy learns from.",
           "Eq. 11",
           when="where the verifier decides correct or wrong, in steps with such a group"),
    Metric("rollout/response_tokens_mean", "tokens", "The mean length of a response.", "Fig. 7a"),
    Metric("rollout/response_tokens_max", "tokens", "The length of the longest response."),
    Metric("rollout/truncated_fraction", "fraction", "The fraction of responses that reached the length limit.",
           "Section 3.4"),
    Metric("rollout/shared_token_fraction", "fraction", "The fraction of response tokens that an earlier response of "
           "the group has as well, after the same tokens; the native engine computes them once."),
    Metric("rollout/reflection_fraction", "fraction", "The fraction of responses with a phrase of reflection such as "
           '"wait" or "let me check".', "Table 2"),
    Metric("rollout/looping_fraction", "fraction", "The fraction of responses that end in a loop: at least four times "
           "the same tokens in a row, at least 24 tokens in all.", when="in steps with such a response"),
    Metric("rollout/many_answers_fraction", "fraction", "The fraction of responses that mark three or more answers, by "
           "`Answer:`, `\\boxed{` or `####` and a number.", when="in steps with such a response"),
    Metric("rollout/zero_advantage_fraction", "fraction", "The fraction of the groups that train whose rewards are all "
           "equal, so that each advantage is 0 (Eq. 9); with dynamic sampling there is none.",
           when="in steps with such a group"),
    Metric("rollout/top_problem_fraction", "fraction", "The largest part of the trained tokens with an advantage that "
           "one problem has.", when="in steps with four such groups or more, where it is over half"),
    Metric("rollout/verifier_errors", "responses", "The number of responses without a verdict."),
    Metric("rollout/shortfall_groups", "groups", "The number of groups that are missing from a full batch."),
    Metric("rollout/groups_generated", "groups", "The number of groups with at least one generated token."),
    Metric("rollout/groups_{outcome}", "groups", "The number of groups with this outcome."),
    Metric("rollout/tokens_generated", "tokens", "The number of generated tokens."),
    Metric("rollout/tokens_{outcome}", "tokens", "The number of tokens generated for groups with this outcome."),
    Metric("rollout/tokens_in_minibatches", "tokens", "The number of response tokens that train.", "Eq. 12"),
    Metric("rollout/problems_skipped", "problems", "The number of problems of the stream that were skipped.",
           when="with `dynamic_sampling.predict`"),
    Metric("rollout/skipped_chance", "groups", "The expected number of informative groups that skipping gave up.",
           when="with `dynamic_sampling.predict`"),
    Metric("rollout/calibration_groups_{bin}", "groups", "The number of judged groups of the calibration sample (2 % "
           "of the stream, sampled whatever is predicted) whose predicted chance of a signal is within these per cent.",
           when=_CALIBRATION),
    Metric("rollout/calibration_chance_{bin}", "groups", "The sum of the predicted chances of these groups.",
           when=_CALIBRATION),
    Metric("rollout/calibration_signals_{bin}", "groups", "The number of these groups that carried a signal.",
           when=_CALIBRATION),
    Metric("rollout/effective_groups", "groups", "The number of equally weighted groups whose mean would vary as much: "
           "the squared sum of the groups' loss weights over the sum of their squares.",
           when="with `dynamic_sampling.weights: inverse`"),
    Metric("rollout/entropy_estimate", "nats per token", "The mean of minus the engine's log-probability over the "
           "tokens of all responses: an estimate of the entropy that does not depend on which responses train.",
           "Fig. 2b, 7c"),
    Metric("rollout/epoch", "epochs", "The number of finished passes over the training problems."),
    Metric("rollout/engine_logprob_gap_mean", "nats per token", "The mean absolute difference between the "
           "log-probabilities of the engine and of the trainer.", over_updates="mean over tokens"),
    Metric("rollout/engine_logprob_gap_max", "nats", "The largest absolute difference between a token's "
           "log-probabilities in the engine and in the trainer.", over_updates="max"),
    Metric("rollout/staleness_mean", "steps", "How many steps older than the policy the weights were that sampled the "
           "trained groups, as a mean over response tokens.", when="with `schedule: one_step_off`"),
    Metric("rollout/staleness_max", "steps", "How many steps older than the policy the oldest weights were that "
           "sampled a trained group.", when="with `schedule: one_step_off`"),
    Metric("loss/policy", "loss", "The clipped policy loss, or the loss of `loss.function`.", "Eq. 8, negated", "mean"),
    Metric("loss/kl", "nats per token", "The estimate of the KL divergence from the policy to the reference, before "
           "its coefficient, weighted like the loss.", "Eq. 5", "mean",
           "with `loss.kl_coef` above 0 and `loss.kl_in: loss`"),
    Metric("loss/entropy", "nats per token", "The mean entropy of the policy at the sampled positions.", "Fig. 2b, 7c",
           "mean over tokens"),
    Metric("loss/entropy_coef", "1", "The weight of the entropy in the loss, as `loss.entropy_target` has set it.", "",
           "mean", "with `loss.entropy_target`"),
    Metric("loss/ratio_mean", "ratio", "The mean ratio of the policy's probability to the old policy's.", "Eq. 6",
           "mean over tokens"),
    Metric("loss/approx_kl", "nats per token", "The estimate of the KL divergence from the old policy to the policy.",
           "", "mean over tokens"),
    Metric("loss/token_prob_mean", "probability", "The mean probability of the sampled tokens under the policy.",
           "Fig. 7d", "mean over tokens"),
    Metric("loss/clip_low_fraction", "fraction", "The fraction of tokens that lose their gradient to the lower clip.",
           "Eq. 10", "mean over tokens", "without `loss.function`"),
    Metric("loss/clip_high_fraction", "fraction", "The fraction of tokens that lose their gradient to the upper clip.",
           "Eq. 10", "mean over tokens", "without `loss.function`"),
    Metric("loss/clip_dual_fraction", "fraction", "The fraction of tokens that lose their gradient to the dual clip.",
           "", "mean over tokens", "with `loss.dual_clip`"),
    Metric("loss/clipped_high_prob_mean", "probability", "The mean probability, under the policy, of the tokens at the "
           "upper clip.", "Fig. 3a", "mean over tokens at the upper clip", "in steps with a token at the upper clip"),
    Metric("loss/engine_weight_mean", "ratio", "The mean importance weight that corrects for the engine's "
           "probabilities.", "", "mean over tokens", "with `loss.engine_correction`"),
    Metric("loss/engine_weight_truncated_fraction", "fraction", "The fraction of tokens whose importance weight is "
           "bounded by `loss.engine_correction`: truncated, or masked.", "", "mean over tokens",
           "with `loss.engine_correction`"),
    Metric("loss/{name}", "the function's", "A metric that the function of `loss.function` returns, added over the "
           "tokens of an update.", "", "mean", "with `loss.function`"),
    Metric("critic/loss", "reward squared", "Half the squared error of the critic's values, clipped by "
           "`critic.clip_range`, as a mean over the tokens that train.", "", "mean", _CRITIC),
    Metric("critic/explained_variance", "1", "1 less the variance of the targets about the values over the variance "
           "of the targets, before the step's first update: 1 for perfect values, 0 for a constant, below 0 for worse; "
           "missing where the targets are all equal.", when=_CRITIC),
    Metric("critic/value_mean", "reward", "The mean value of the tokens that train, before the step's first update.",
           when=_CRITIC),
    Metric("critic/clip_fraction", "fraction", "The fraction of tokens whose value loses its gradient to "
           "`critic.clip_range`.", "", "mean", "with `critic.clip_range`"),
    Metric("critic/grad_norm", "1", "The norm of the critic's gradient before it is clipped.", "", "mean", _CRITIC),
    Metric("critic/skipped", "updates", "The number of updates of the critic that were not made, because its loss or "
           "gradient was not finite.", "", "sum", _CRITIC),
    Metric("optim/lr", "1", "The learning rate of the step.", "Section 4.1", "mean"),
    Metric("optim/grad_norm", "1", "The norm of the gradient before it is clipped.", "", "mean"),
    Metric("optim/skipped", "updates", "The number of updates that were not made, because the loss or the gradient was "
           "not finite or `loss/approx_kl` above `loss.max_approx_kl`.", "", "sum"),
    Metric("optim/update_tokens", "tokens", "The number of trained tokens that were computed: those of responses with "
           "advantage 0 are not, unless KL, entropy or `loss.function` need them.", "", "sum"),
    Metric("optim/shared_token_fraction", "fraction", "The fraction of the update's tokens that were not computed "
           "because another sequence of their microbatch begins with the same tokens; of a group's prompt, which is "
           "computed once in any case, each token counts once.", "", "mean", "in steps with a token to compute"),
    *(Metric(f"time/{name}_s", "s", f"The seconds spent {'on ' * (name in ('update', 'evaluate'))}{phase.meaning}.",
             when=phase.when) for name, phase in PHASES.items() if phase.is_logged),
    Metric("time/verifier_call_s", "s", "The mean seconds of one call of a verifier, which judges a response, or a "
           "whole group where it takes one.", when="in steps with a call of a verifier process"),
    Metric("time/step_s", "s", "The seconds of the whole step."),
    Metric("time/tokens_per_s", "tokens/s", "Generated tokens per second of the whole step."),
    Metric("time/warnings", "findings", "The number of findings of `dapo doctor` that hold, without notes; a slow "
           "verifier, which is one of them, depends on the machine."),
    Metric("time/peak_memory_gib", "GiB", "The largest resident memory of this process so far."),
    Metric("time/peak_gpu_memory_gib", "GiB", "The largest memory of tensors on the GPU of a process that trains, "
           "since the last update of the step before; the largest of all trainer ranks.", "", "max", "with a GPU"),
    Metric("eval/{data}/accuracy", "fraction", "The mean over problems of the fraction of correct responses, or of the "
           "score where the verifier does not decide; also for each source, where the data set has several.", "avg@32"),
    Metric("eval/{data}/low", "fraction", "The lower end of the 95 % interval of the accuracy; missing for "
           "scores that do not vary."),
    Metric("eval/{data}/high", "fraction", "The upper end of the 95 % interval of the accuracy; missing for "
           "scores that do not vary."),
    Metric("eval/{data}/avg@{k}", "fraction", "The accuracy, under a name that holds the number k of samples per "
           "problem.", "avg@32"),
    Metric("eval/{data}/response_tokens_mean", "tokens", "The mean length of a response in the evaluation."),
    Metric("eval/{data}/truncated_fraction", "fraction", "The fraction of the evaluation's responses that reached the "
           "length limit."),
)
# fmt: on


@cache
def metric_of(name: str) -> Metric:
    """The row of the table that describes a logged name. Raises KeyError for a name that no row describes."""
    for metric in METRICS:
        outcomes = metric.name.replace("{outcome}", f"({'|'.join(OUTCOMES)})")
        if re.fullmatch(re.sub(r"\{\w+\}", "(.+)", outcomes), name):
            return metric
    raise KeyError(f"{name} is not in the table of metrics (dapo.runs.metric_table)")


def metrics_page() -> str:
    """docs/metrics.md."""
    lines = [
        "<!-- Made from src/dapo/runs/metric_table.py by `make docs`: change the table, not this page. -->",
        "# Metrics",
        "",
        "The metrics of `metrics.jsonl`, one line per step. *Updates* is the way in which the values of a step's "
        "optimizer updates are combined; without an entry the metric describes the whole step. *When* is the "
        "condition under which a metric is logged; a step without trained tokens has no means over tokens.",
    ]
    for section, text in SECTIONS.items():
        lines += ["", f"## {section}/", "", text, "", "| metric | unit | meaning | paper | updates | when |"]
        lines += ["|---|---|---|---|---|---|"]
        lines += [
            f"| `{m.name}` | {m.unit} | {m.meaning} | {m.paper} | {m.over_updates} | {m.when} |"
            for m in METRICS
            if m.name.startswith(f"{section}/")
        ]
        if section == "rollout":
            lines += ["", "The outcome of a group is one of:", ""]
            lines += [f"- `{outcome}`: {meaning}." for outcome, meaning in OUTCOME_MEANINGS.items()]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    print_text(metrics_page(), end="")
