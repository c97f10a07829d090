"""Families of the conformance set about a whole minibatch, and about a step from verdicts to the
gradient.
"""

import naive
from cases import DAPO, MODES, WEIGHT_SOURCES, Family, all_of, case, family, ragged
from cases_losses import ADVANTAGES, CLIP, LENGTHS, LOSS_INPUTS, loss_case


def minibatches() -> Family:
    groups = [4, 4, -9, -9]
    max_length = 12
    rows = ragged(LENGTHS, 8)
    masks = {
        "every token": all_of(rows[0]),
        "a truncated response masked": [[True], [True] * 3, [False] * 9, [True] * 5],
    }
    cuts = [[[0, 1, 2, 3]], [[0, 1], [2, 3]], [[2], [0, 3], [1]], [[3], [2], [1], [0]]]
    cases = []
    for label, mask in masks.items():
        lengths = [sum(row) for row in mask]
        for mode in MODES:
            limit = max_length if mode == "constant" else None
            weights = naive.aggregation_weights(lengths, groups, mode, limit)
            made = loss_case(
                f"{mode}, {label}",
                "weights are those of the whole minibatch, so the parts of any cut add up to this"
                " loss and gradient",
                WEIGHT_SOURCES[mode],
                rows,
                ADVANTAGES,
                dict(CLIP),
                mask=mask,
                weights=weights,
            )
            del made["inputs"]["weights"]
            made["inputs"] |= {"groups": groups, "cuts": cuts}
            made["parameters"] |= {"aggregate": mode, "max_length": limit}
            cases.append(made)
    return family(
        "The clipped loss of a minibatch from its masks and groups: weights as in"
        " aggregation_weights.json, loss as in policy_loss.json. `cuts` are ways to cut it into"
        " microbatches, on one rank or several: with each of them the sums over the parts must be"
        " the same loss and the same gradient.",
        {
            **{k: v for k, v in LOSS_INPUTS.items() if k != "weights"},
            "groups": "[i]",
            "cuts": "lists of lists of responses",
        },
        {
            "clip_low": "as in policy_loss.json",
            "clip_high": "as there",
            "aggregate": "as in aggregation_weights.json",
            "max_length": "as there",
        },
        {"loss": "number", "gradient": "[i][t]"},
        cases=cases,
    )


def steps() -> Family:
    """From verdicts to the gradient: Algorithm 1, lines 6 to 11, for one update."""
    correct = [[True, False, False], [False, False, False], [True, True, False], [True, True, True]]
    lengths = [[3, 8, 6], [2, 8, 5], [7, 4, 8], [1, 2, 3]]
    finish = [["stop" if n < 8 else "length" for n in row] for row in lengths]
    finish[2][2] = "stop"  # an end token exactly at the limit
    cases = []
    for mode, scale, aggregate in (
        ("soft", "std", "token"),
        ("filter", "std", "token"),
        ("off", "std", "sequence"),
        ("off", "none", "constant"),
        ("soft", "std", "group"),
    ):
        kept = []
        flat = []
        for g, right in enumerate(correct):
            scores = [1.0 if c else -1.0 for c in right]
            if not naive.is_informative(right, scores):
                continue
            penalties = [
                naive.overlong_penalty(n, 8, 4, 1.0) if mode == "soft" else 0.0 for n in lengths[g]
            ]
            rewards = [s + p for s, p in zip(scores, penalties, strict=True)]
            kept.append(g)
            for i, advantage in enumerate(naive.group_advantages(rewards, scale)):
                trains = mode != "filter" or finish[g][i] != "length"
                flat.append(
                    {
                        "group": g,
                        "reward": rewards[i],
                        "advantage": advantage,
                        "trains": trains,
                        "length": lengths[g][i],
                    }
                )
        new, old = ragged([row["length"] for row in flat], 9)
        mask = [[row["trains"]] * row["length"] for row in flat]
        limit = 8 if aggregate == "constant" else None
        trained = [sum(row) for row in mask]
        weights = naive.aggregation_weights(
            trained, [row["group"] for row in flat], aggregate, limit
        )
        made = loss_case(
            "",
            "",
            "",
            (new, old),
            [row["advantage"] for row in flat],
            dict(CLIP),
            mask=mask,
            weights=weights,
        )
        inputs = {
            "correct": correct,
            "lengths": lengths,
            "finish": finish,
            "logprobs": new,
            "old_logprobs": old,
        }
        parameters = {
            "overlong": mode,
            "max_length": 8,
            "buffer": 4,
            "factor": 1.0,
            "scale": scale,
            "aggregate": aggregate,
            **CLIP,
        }
        expected = {
            "kept": kept,
            "rewards": [row["reward"] for row in flat],
            "advantages": [row["advantage"] for row in flat],
            "weights": weights,
            **made["expected"],
        }
        why = (
            "the group that is all wrong is dropped though its shaped rewards differ; so is the one"
            " that is all right"
        )
        cases.append(
            case(
                f"{mode}, {scale}, {aggregate}",
                why,
                f"{DAPO}, Algorithm 1",
                inputs,
                parameters,
                expected,
            )
        )
    return family(
        "One update from verdicts: groups that carry no signal are dropped"
        " (informative_groups.json), rewards are +-1 plus the penalty where overlong is soft"
        " (overlong_penalty.json), advantages are of each group (group_advantages.json), with"
        " overlong filter the tokens of truncated responses do not train though their rewards"
        " count, and the loss is that of minibatch.json.",
        {
            "correct": "[g][i] verdicts",
            "lengths": "[g][i] tokens, the end token included",
            "finish": "[g][i] stop or length (truncated), as the engine says",
            "logprobs": "[n][t] of the responses of the kept groups, in order",
            "old_logprobs": "[n][t]",
        },
        {
            "overlong": "soft, filter or off",
            "max_length": "the response limit, L_max of Eq. 13",
            "buffer": "L_cache of Eq. 13",
            "factor": "the largest penalty",
            "scale": "of the advantages",
            "aggregate": "of the weights",
            "clip_low": "as in policy_loss.json",
            "clip_high": "as there",
        },
        {
            "kept": "the groups that train",
            "rewards": "[n] shaped",
            "advantages": "[n]",
            "weights": "[n] of each trained token",
            "loss": "number",
            "gradient": "[n][t]",
        },
        cases=cases,
    )


