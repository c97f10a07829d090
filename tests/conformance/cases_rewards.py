"""Families of the conformance set without a policy: advantages, penalties, weights, evaluation."""

from typing import Any

import naive
from cases import DAPO, MODES, REFUSED, WEIGHT_SOURCES, Family, case, family, without_masked

# --- advantages -------------------------------------------------------------------------------------------------------

REWARDS: list[tuple[str, str, list[float | None], str]] = [
    (
        "one right of 16",
        "std has the divisor G - 1: 3.75 and -0.25; with G: 3.873 and -0.258",
        [1] + [-1] * 15,
        "std",
    ),
    ("half right of 16", "+-0.9682; with the divisor G: +-1", [1, -1] * 8, "std"),
    ("two responses", "the smallest group: +-0.7071; with the divisor G: +-1", [1, -1], "std"),
    (
        "sixteen times -1.3",
        "the float mean of equal numbers differs from them: exact zeros all the same",
        [-1.3] * 16,
        "std",
    ),
    (
        "six times 0.1",
        "their float standard deviation is 1e-17, not 0: exact zeros all the same",
        [0.1] * 6,
        "std",
    ),
    ("no spread, no division", "exact zeros without the division too", [0.7] * 5, "none"),
    (
        "shaped rewards",
        "right and wrong with the penalty on length of Eq. 13",
        [1, 0.5, -1, -1.25, -2, 0.9375],
        "std",
    ),
    (
        "a spread of 1e-4",
        "1e-6 beside the standard deviation shows: with 1e-4 there, half the advantage",
        [0.5, 0.5001],
        "std",
    ),
    (
        "far from zero",
        "the mean is subtracted before squares are taken",
        [1000000.0, 1000000.5, 999999.25],
        "std",
    ),
    ("Dr. GRPO", "the mean is subtracted, nothing is divided", [1, -1, -1, 0.5, -1, -1], "none"),
    (
        "a group of one",
        "nothing to compare with: refused, never 0 / 0, never the reward itself",
        [1],
        "std",
    ),
    (
        "an error among the rewards",
        "null stands for NaN: refused, never spread over the group",
        [1, None, -1],
        "std",
    ),
]


def group_advantages() -> Family:
    cases = []
    for name, why, rewards, scale in REWARDS:
        good = len(rewards) > 1 and None not in rewards
        expected = {"advantages": naive.group_advantages(rewards, scale)} if good else REFUSED  # type: ignore[arg-type]
        source = f"{DAPO}, Eq. 9" if scale == "std" else "Dr. GRPO, arXiv 2503.20783"
        cases.append(case(name, why, source, {"rewards": rewards}, {"scale": scale}, expected))
    return family(
        "The advantage of each response of one group: (R - mean) / (std + 1e-6), std with the"
        " divisor G - 1.",
        {"rewards": "[G] shaped rewards of the responses to one prompt"},
        {"scale": "std: divide by the standard deviation; none: only subtract the mean"},
        {"advantages": "[G]; exact zeros where all rewards are equal"},
        cases=cases,
    )


