"""Families of the conformance set with log-probabilities and gradients.

Log-ratios keep away from the points where a clip begins, where the derivative is not defined.
"""

from collections.abc import Sequence
from typing import Any

import naive
from cases import (
    DAPO,
    REFUSED,
    Case,
    Family,
    all_of,
    case,
    family,
    from_log_ratios,
    ragged,
    without_masked,
)

CLIP = {"clip_low": 0.2, "clip_high": 0.28}
LENGTHS = [1, 3, 9, 5]
ADVANTAGES = [1.5, -0.7, 0.0, -1.2]
LOSS_INPUTS = {
    "logprobs": "[i][t] of the policy that trains; null stands for NaN, where the mask is false",
    "old_logprobs": "[i][t] of pi_old",
    "mask": "[i][t] which tokens train",
    "advantages": "[i]",
    "weights": "[i] what each trained token of the response weighs",
}


def loss_case(
    name: str,
    why: str,
    source: str,
    rows: tuple[naive.Rows, naive.Rows],
    advantages: Sequence[float],
    parameters: dict[str, Any],
    *,
    mask: list[list[bool]] | None = None,
    weights: Sequence[float] | None = None,
) -> Case:
    """A case whose gradient is the formula's, once differences of the loss have confirmed it."""
    new, old = rows
    trained = mask or all_of(new)
    assert all(x <= 0 for row in [*new, *old] for x in row), "log-probabilities"
    lengths = [sum(row) for row in trained]
    each = list(weights or naive.aggregation_weights(lengths, range(len(lengths)), "token", None))
    loss, gradient = naive.policy_loss(new, old, trained, advantages, each, **parameters)
    naive.central_differences(
        lambda moved: naive.policy_loss(
            moved, old, trained, advantages, each, at=new, **parameters
        )[0],
        new,
        gradient,
    )
    inputs = {
        "logprobs": without_masked(new, trained),
        "old_logprobs": without_masked(old, trained),
        "mask": trained,
        "advantages": list(advantages),
        "weights": each,
    }
    return case(name, why, source, inputs, parameters, {"loss": loss, "gradient": gradient})


