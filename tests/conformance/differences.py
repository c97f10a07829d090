"""What a case of the set would give in other systems: `python tests/conformance/differences.py`
prints the table.

Each row takes a committed case and computes it once more as the code that it names does, in plain
Python; nobody's code is run. docs/lab/conformance.md holds the table, and a test compares the two.
"""

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import naive

HERE = Path(__file__).parent
VERL = "verl/trainer/ppo/core_algos.py"
TRL = "trl/trainer/grpo_trainer.py"
OPENRLHF = "openrlhf/trainer/ppo_utils/experience_maker.py"
AREAL = "areal/utils/functional/functional.py"
AREAL_DATA = "areal/utils/data.py"
SKYRL = "skyrl/backends/skyrl_train/utils/ppo_utils.py"
SLIME = "slime/backends/megatron_utils/loss.py"
SLIME_LOSSES = "slime/utils/ppo_utils.py"
PRIME_RL = "src/prime_rl/trainer/rl/loss.py"


class Row(NamedTuple):
    """One line of the table."""

    what: str
    case: str
    here: float
    there: float
    who: str
    code: str


def case(family: str, name: str) -> dict[str, Any]:
    cases = json.loads((HERE / f"{family}.json").read_text(encoding="ascii"))["cases"]
    return next(found for found in cases if found["name"] == name)


def aggregation() -> list[Row]:
    made = case("minibatch", "token, every token")
    inputs = made["inputs"]
    weight = 1 / sum(len(row) for row in made["inputs"]["mask"])
    first = inputs["cuts"][1][0]
    lengths = [len(row) for row in inputs["mask"]]
    # the mean over 2 microbatches of each one's token mean
    of_part = 1 / sum(lengths[i] for i in first) / 2
    window = 1 / (sum(lengths) / 2)  # two updates of one generation batch: its tokens, halved
    own = 1 / sum(lengths[i] for i in first)
    label = "minibatch: token, every token"
    masked = case("aggregation_weights", "sequence: one without a trained token")
    counted = 1 / (len(masked["inputs"]["lengths"]) * masked["inputs"]["lengths"][0])
    return [
        Row(
            "weight of a token of the first of two microbatches (4 and 14 tokens)",
            label,
            weight,
            of_part,
            "verl 0.4.1, 0.5.0 and 0.6.1 `token-mean`, TRL 1.16.0 with `loss_type=bnpo`: the mean"
            " over microbatches of each one's token mean; verl 0.9.1, OpenRLHF, AReaL: as here",
            f"`agg_loss` in `{VERL}` and `update_policy` in `verl/workers/actor/dp_actor.py`;"
            f" `_compute_loss` in `{TRL}`",
        ),
        Row(
            "weight of a token where the two parts are two updates of one generation batch",
            label,
            own,
            window,
            "TRL 1.16.0, `loss_type=dapo`: the generation batch's tokens over the number of its"
            " updates",
            f"`num_items_in_batch` in `{TRL}`",
        ),
        Row(
            "weight of a token of the first response, lengths 1, 3, 9 and 5, by default options",
            label,
            weight,
            1 / (len(lengths) * lengths[0]),
            "slime: the mean over responses of each one's token mean, unless"
            " `--calculate-per-token-loss`",
            "`get_sum_of_sample_mean` in `slime/backends/megatron_utils/cp_utils.py`",
        ),
        Row(
            "weight of a token beside a response without a trained one",
            "aggregation_weights: sequence: one without a trained token",
            masked["expected"]["weights"][0],
            counted,
            "TRL 1.16.0 `loss_type=grpo`, verl 0.9.1 `seq-mean-token-mean`: it counts in N;"
            " OpenRLHF 0.11.2: as here",
            f"`_compute_loss` in `{TRL}`; `global_batch_size` in `verl/trainer/ppo/ray_trainer.py`",
        ),
    ]