def other_advantages() -> Family:
    rloo = "RLOO, arXiv 2402.14740"
    whitened = "REINFORCE++, arXiv 2501.03262"
    two_groups = [1, -1, -1, -1, 1, 1, 1, 0.5]
    ids = [0, 0, 0, 0, 1, 1, 1, 1]
    baseline = f"{whitened}, w/ baseline"
    rows: list[tuple[str, str, str, str, list[float], list[int] | None]] = [
        (
            "one right of four",
            "1 - (-1) = 2 and -1 - (-1 / 3) = -2 / 3",
            "rloo",
            rloo,
            [1, -1, -1, -1],
            None,
        ),
        ("graded", "each is compared with the others only", "rloo", rloo, [0.25, 0.75, 0.5], None),
        ("equal rewards", "exact zeros", "rloo", rloo, [-1.3] * 16, None),
        (
            "a batch of two groups",
            "one mean and one std of all",
            "reinforce_pp",
            whitened,
            two_groups,
            ids,
        ),
        ("equal rewards", "exact zeros", "reinforce_pp", whitened, [0.1] * 6, [0, 0, 0, 1, 1, 1]),
        (
            "a batch of two groups",
            "a mean for each, one std",
            "reinforce_pp_baseline",
            baseline,
            two_groups,
            ids,
        ),
        (
            "equal rewards in one group",
            "exact zeros there, which count in the std",
            "reinforce_pp_baseline",
            baseline,
            [0.1, 0.1, 0.1, 1, 0, 0],
            [7, 7, 7, 3, 3, 3],
        ),
        (
            "equal rewards",
            "exact zeros",
            "reinforce_pp_baseline",
            baseline,
            [0.1, 0.1, -1.3, -1.3],
            [0, 0, 1, 1],
        ),
    ]
    naive_of: dict[str, Any] = {
        "rloo": lambda rewards, ids: naive.rloo_advantages(rewards),
        "reinforce_pp": lambda rewards, ids: naive.group_advantages(rewards, "std"),
        "reinforce_pp_baseline": naive.reinforce_pp_baseline_advantages,
    }
    return family(
        "Other estimators. rloo: the reward minus the mean of the others of the group, G (R - mean)"
        " / (G - 1). reinforce_pp: the rewards of all responses of a batch, (R - mean) / (std +"
        " 1e-6), divisor N - 1; each response counts once, whatever its length."
        " reinforce_pp_baseline: the same of D = R - mean of the group.",
        {
            "rewards": "[G] of one group (rloo), else [N] of the batch",
            "group_ids": "[N], not for rloo",
        },
        {"estimator": "rloo, reinforce_pp or reinforce_pp_baseline"},
        {"advantages": "as many as rewards"},
        cases=[
            case(
                f"{e}: {name}",
                why,
                source,
                {"rewards": rewards} | ({} if ids is None else {"group_ids": ids}),
                {"estimator": e},
                {"advantages": naive_of[e](rewards, ids)},
            )
            for name, why, e, source, rewards, ids in rows
        ],
    )


def informative_groups() -> Family:
    yes = [True, 1.0]
    no = [False, -1.0]
    rows: list[tuple[str, str, list[list[Any]]]] = [
        ("mixed", "the winner and the losers stay", [yes, no, no, no]),
        ("all right", "no signal", [yes] * 4),
        ("all wrong", "no signal, though lengths and so shaped rewards differ", [no] * 4),
        ("one right, one error", "an error is no answer: one verdict is left", [yes, [None, None]]),
        ("an error beside a mixed group", "an error does not count", [yes, no, [None, None]]),
        (
            "graded, equal",
            "six times 0.1 is no spread, though its float std is 1e-17",
            [[None, 0.1]] * 6,
        ),
        ("graded, different", "largest above smallest", [[None, 0.1]] * 5 + [[None, 0.1000001]]),
        ("a group of one", "nothing to compare with", [yes]),
    ]
    cases = []
    for name, why, verdicts in rows:
        inputs = {"correct": [v[0] for v in verdicts], "scores": [v[1] for v in verdicts]}
        expected = {"informative": naive.is_informative(**inputs)}
        cases.append(case(name, why, f"{DAPO}, Eq. 11", inputs, {}, expected))
    return family(
        "Which groups train: 0 < number of right responses < number judged; graded ones, where"
        " their scores differ. Verdicts decide, never the shaped rewards.",
        {
            "correct": "[G] true, false, or null where the verifier gives a score only",
            "scores": "[G] the verdicts' scores; null for an error (no verdict)",
        },
        {},
        {"informative": "true or false"},
        cases=cases,
    )