def policy_losses() -> Family:
    eq8 = f"{DAPO}, Eq. 8 and 10"
    dual = "dual clip, arXiv 1912.09729"
    table = from_log_ratios([[0.22, 0.26, -0.7], [-0.36, -0.1, 0.4]])
    far = from_log_ratios([[1.5, 2.5, -1.0, 0.1], [1.5, 2.5, -1.0, 0.1]])
    mask = [[False], [True, False, True], [True] * 9, [False, True, True, True, False]]
    cases = [
        loss_case(
            "the table of clips",
            "A > 0: r = 1.25 and 0.5 have a gradient, 1.3 has none; A < 0: 0.9 and 1.5 have one,"
            " 0.7 has none",
            eq8,
            table,
            [1.0, -1.0],
            CLIP,
        ),
        loss_case(
            "symmetric clip",
            "PPO's 0.2 on both sides: r = 1.25 has none",
            "PPO, arXiv 1707.06347, Eq. 7",
            table,
            [1.0, -1.0],
            {"clip_low": 0.2, "clip_high": 0.2},
        ),
        loss_case(
            "on policy",
            "r = 1: the gradient is minus weight times advantage",
            eq8,
            from_log_ratios([[0.0] * 2, [0.0] * 3]),
            [0.5, -2.0],
            CLIP,
        ),
        loss_case(
            "a zero advantage",
            "no loss and no gradient, and still in the denominator",
            eq8,
            ragged([2, 6], 3),
            [0.8, 0.0],
            CLIP,
        ),
        loss_case("ragged", "lengths 1, 3, 9 and 5", eq8, ragged(LENGTHS, 1), ADVANTAGES, CLIP),
        loss_case(
            "masked tokens",
            "NaN where nothing trains reaches neither loss nor gradient",
            eq8,
            ragged(LENGTHS, 2),
            ADVANTAGES,
            CLIP,
            mask=mask,
        ),
        loss_case(
            "nothing trains",
            "loss and gradient are 0, and finite",
            eq8,
            ragged([2, 1], 4),
            [1.0, -1.0],
            CLIP,
            mask=[[False, False], [False]],
        ),
        loss_case(
            "a log-ratio of 100, A > 0",
            "clipped",
            eq8,
            from_log_ratios([[100.0]], old=-101.0),
            [1.0],
            CLIP,
        ),
        loss_case(
            "a log-ratio of 100, A < 0",
            "clamped to 20: finite, and no gradient",
            eq8,
            from_log_ratios([[100.0]], old=-101.0),
            [-1.0],
            CLIP,
        ),
        loss_case(
            "a log-ratio of -100, A > 0",
            "clamped to -20",
            eq8,
            from_log_ratios([[-100.0]], old=-1.0),
            [1.0],
            CLIP,
        ),
        loss_case(
            "dual clip of 3",
            "for A < 0 alone: r = 12 counts as 3 without a gradient, 4.5 too",
            dual,
            far,
            [1.0, -1.0],
            {**CLIP, "dual_clip": 3.0},
        ),
        loss_case(
            "dual clip of 10",
            "4.5 keeps its gradient",
            dual,
            far,
            [1.0, -1.0],
            {**CLIP, "dual_clip": 10.0},
        ),
        case(
            "dual clip of 1",
            "it would take the gradient of every A < 0 on policy: refused",
            dual,
            {
                "logprobs": [[-1.0]],
                "old_logprobs": [[-1.0]],
                "mask": [[True]],
                "advantages": [-1.0],
                "weights": [1.0],
            },
            {**CLIP, "dual_clip": 1.0},
            REFUSED,
        ),
    ]
    return family(
        "-sum_i w_i sum_t min(r A, clip(r, 1 - clip_low, 1 + clip_high) A) over the trained tokens,"
        " r = exp(log pi - log pi_old) with the exponent clamped to +-20. dual_clip c: for A < 0 at"
        " least c A.",
        LOSS_INPUTS,
        {
            "clip_low": "r is clipped to at least 1 - clip_low",
            "clip_high": "and to at most 1 + it",
            "dual_clip": "c; without it there is none",
        },
        {"loss": "number", "gradient": "[i][t] by each log-probability; 0 where the mask is false"},
        cases=cases,
    )


SURROGATES = (
    ("gspo", "GSPO, arXiv 2507.18071", {"clip_low": 0.1, "clip_high": 0.15}),
    ("cispo", "CISPO, arXiv 2506.13585", {"clip_high": 0.28}),
    ("sapo", "SAPO, arXiv 2511.20347", {"positive_temperature": 1.0, "negative_temperature": 1.05}),
)