def advantages() -> list[Row]:
    one = case("group_advantages", "one right of 16")
    rewards = one["inputs"]["rewards"]
    centre = naive.mean(rewards)
    population = math.sqrt(math.fsum(naive.squared(r - centre) for r in rewards) / len(rewards))
    near = case("group_advantages", "a spread of 1e-4")
    low, high = near["inputs"]["rewards"]
    std = naive.sample_std([low, high])
    top = near["expected"]["advantages"][1]
    label = "group_advantages: a spread of 1e-4"
    rows = [
        Row(
            "A of the right one, std with the divisor G",
            "group_advantages: one right of 16",
            one["expected"]["advantages"][0],
            (1 - centre) / (population + 1e-5),
            "AReaL 1.0.4 with `std_unbiased=false`, its default before 0.3.4; TRL, verl, OpenRLHF:"
            " G - 1, as here",
            f"`Normalization` in `{AREAL_DATA}`, `NormConfig` in `areal/api/cli_args.py`",
        ),
        Row(
            "A of the right one, by default options",
            "group_advantages: one right of 16",
            one["expected"]["advantages"][0],
            1 - centre,
            "prime-rl: the mean is subtracted and nothing divided, as with `advantage.scale=none`"
            " here",
            "`src/prime_rl/orchestrator/algo/advantage.py`",
        ),
    ]
    for eps, who, code in (
        (1e-4, "TRL 1.16.0: 1e-4 beside the std", f"`_generate_and_score_completions` in `{TRL}`"),
        (
            1e-5,
            "AReaL 1.0.4: 1e-5, with `reward_norm` of groups",
            f"`Normalization` in `{AREAL_DATA}`",
        ),
        (
            1e-9,
            "OpenRLHF 0.11.2, `group_norm`: 1e-9 (verl 0.9.1: 1e-6, as here)",
            f"`compute_advantages_and_returns` in `{OPENRLHF}`",
        ),
    ):
        rows.append(
            Row(
                "A of the higher of two rewards 1e-4 apart",
                label,
                top,
                (high - low) / 2 / (std + eps),
                who,
                code,
            )
        )
    single = case("group_advantages", "a group of one")["inputs"]["rewards"][0]
    rows += [
        Row(
            "A of a group of one",
            "group_advantages: a group of one",
            math.nan,
            single / (1 + 1e-6),
            "verl 0.9.1 and SkyRL, `grpo`: mean 0 and std 1, so the reward itself; TRL, OpenRLHF:"
            " refused, as here",
            f"`compute_grpo_outcome_advantage` in `{VERL}` and in `{SKYRL}`; "
            "`num_generations` in `trl/trainer/grpo_config.py`; `openrlhf/cli/train_ppo_ray.py`",
        ),
    ]
    return [*rows, *filters(), *whitening()]


def filters() -> list[Row]:
    scores = case("informative_groups", "graded, equal")["inputs"]["scores"]
    centre = sum(scores) / len(scores)
    std = math.sqrt(sum(naive.squared(score - centre) for score in scores) / len(scores))
    return [
        Row(
            "spread of six times 0.1, which is dropped where it is 0",
            "informative_groups: graded, equal",
            max(scores) - min(scores),
            std,
            "verl 0.9.1: dropped if the float std is 0, so this group is kept",
            "`np.std` in `verl/trainer/ppo/v1/replay_buffer.py`",
        )
    ]


def whitening_of_differences(lengths: list[int]) -> Row:
    made = case("other_advantages", "reinforce_pp_baseline: a batch of two groups")
    rewards = made["inputs"]["rewards"]
    ids = made["inputs"]["group_ids"]
    above = [
        reward - naive.mean([r for r, group in zip(rewards, ids, strict=True) if group == own])
        for reward, own in zip(rewards, ids, strict=True)
    ]
    tokens = [value for value, length in zip(above, lengths, strict=True) for _ in range(length)]
    centre = naive.mean(tokens)
    variance = math.fsum(naive.squared(token - centre) for token in tokens) / (len(tokens) - 1)
    return Row(
        "whitened A of the first response, lengths 1, 3, 9, 5, 2, 4, 6, 8",
        "other_advantages: reinforce_pp_baseline: a batch of two groups",
        made["expected"]["advantages"][0],
        (above[0] - centre) / math.sqrt(variance + 1e-8),
        "verl 0.9.1, `reinforce_plus_plus_baseline`: over tokens, divisor n - 1",
        "`compute_reinforce_plus_plus_baseline_outcome_advantage` in"
        " `verl/trainer/ppo/core_algos.py`",
    )