def generalized_advantages() -> Family:
    values = [[0.5, 0.5, 0.75], [0.25], [-0.125, 0.375, 0.5, -0.25, 1.0]]
    at_end = [[0.0, 0.0, 1.0], [-1.0], [0.0, 0.0, 0.0, 0.0, 1.0]]
    with_kl = [[-0.01, 0.02, 0.98], [-1.005], [0.003, -0.04, 0.0, 0.01, 1.25]]
    rows = [
        (
            "undiscounted",
            "gamma = lambda = 1: the rewards to come less the value",
            at_end,
            1.0,
            1.0,
        ),
        ("one step", "lambda = 0: the error of the next value alone", at_end, 1.0, 0.0),
        ("PPO's usual lambda", "a penalty at each token", with_kl, 1.0, 0.95),
        ("discounted", "gamma and lambda below 1", with_kl, 0.99, 0.9),
    ]
    cases = []
    for name, why, rewards, gamma, gae_lambda in rows:
        advantages, targets = naive.generalized_advantages(rewards, values, gamma, gae_lambda)
        inputs = {"rewards": rewards, "values": values}
        parameters = {"gamma": gamma, "gae_lambda": gae_lambda}
        expected = {"advantages": advantages, "targets": targets}
        cases.append(case(name, why, "GAE, arXiv 1506.02438, Eq. 16", inputs, parameters, expected))
    return family(
        "A_t = delta_t + gamma lambda A_{t+1} with delta_t = r_t + gamma V_{t+1} - V_t; the value"
        " behind the last token is 0, whether that is an end token or the length limit. The targets"
        " are A_t + V_t. Nothing is whitened.",
        {
            "rewards": "[i][t] the reward of each token",
            "values": "[i][t] the value before each token",
        },
        {"gamma": "discount per token", "gae_lambda": "lambda"},
        {"advantages": "[i][t]", "targets": "[i][t] what the value function is trained towards"},
        cases=cases,
    )


def token_whitening() -> Family:
    advantages = [[0.5, -0.25, 1.0], [2.0], [-1.5, 0.75, 0.125]]
    rows = [
        (
            "every token",
            "one mean and one std of all tokens",
            advantages,
            [[True] * 3, [True], [True] * 3],
        ),
        (
            "masked tokens",
            "they neither count nor get anything but 0",
            advantages,
            [[True, False, True], [True], [False] * 3],
        ),
        ("equal ones", "exact zeros", [[-1.3] * 3, [-1.3] * 2], [[True] * 3, [True] * 2]),
        (
            "a small spread",
            "1e-8 stands beside the variance, under the root",
            [[1.0, 1.0001]],
            [[True] * 2],
        ),
    ]
    return family(
        "PPO's advantages over all tokens of a batch: (A - mean) / sqrt(variance + 1e-8), divisor n"
        " - 1.",
        {"advantages": "[i][t]; null stands for NaN", "mask": "[i][t] which tokens train"},
        {},
        {"advantages": "[i][t]; 0 where the mask is false"},
        cases=[
            case(
                name,
                why,
                "PPO as commonly implemented; no paper's equation",
                {"advantages": without_masked(values, mask), "mask": mask},
                {},
                {"advantages": naive.whiten(values, mask)},
            )
            for name, why, values, mask in rows
        ],
    )


def value_losses() -> Family:
    values = [0.1, 0.9, -0.4, 0.5, 0.3]
    old = [0.15, 0.2, -0.35, 1.0, 0.3]
    targets = [0.5, 1.0, -1.0, 0.2, 0.3]
    weights = [0.1, 0.2, 0.3, 0.15, 0.25]
    cases = []
    for name, why, clip_range in (
        (
            "clipped",
            "the second value has moved beyond the range towards its target: no gradient",
            0.2,
        ),
        ("unclipped", "the squared error", None),
    ):
        loss, gradient = naive.value_loss(values, old, targets, weights, clip_range)
        naive.central_differences(
            lambda rows, limit=clip_range: naive.value_loss(rows[0], old, targets, weights, limit)[
                0
            ],
            [values],
            [gradient],
        )
        inputs = {"values": values, "old_values": old, "targets": targets, "weights": weights}
        expected = {"loss": loss, "gradient": gradient}
        cases.append(
            case(
                name,
                why,
                "PPO, arXiv 1707.06347, Eq. 9",
                inputs,
                {"clip_range": clip_range},
                expected,
            )
        )
    return family(
        "sum_t w_t max((V - target)^2, (V_old + clip(V - V_old, -c, c) - target)^2) / 2.",
        {
            "values": "[T]",
            "old_values": "[T] before the step's first update",
            "targets": "[T]",
            "weights": "[T] what each token weighs",
        },
        {"clip_range": "c; null: no clip"},
        {"loss": "number", "gradient": "[T] by each value"},
        cases=cases,
    )