def surrogates() -> Family:
    cases = []
    mask = [[True], [True, False, True], [False] * 4, [False, True, True, True, False]]
    far = from_log_ratios([[0.6, 0.1], [-0.5, -0.1], [0.05, -0.2], [0.4, 0.3]])
    for name, source, bounds in SURROGATES:
        parameters = {"surrogate": name, **bounds}
        cases += [
            loss_case(
                f"{name}: on policy",
                "r = 1: the gradient is that of the clipped loss",
                source,
                from_log_ratios([[0.0] * 2, [0.0] * 3]),
                [0.5, -2.0],
                parameters,
            ),
            loss_case(
                f"{name}: far off policy",
                "ratios on both sides, either sign of A",
                source,
                far,
                [1.0, 1.0, -1.0, -1.0],
                parameters,
            ),
            loss_case(
                f"{name}: ragged",
                "lengths 1, 3, 9 and 5",
                source,
                ragged(LENGTHS, 5, spread=0.4),
                ADVANTAGES,
                parameters,
            ),
            loss_case(
                f"{name}: masked tokens",
                "NaN where nothing trains; a response's ratio is of its trained tokens",
                source,
                ragged([1, 3, 4, 5], 6, spread=0.4),
                ADVANTAGES,
                parameters,
                mask=mask,
            ),
        ]
        lengths = [2, 2, 2, 2]
        weights = naive.aggregation_weights(lengths, range(4), "sequence", None)
        cases.append(
            loss_case(
                f"{name}: mean over responses",
                "weights of the aggregation sequence",
                source,
                far,
                [1.0, 0.5, -1.0, -0.25],
                parameters,
                weights=weights,
            )
        )
    return family(
        "-sum_i w_i sum_t f. gspo: f = min(s A, clip(s) A) with one ratio s of the response, exp of"
        " the mean of its trained tokens' log-ratios. cispo: f = min(r, 1 + clip_high) A log pi,"
        " where the weight has no gradient. sapo: f = (4 / tau) sigmoid(tau (r - 1)) A, tau by the"
        " sign of A.",
        LOSS_INPUTS,
        {
            "surrogate": "gspo, cispo or sapo",
            "clip_low": "gspo",
            "clip_high": "gspo, cispo",
            "positive_temperature": "sapo: tau where A > 0",
            "negative_temperature": "sapo: tau elsewhere",
        },
        {"loss": "number", "gradient": "[i][t] by each log-probability; 0 where the mask is false"},
        cases=cases,
    )


def corrected_losses() -> Family:
    """Losses whose tokens have different weights, by a correction for the engine's
    probabilities.
    """
    new, old = from_log_ratios([[0.05, -0.04, 0.03, -0.02], [0.4, 0.02, -0.3], [0.06]])
    off = [[0.1, 0.9, -0.2, -0.05], [-1.2, 0.3, -0.1], [0.2]]  # old - engine
    engine = [[o - d for o, d in zip(*rows, strict=True)] for rows in zip(old, off, strict=True)]
    reference = [[n - 0.3 * (-1) ** t for t, n in enumerate(row)] for row in new]
    mask = [[True] * 4, [True, True, False], [True]]
    advantages = [1.0, -0.7, 0.5]
    weights = naive.aggregation_weights([4, 2, 1], range(3), "sequence", None)
    cases = []
    for surrogate, bounds in (("clip", CLIP), *((name, bounds) for name, _, bounds in SURROGATES)):
        for ratio, over_cap, kl_coef in (
            ("token", "mask", 0.0),
            ("token", "truncate", 0.0),
            ("sequence", "mask", 0.0),
            ("token", "mask", 0.5),
        ):
            correction = {"cap": 1.5, "ratio": ratio, "over_cap": over_cap}
            parameters = {"surrogate": surrogate, **bounds, **correction, "kl_coef": kl_coef}
            factors = naive.importance_weights(old, engine, mask, **correction)
            _, slopes = naive.policy_loss(
                new, old, mask, advantages, weights, surrogate=surrogate, **bounds
            )
            _, _, pulls = naive.kl_loss(new, reference, mask, weights, estimator="k3")
            gradient = [
                [u * (slope + kl_coef * pull) for u, slope, pull in zip(*rows, strict=True)]
                for rows in zip(factors, slopes, pulls, strict=True)
            ]
            inputs = {
                "logprobs": without_masked(new, mask),
                "old_logprobs": without_masked(old, mask),
                "engine_logprobs": without_masked(engine, mask),
                "reference_logprobs": without_masked(reference, mask),
                "mask": mask,
                "advantages": advantages,
                "weights": weights,
            }
            why = (
                "a token that the correction masks has no gradient, by no term"
                if over_cap == "mask"
                else ("each token's gradient has its own factor")
            )
            source = (
                "GSPO-token, arXiv 2507.18071, Eq. 13 and 14"
                if surrogate == "gspo"
                else "a factor of each term"
            )
            name = f"{surrogate}: {ratio}, {over_cap}{', k3' if kl_coef else ''}"
            cases.append(case(name, why, source, inputs, parameters, {"gradient": gradient}))
    return family(
        "The gradient of sum_i w_i sum_t u_it (f_it + kl_coef k3_it), where f is the negated term"
        " of `surrogates` or `policy_loss`, and u the factor of `importance_weights`, which has no"
        " gradient. gspo: the ratio has the value of the response's and the gradient of the own"
        " token, so that u reaches no other token.",
        {**LOSS_INPUTS, "engine_logprobs": "[i][t]", "reference_logprobs": "[i][t]"},
        {
            "surrogate": "clip, gspo, cispo or sapo",
            "clip_low": "clip, gspo",
            "clip_high": "clip, gspo, cispo",
            "positive_temperature": "sapo",
            "negative_temperature": "sapo",
            "cap": "of the correction",
            "ratio": "token, or sequence: of the product over the response",
            "over_cap": "truncate, or mask: factors outside of 1/cap .. cap are 0",
            "kl_coef": "of the k3 estimate; 0: there is none",
        },
        {"gradient": "[i][t] by each log-probability; exactly 0 where the mask is false or u is 0"},
        cases=cases,
    )