def whitening() -> list[Row]:
    made = case("other_advantages", "reinforce_pp: a batch of two groups")
    rewards = made["inputs"]["rewards"]
    lengths = [1, 3, 9, 5, 2, 4, 6, 8]
    tokens = [
        reward for reward, length in zip(rewards, lengths, strict=True) for _ in range(length)
    ]
    centre = naive.mean(tokens)
    count = len(tokens)
    squares = math.fsum(naive.squared(token - centre) for token in tokens)
    label = "other_advantages: reinforce_pp: a batch of two groups"
    here = made["expected"]["advantages"][0]
    what = "whitened A of the first response, lengths 1, 3, 9, 5, 2, 4, 6, 8"
    return [
        Row(
            what,
            label,
            here,
            (rewards[0] - centre) / math.sqrt(squares / (count - 1) + 1e-8),
            "verl 0.9.1, `reinforce_plus_plus`: over tokens, divisor n - 1",
            "`masked_whiten` in `verl/utils/torch_functional.py`",
        ),
        Row(
            what,
            label,
            here,
            (rewards[0] - centre) / math.sqrt(squares / count),
            "OpenRLHF 0.11.2, `reinforce`: over tokens, divisor n",
            f"`compute_advantages_and_returns` in `{OPENRLHF}`",
        ),
        whitening_of_differences(lengths),
    ]


def penalties() -> list[Row]:
    made = case("overlong_penalty", "the paper's sizes")
    size = made["parameters"]
    length = made["inputs"]["lengths"][-1]
    unclamped = min(
        -(length - (size["max_length"] - size["buffer"])) / size["buffer"] * size["factor"], 0
    )
    label = "overlong_penalty: the paper's sizes"
    what = f"penalty of {length} tokens, which a limit above L_max allows"
    here = made["expected"]["penalties"][-1]
    return [
        Row(
            what,
            label,
            here,
            unclamped,
            "verl 0.9.1, AReaL 1.0.4: no lower bound; TRL, OpenRLHF: bounded, as here",
            "`overlong_reward` in `verl/workers/reward_manager/dapo.py` and in"
            " `verl/experimental/reward_loop/reward_manager/dapo.py`; `reward_overlong_penalty` in"
            f" `{AREAL}`",
        )
    ]


def losses() -> list[Row]:
    far = case("policy_loss", "a log-ratio of 100, A < 0")
    moved = far["inputs"]["logprobs"][0][0] - far["inputs"]["old_logprobs"][0][0]
    dual = case("policy_loss", "dual clip of 10")
    strongest = naive.exp(dual["inputs"]["logprobs"][1][1] - dual["inputs"]["old_logprobs"][1][1])
    on_policy = case("policy_loss", "on policy")
    weight = on_policy["inputs"]["weights"][0]
    advantage = on_policy["inputs"]["advantages"][0]
    engine_ratio = naive.exp(0.3)
    _, slope = naive.clip_surrogate(math.log(engine_ratio), advantage, 0.2, 0.28)
    return [
        Row(
            "loss of a token with A = -1 whose log-ratio is 100",
            "policy_loss: a log-ratio of 100, A < 0",
            far["expected"]["loss"],
            -far["inputs"]["advantages"][0] * naive.exp(moved),
            "TRL 1.16.0, AReaL 1.0.4: the log-ratio is not clamped (in float32: inf); verl,"
            " OpenRLHF clamp it at 20, as here",
            f"`_compute_loss` in `{TRL}`, `ppo_actor_loss_fn` in `{AREAL}`",
        ),
        Row(
            "loss of a token with A = -1 and r = 12.2, before its weight",
            "policy_loss: dual clip of 10",
            strongest,
            3.0,
            "verl 0.9.1: `clip_ratio_c` is 3 unless set otherwise; by default there is none here,"
            " in TRL, OpenRLHF, AReaL",
            f"`compute_policy_loss_vanilla` in `{VERL}`",
        ),
        Row(
            "gradient of a token on policy that the engine found 0.3 nats less likely",
            "policy_loss: on policy",
            on_policy["expected"]["gradient"][0][0],
            -weight * slope,
            "AReaL 1.0.4: the ratio is to the engine's probability unless `recompute_logprob` or"
            " `use_decoupled_loss`, so it is clipped; verl, TRL, OpenRLHF: the trainer's own, as"
            " here",
            "`_compute_advantages` in `areal/trainer/ppo/actor.py`, `PPOActorConfig` in"
            " `areal/api/cli_args.py`",
        ),
        *surrogates(),
    ]