# --- rewards, weights -------------------------------------------------------------------------------------------------


def overlong_penalties() -> Family:
    paper = {"max_length": 20480, "buffer": 4096, "factor": 1.0}
    lengths = [0, 1, 16383, 16384, 16385, 18432, 20479, 20480, 20481, 40000]
    rows = [
        (
            "the paper's sizes",
            "16384 is free, 16385 costs 1 / 4096, 20480 costs 1, and nothing costs more",
            lengths,
            paper,
        ),
        (
            "half the factor",
            "the bound is the factor",
            [17, 24, 32, 48],
            {"max_length": 32, "buffer": 16, "factor": 0.5},
        ),
        (
            "the buffer is the limit",
            "from the first token on",
            [0, 1, 8, 9],
            {"max_length": 8, "buffer": 8, "factor": 1.0},
        ),
    ]
    cases = []
    for name, why, lengths, parameters in rows:
        expected = {
            "penalties": [naive.overlong_penalty(length, **parameters) for length in lengths]
        }
        cases.append(case(name, why, f"{DAPO}, Eq. 13", {"lengths": lengths}, parameters, expected))
    nothing = {"max_length": 8, "buffer": 0, "factor": 1.0}
    cases.append(
        case("no buffer", "0 / 0: refused", f"{DAPO}, Eq. 13", {"lengths": [8]}, nothing, REFUSED)
    )
    return family(
        "What a response adds to its training reward for its length: 0 up to max_length - buffer,"
        " linear to -factor at max_length, and -factor beyond.",
        {"lengths": "tokens of responses, the sampled end token included"},
        {"max_length": "L_max", "buffer": "L_cache", "factor": "the largest penalty; the paper: 1"},
        {"penalties": "one for each length"},
        cases=cases,
    )


def aggregation_weights() -> Family:
    rows = [
        ("lengths 1 and 9", "each mode gives other numbers", [1, 9], [0, 1], 12),
        (
            "two groups",
            "1 / 61 for each token, and 1 / 2 of 1 / 4 and 1 / 57",
            [1, 3, 50, 7],
            [4, 4, -9, -9],
            60,
        ),
        (
            "one without a trained token",
            "it has the weight 0 and does not count",
            [2, 0, 3],
            [1, 2, 2],
            4,
        ),
        (
            "a group without a trained token",
            "it does not count among groups",
            [2, 0, 0, 3],
            [1, 2, 2, 3],
            4,
        ),
        (
            "groups side by side",
            "members of a group need not be adjacent",
            [1, 2, 3, 4],
            [7, 8, 7, 8],
            5,
        ),
        ("nothing trains", "no division by zero", [0, 0], [0, 0], 4),
    ]
    cases = []
    for name, why, lengths, groups, max_length in rows:
        for mode in MODES:
            limit = max_length if mode == "constant" else None
            expected = {"weights": naive.aggregation_weights(lengths, groups, mode, limit)}
            inputs = {"lengths": lengths, "groups": groups}
            parameters = {"aggregate": mode, "max_length": limit}
            cases.append(
                case(f"{mode}: {name}", why, WEIGHT_SOURCES[mode], inputs, parameters, expected)
            )
    return family(
        "The weight of each trained token of response i, made once for a whole minibatch. token: 1"
        " / trained tokens; group: 1 / (groups x trained tokens of i's group); sequence: 1 / (N x"
        " length_i); constant: 1 / (N x max_length). N and groups count those with at least one"
        " trained token.",
        {
            "lengths": (
                "[N] trained tokens: the end token counts; prompt, padding and masked tokens do not"
            ),
            "groups": "[N] equal numbers are one group; the same prompt sampled twice is two",
        },
        {
            "aggregate": "token, group, sequence or constant",
            "max_length": "the response limit, for constant",
        },
        {"weights": "[N]"},
        cases=cases,
    )


