"""Families of the conformance set about a whole minibatch, and about a step from verdicts to the gradient."""

import naive
from cases import DAPO, MODES, WEIGHT_SOURCES, Family, all_of, case, family, ragged
from cases_losses import ADVANTAGES, CLIP, LENGTHS, LOSS_INPUTS, loss_case


def minibatches() -> Family:
    groups, max_length = [4, 4, -9, -9], 12
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
                "weights are those of the whole minibatch, so the parts of any cut add up to this loss and gradient",
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
        "The clipped loss of a minibatch from its masks and groups: weights as in aggregation_weights.json, loss as in "
        "policy_loss.json. `cuts` are ways to cut it into microbatches, on one rank or several: with each of them the "
        "sums over the parts must be the same loss and the same gradient.",
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
        kept, flat = [], []
        for g, right in enumerate(correct):
            scores = [1.0 if c else -1.0 for c in right]
            if not naive.is_informative(right, scores):
                continue
            penalties = [naive.overlong_penalty(n, 8, 4, 1.0) if mode == "soft" else 0.0 for n in lengths[g]]
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
        weights = naive.aggregation_weights(trained, [row["group"] for row in flat], aggregate, limit)
        made = loss_case(
            "", "", "", (new, old), [row["advantage"] for row in flat], dict(CLIP), mask=mask, weights=weights
        )
        inputs = {"correct": correct, "lengths": lengths, "finish": finish, "logprobs": new, "old_logprobs": old}
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
        why = "the group that is all wrong is dropped though its shaped rewards differ; so is the one that is all right"
        cases.append(case(f"{mode}, {scale}, {aggregate}", why, f"{DAPO}, Algorithm 1", inputs, parameters, expected))
    return family(
        "One update from verdicts: groups that carry no signal are dropped (informative_groups.json), rewards are +-1 "
        "plus the penalty where overlong is soft (overlong_penalty.json), advantages are of each group "
        "(group_advantages.json), with overlong filter the tokens of truncated responses do not train though their "
        "rewards count, and the loss is that of minibatch.json.",
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


FAMILIES = {"minibatch": minibatches, "step": steps}