def surrogates() -> list[Row]:
    made = case("surrogates", "cispo: far off policy")
    inputs = made["inputs"]
    weight = made["inputs"]["weights"][0]
    low = naive.exp(inputs["logprobs"][1][0] - inputs["old_logprobs"][1][0])
    here_low = made["expected"]["gradient"][1][0]
    here_high = made["expected"]["gradient"][0][0]
    label = "surrogates: cispo: far off policy"
    sapo = case("surrogates", "sapo: ragged")
    tokens = [len(row) for row in sapo["inputs"]["mask"]]
    return [
        Row(
            "CISPO: gradient of a token with r = 0.61, A = 1",
            label,
            here_low,
            -weight * max(low, 1 - 0.2) * inputs["advantages"][1],
            "verl 0.9.1: the weight has a lower bound too, 1 - `clip_ratio_low`, 0.8 by default;"
            " TRL: none, as here",
            f"`compute_policy_loss_cispo` in `{VERL}`",
        ),
        Row(
            "CISPO: gradient of a token with r = 1.8 where the option is 0.28",
            label,
            here_high,
            -weight * 0.28 * inputs["advantages"][0],
            "TRL 1.16.0: `epsilon_high` is the bound itself, not 1 + it (5 there is 4 here)",
            f"`_compute_loss` in `{TRL}`",
        ),
        Row(
            f"SAPO: weight of a token of the first response, lengths {', '.join(map(str, tokens))},"
            " asked for a token mean",
            "surrogates: sapo: ragged",
            sapo["inputs"]["weights"][0],
            1 / (len(tokens) * tokens[0]),
            "verl 0.9.1: always `seq-mean-token-mean`, whatever `loss_agg_mode` says",
            f"`compute_policy_loss_sapo` in `{VERL}`",
        ),
    ]


def divergences() -> list[Row]:
    made = case("kl", "k3: far from it")
    d = made["inputs"]["logprobs"][0][1] - made["inputs"]["reference_logprobs"][0][1]
    weight = made["inputs"]["weights"][0]
    label = "kl: k3: far from it"
    return [
        Row(
            "k3 of a token with d = -3",
            label,
            made["expected"]["estimates"][0][1],
            min(naive.kl_estimate(d, "k3")[0], 10.0),
            "verl 0.9.1, OpenRLHF 0.11.2, AReaL 1.0.4: at most 10; TRL: no bound",
            f"`kl_penalty_forward` in `{VERL}`, `compute_approx_kl` in `openrlhf/models/utils.py`,"
            f" `KLEstimator` in `{AREAL_DATA}`",
        ),
        Row(
            "gradient of k3 in the loss at d = -3, on policy",
            label,
            made["expected"]["gradient"][0][1],
            weight * d,
            "TRL 1.16.0: k3 times the ratio (`use_bias_correction_kl`, on by default), whose"
            " gradient is d",
            f"`_compute_loss` in `{TRL}`",
        ),
        Row(
            "the penalty of that token with default options",
            label,
            made["expected"]["estimates"][0][1],
            d,
            "OpenRLHF 0.11.2 (coefficient 0.01), AReaL 1.0.4 (0.1): k1, in the reward; verl: k3 in"
            " the loss, if it is turned on",
            "`openrlhf/cli/train_ppo_ray.py`, `PPOActorConfig` in `areal/api/cli_args.py`, "
            "`verl/trainer/config/actor/actor.yaml`",
        ),
    ]