def importance_weights() -> Family:
    old = [[-1.0, -2.0, -0.5], [-3.0, -0.25], [-1.5, -2.5, -0.75, -1.0]]
    engine = [[-1.1, -3.5, -0.4], [-1.0, -0.3], [-1.45, -2.5, -0.8, -50.0]]
    mask = [[True, True, True], [True, True], [True, True, False, False]]
    new = {"old_logprobs": old, "engine_logprobs": without_masked(engine, mask), "mask": mask}
    cases = []
    for over_cap, why in (
        ("truncate", "a large ratio counts as the cap, a small one as it is"),
        ("mask", "a ratio above the cap or below 1 / cap counts as 0"),
    ):
        for ratio in ("token", "sequence"):
            for cap in (2.0, 5.0):
                parameters = {"cap": cap, "over_cap": over_cap, "ratio": ratio}
                expected = {"weights": naive.importance_weights(old, engine, mask, **parameters)}
                name = f"{over_cap}, {ratio}, {cap:g}"
                cases.append(case(name, why, "importance sampling", new, parameters, expected))
    far = {"old_logprobs": [[-1.0]], "engine_logprobs": [[-101.0]], "mask": [[True]]}
    for over_cap, expected_row in (("truncate", [[2.0]]), ("mask", [[0.0]])):
        parameters = {"cap": 2.0, "over_cap": over_cap, "ratio": "token"}
        why = "e^100 stays finite"
        cases.append(
            case(
                f"{over_cap}, a log-ratio of 100",
                why,
                "importance sampling",
                far,
                parameters,
                {"weights": expected_row},
            )
        )
    return family(
        "Factors without gradient for an engine whose probabilities differ from the trainer's: u ="
        " pi_old / pi_engine of the token, or the product over the response's trained tokens; then"
        " min(u, cap), or u within 1 / cap .. cap and 0 elsewhere.",
        {
            "old_logprobs": "[i][t]",
            "engine_logprobs": "[i][t]; null stands for NaN",
            "mask": "[i][t]",
        },
        {"cap": "the largest weight", "over_cap": "truncate or mask", "ratio": "token or sequence"},
        {"weights": "[i][t]; 1 at masked tokens"},
        cases=cases,
    )


def pass_at_k() -> Family:
    rows = [
        (
            "one right of 32, k = 32",
            "all samples hold it: 1; drawing with replacement gives 0.64",
            32,
            1,
            32,
        ),
        ("one right of 32, k = 1", "the accuracy", 32, 1, 1),
        ("one right of 32, k = 8", "8 / 32", 32, 1, 8),
        ("none right", "0", 16, 0, 4),
        ("all right", "1", 16, 16, 1),
        ("fewer wrong than k", "1", 10, 7, 4),
        ("3 of 10, k = 5", "1 - 21 / 252", 10, 3, 5),
        ("many samples", "no overflow", 1000, 10, 100),
    ]
    cases = [
        case(
            name,
            why,
            "arXiv 2107.03374, Eq. 1",
            {"samples": n, "correct": c},
            {"k": k},
            {"pass_at_k": naive.pass_at_k(n, c, k)},
        )
        for name, why, n, c, k in rows
    ]
    few = {"samples": 4, "correct": 1}
    cases.append(case("k above the samples", "refused", "arXiv 2107.03374", few, {"k": 5}, REFUSED))
    return family(
        "The unbiased estimate that at least one of k samples is right: 1 - C(n - c, k) / C(n, k).",
        {"samples": "n", "correct": "c"},
        {"k": "how many are looked at"},
        {"pass_at_k": "number"},
        cases=cases,
    )


FAMILIES = {
    "group_advantages": group_advantages,
    "other_advantages": other_advantages,
    "informative_groups": informative_groups,
    "gae": generalized_advantages,
    "token_whitening": token_whitening,
    "value_loss": value_losses,
    "overlong_penalty": overlong_penalties,
    "aggregation_weights": aggregation_weights,
    "importance_weights": importance_weights,
    "pass_at_k": pass_at_k,
}