# --- how fast a choice is learned -------------------------------------------------------------------------------------


def speeds() -> Family:
    """The techniques' formulas as exact ratios of cases: those of docs/lab/when.md."""
    of_20 = {
        "chooses_b": [True] * 5 + [False] * 15,
        "groups": [0] * 20,
        "truncated": [False] * 20,
        "p": 0.25,
        "p_old": 0.25,
    }
    of_20["rewards"] = [1.0] * 4 + [-1.0] + [1.0] * 5 + [-1.0] * 10
    b_is_cut = [True] * 6 + [False] * 4
    a_is_right = [True] * 5 + [False] * 5
    cut = {
        "chooses_b": [True] * 10 + [False] * 10,
        "groups": [0] * 20,
        "lengths": [8] * 20,
        "p": 0.5,
        "p_old": 0.5,
    }
    cut |= {"truncated": b_is_cut + [False] * 10}
    cut["rewards"] = [-1.0 if each else 1.0 for each in b_is_cut] + [
        1.0 if each else -1.0 for each in a_is_right
    ]
    plain = {"aggregate": "token", "filter_truncated": False, "clip_low": 0.2, "clip_high": 0.28}
    moved = of_20 | {"lengths": [8] * 20, "p": 0.31}  # the ratio of B's token is 1.24
    one_group = of_20 | {"lengths": [8] * 20}
    flat = {
        name: values * 2 if isinstance(values, list) else values
        for name, values in one_group.items()
    }
    flat |= {"rewards": [*of_20["rewards"], *[1.0] * 20], "groups": [0] * 20 + [1] * 20}
    rows = [
        (
            f"{aggregate}, B {rho} times as long",
            f"token over sequence: {rho} / (1 + p ({rho} - 1))^2",
            inputs,
            parameters,
        )
        for rho in (1, 4, 16)
        for aggregate in ("sequence", "token")
        for inputs in [of_20 | {"lengths": [8 * rho] * 5 + [8] * 15}]
        for parameters in [plain | {"aggregate": aggregate}]
    ]
    why = (
        "six of ten responses of the better B are cut off: without a filter A grows, with it B does"
    )
    rows += [
        ("truncated responses train", why, cut, plain),
        ("filtered", why, cut, plain | {"filter_truncated": True}),
    ]
    why = "a ratio of 1.24 is between both clips: .2 stops B's right responses, .28 does not"
    rows += [(f"clip of {clip}", why, moved, plain | {"clip_high": clip}) for clip in (0.2, 0.28)]
    why = "a second group of equal rewards halves the speed of the first: 1 - s"
    rows += [
        ("a group with a signal", why, one_group, plain),
        ("and one without", why, flat, plain),
    ]
    cases = [
        case(
            name,
            why,
            DAPO,
            inputs,
            parameters,
            {"speed": naive.speed_of_choice(**inputs, **parameters)},
        )
        for name, why, inputs, parameters in rows
    ]
    return family(
        "How fast an update raises the logit z of a choice between A and B that each response makes"
        " by its first token, p = sigmoid(z) the probability of B: minus the derivative of the loss"
        " of minibatch.json by z, through the first tokens alone; advantages are those of"
        " group_advantages.json with std, and truncated responses count in them.",
        {
            "chooses_b": "[N] whether the first token is B",
            "rewards": "[N]",
            "groups": "[N] equal numbers are one group",
            "lengths": "[N] tokens",
            "truncated": "[N]",
            "p": "the probability of B now",
            "p_old": "at the start of the step, when the responses were sampled",
        },
        {
            "aggregate": "of the weights",
            "filter_truncated": "whether truncated responses leave the loss",
            "clip_low": "as in policy_loss.json",
            "clip_high": "as there",
        },
        {"speed": "number"},
        cases=cases,
    )


FAMILIES = {"minibatch": minibatches, "step": steps, "choice_speed": speeds}