def corrections() -> list[Row]:
    """The token that the correction masks: the second of the first response, of four tokens."""
    masked = case("corrected_loss", "gspo: token, mask")
    inputs = masked["inputs"]
    factors = [
        1 / naive.exp(e - o)
        for o, e in zip(inputs["old_logprobs"][0], inputs["engine_logprobs"][0], strict=True)
    ]
    kept = [u if 1 / 1.5 <= u <= 1.5 else 0.0 for u in factors]
    gradient = masked["expected"]["gradient"][0]
    pull = case("corrected_loss", "clip: token, mask, k3")
    difference = pull["inputs"]["logprobs"][0][1] - pull["inputs"]["reference_logprobs"][0][1]
    return [
        Row(
            "GSPO: gradient of a token that masked importance sampling masks",
            "corrected_loss: gspo: token, mask",
            gradient[1],
            gradient[0] / kept[0] * naive.mean(kept),
            "TRL 1.16.0: the ratio of the response has the gradient of all its tokens, so this one"
            " has the mean of their weights; verl 0.9.1: 0, as here",
            "`_compute_loss` in `trl/trainer/grpo_trainer.py`; `compute_policy_loss_gspo` in "
            "`verl/trainer/ppo/core_algos.py`",
        ),
        Row(
            "the same with k3 in the loss: the KL term's gradient of that token, at a coefficient"
            " of 0.5",
            "corrected_loss: clip: token, mask, k3",
            pull["expected"]["gradient"][0][1],
            0.5 * pull["inputs"]["weights"][0] * (1 - naive.exp(-difference)),
            "TRL 1.16.0, verl 0.9.1, SkyRL, slime: the KL term has no correction, the surrogate"
            " has it",
            "`_compute_loss` in `trl/trainer/grpo_trainer.py`; `ppo_loss` in"
            f" `verl/workers/utils/losses.py`; `apply_off_policy_correction` in `{SKYRL}`;"
            f" `policy_loss_function` in `{SLIME}`",
        ),
    ]


def importance() -> list[Row]:
    made = case("importance_weights", "truncate, sequence, 5")
    inputs = made["inputs"]
    pairs = zip(inputs["old_logprobs"][0], inputs["engine_logprobs"][0], strict=True)
    logs = [old - engine for old, engine in pairs]
    return [
        Row(
            "weight of a response of three tokens",
            "importance_weights: truncate, sequence, 5",
            made["expected"]["weights"][0][0],
            naive.exp(naive.mean(logs)),
            "AReaL 1.0.4, level `sequence`: the geometric mean of its tokens' ratios; TRL 1.16.0:"
            " the product, as here",
            f"`apply_rejection_sampling` in `{AREAL}`; `vllm_importance_sampling_mode` in `{TRL}`",
        )
    ]