def divergences() -> Family:
    new, reference = ragged([1, 4, 3], 7)
    mask = [[True], [True, False, True, True], [True, True, True]]
    weights = naive.aggregation_weights([sum(row) for row in mask], range(3), "token", None)
    near = from_log_ratios([[1e-6, -1e-6, 0.0]])
    far = from_log_ratios([[3.0, -3.0]], old=-10.0)
    beyond = from_log_ratios([[25.0, -25.0]], old=-30.0)
    cases = []
    for estimator, formula in (("k1", "d"), ("k2", "d^2 / 2"), ("k3", "exp(-d) - 1 + d")):
        for name, why, rows, trained, each in (
            ("ragged", f"{formula} of each token", (new, reference), mask, weights),
            ("near the reference", "no digits are lost", near, all_of(near[0]), [1.0]),
            ("far from it", "an estimate of 16 is not bounded", far, all_of(far[0]), [0.5]),
            (
                "beyond the bound",
                "d of +-25 counts as +-20 and has no gradient",
                beyond,
                all_of(beyond[0]),
                [0.5],
            ),
        ):
            moved, fixed = rows
            loss, estimates, gradient = naive.kl_loss(
                moved, fixed, trained, each, estimator=estimator
            )
            naive.central_differences(
                lambda point, f=fixed, m=trained, w=each, e=estimator: naive.kl_loss(
                    point, f, m, w, estimator=e
                )[0],
                moved,
                gradient,
            )
            inputs = {
                "logprobs": without_masked(moved, trained),
                "reference_logprobs": without_masked(fixed, trained),
                "mask": trained,
                "weights": each,
            }
            expected = {"estimates": estimates, "loss": loss, "gradient": gradient}
            source = (
                "Schulman, Approximating KL Divergence (2020); k3: Eq. 5's penalty, GRPO, arXiv"
                " 2402.03300"
            )
            cases.append(
                case(
                    f"{estimator}: {name}", why, source, inputs, {"estimator": estimator}, expected
                )
            )
    return family(
        "Estimates of KL(policy || reference) from the sampled tokens, d = log pi - log pi_ref"
        " clamped to +-20. k1: d; k2: d^2 / 2; k3: exp(-d) - 1 + d. The loss is sum_i w_i sum_t of"
        " them.",
        {
            "logprobs": "[i][t]",
            "reference_logprobs": "[i][t]",
            "mask": "[i][t]",
            "weights": "[i] what each trained token of the response weighs",
        },
        {"estimator": "k1, k2 or k3"},
        {
            "estimates": "[i][t]; 0 where the mask is false",
            "loss": "number",
            "gradient": "[i][t] by each log-probability",
        },
        cases=cases,
    )


FAMILIES = {
    "policy_loss": policy_losses,
    "surrogates": surrogates,
    "corrected_loss": corrected_losses,
    "kl": divergences,
}