def newer_losses() -> list[Row]:
    """SkyRL, slime and prime-rl, from their repositories, and TRL's mask with a cap alone."""
    lengths = [len(row) for row in case("minibatch", "token, every token")["inputs"]["mask"]]
    small = case("importance_weights", "mask, token, 2")
    ratio = naive.exp(
        small["inputs"]["old_logprobs"][1][0] - small["inputs"]["engine_logprobs"][1][0]
    )
    far = case("kl", "k3: far from it")
    difference = far["inputs"]["logprobs"][0][1] - far["inputs"]["reference_logprobs"][0][1]
    of_k3 = naive.exp(-difference) - 1 + difference
    clips = case("policy_loss", "the table of clips")
    rises, falls = (
        [
            (new, old)
            for new, old in zip(
                clips["inputs"]["logprobs"][i], clips["inputs"]["old_logprobs"][i], strict=True
            )
        ]
        for i in range(2)
    )
    weight = clips["inputs"]["weights"][0]

    def of_prime_rl(new: float, old: float, advantage: float) -> float:
        """The gradient where the old policy is the one that sampled; a change of the probability
        above .2 is masked.
        """
        moved = naive.exp(new) - naive.exp(old)
        is_masked = moved > 0.2 if advantage > 0 else moved < -0.2
        gradient = 0.0 if is_masked else -advantage * naive.exp(new - old)
        return weight * (gradient + 2 * 1e-3 * (new - old))

    falling = case("surrogates", "gspo: far off policy")
    new = falling["inputs"]["logprobs"][2]
    old = falling["inputs"]["old_logprobs"][2]
    falls_by = naive.mean([before - now for now, before in zip(new, old, strict=True)])
    gradient = falling["expected"]["gradient"][2][0]
    return [
        Row(
            "PPO: weight of a token of the first response in the critic's loss, lengths 1, 3, 9"
            " and 5",
            "minibatch: token, every token",
            1 / sum(lengths),
            1 / (len(lengths) * lengths[0]),
            "SkyRL: the mean over responses of each one's token mean",
            f"`ppo_critic_loss` in `{SKYRL}`",
        ),
        Row(
            "weight of a token with pi_old / pi_engine = 0.1353, masked beyond a cap of 2",
            "importance_weights: mask, token, 2",
            small["expected"]["weights"][1][0],
            ratio,
            "TRL 1.16.0, `token_mask`: only above the cap, unless"
            " `vllm_importance_sampling_clip_min` is set; slime, `icepop_function`: only above"
            " `--tis-clip`, as `--tis-clip-low` is 0; each with 0.5 as the lower bound: as here",
            f"`_compute_loss` in `{TRL}`; `icepop_function` in `{SLIME}`",
        ),
        Row(
            "k3 of a token with d = -3",
            "kl: k3: far from it",
            far["expected"]["estimates"][0][1],
            min(10.0, of_k3),
            "SkyRL, slime with `--kl-loss-type low_var_kl`: at most 10, without a gradient beyond;"
            " slime with `k3`: as here",
            f"`compute_approx_kl` in `{SKYRL}` and in `{SLIME_LOSSES}`",
        ),
        Row(
            "gradient of k3 in the loss at d = -3, on policy",
            "kl: k3: far from it",
            far["expected"]["gradient"][0][1],
            far["inputs"]["weights"][0] * (of_k3 + 1 - naive.exp(-difference)),
            "slime with `--use-unbiased-kl` (off by default): k3 times the ratio to pi_old; without"
            " it: as here",
            f"`policy_loss_function` in `{SLIME}`",
        ),
        Row(
            "GSPO: gradient of a token, A = -1, whose response's tokens became 0.928 times as"
            " probable",
            "surrogates: gspo: far off policy",
            gradient,
            0.0 if falls_by > 1e-4 else gradient,
            "slime with `--use-opsm` (off by default): a response with A < 0 is masked where the"
            " mean of log pi_old - log pi exceeds `--opsm-delta`, 1e-4; without it, and SkyRL:"
            " GSPO's gradient, as here where the weights of a response are equal",
            f"`compute_opsm_mask` in `{SLIME_LOSSES}`; `gspo_policy_loss` in `{SKYRL}`",
        ),
        Row(
            "gradient of a token with r = 1.297, A = 1 and a probability that rises by 0.0054",
            "policy_loss: the table of clips",
            clips["expected"]["gradient"][0][1],
            of_prime_rl(*rises[1], 1.0),
            "prime-rl: masked by the change of the probability, above 0.2, and not by the ratio,"
            " which is to the engine's probability; plus 1e-3 times the gradient of the squared"
            " log-ratio. No option here is that loss; `loss.function` can be. SkyRL `dppo`: the"
            " same mask, without the second term",
            f"`default_loss_fn` in `{PRIME_RL}`; `dppo_policy_loss` in `{SKYRL}`",
        ),
        Row(
            "the same with r = 0.698, A = -1",
            "policy_loss: the table of clips",
            clips["expected"]["gradient"][1][0],
            of_prime_rl(*falls[0], -1.0),
            "prime-rl, as above",
            f"`default_loss_fn` in `{PRIME_RL}`",
        ),
    ]


def evaluation() -> list[Row]:
    made = case("pass_at_k", "one right of 32, k = 32")
    n = made["inputs"]["samples"]
    k = made["parameters"]["k"]
    none = 1.0
    for _ in range(k):
        none *= (n - made["inputs"]["correct"]) / n
    return [
        Row(
            "one right of 32: at least one of 32",
            "pass_at_k: one right of 32, k = 32",
            made["expected"]["pass_at_k"],
            1 - none,
            "verl 0.9.1, `best@N`: drawn with replacement (the mean of 1000 such draws)",
            "`bootstrap_metric` in `verl/trainer/ppo/metric_utils.py`",
        )
    ]


def rows() -> list[Row]:
    families = (
        aggregation,
        advantages,
        penalties,
        losses,
        divergences,
        corrections,
        importance,
        newer_losses,
        evaluation,
    )
    return [row for make in families for row in make()]


def number(value: float) -> str:
    return "refused" if math.isnan(value) else f"{value + 0.0:.4g}"


def table(found: Sequence[Row]) -> str:
    lines = [
        "| case | number | here | there | where, and who does as here | their code |",
        "|---|---|---|---|---|---|",
    ]
    for row in found:
        cells = (f"`{row.case}`", row.what, number(row.here), number(row.there), row.who, row.code)
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


if __name__ == "__main__":
    print(table(rows()))
