"""Laws of the clipped loss and its weights (Eq. 5, 8, 10 and 12)."""

import math
import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from conformance import naive
from dapo.algo.kl import kl_penalty
from dapo.algo.loss import aggregation_weights, clip_bounds, clipped_gradient, policy_loss
from helpers.tables import for_each_row

CLIP = {"clip_low": 0.2, "clip_high": 0.28}
AGGREGATES = ["token", "group", "sequence", "constant"]
NAN = float("nan")

# a minibatch with everything in it: ragged lengths, two groups, a zero advantage, ratios inside and
# outside the clips
LENGTHS = [1, 3, 50, 7]
GROUPS = [4, 4, -9, -9]
ADVANTAGES = [1.5, -0.7, 0.0, -1.2]
ADVANTAGES_ALL = [1.5, -0.7, 0.4, -1.2]
MAX_LENGTH = 60


def ragged(seed: int) -> tuple[list[list[float]], list[list[float]]]:
    """New and old log-probabilities of the minibatch, `[i][t]`, ratios from about 0.4 to 2.5."""
    draw = random.Random(seed)
    old = [[-3 * draw.random() for _ in range(length)] for length in LENGTHS]
    new = [[value + draw.uniform(-0.9, 0.9) for value in row] for row in old]
    return new, old


def weights_of(aggregate: str) -> list[float]:
    return naive.aggregation_weights(LENGTHS, GROUPS, aggregate, MAX_LENGTH)


def naive_loss(
    new: list[list[float]],
    old: list[list[float]],
    *rest: list[float],
    dual_clip: float | None = None,
) -> tuple[float, list[list[float]]]:
    mask = [[True] * len(row) for row in new]
    return naive.policy_loss(
        new, old, mask, *rest, **CLIP, **({"dual_clip": dual_clip} if dual_clip else {})
    )


def padded(rows: list[list[float]], width: int, fill: float = NAN) -> Tensor:
    return torch.tensor([row + [fill] * (width - len(row)) for row in rows], dtype=torch.float64)


def masks(rows: list[list[float]], width: int) -> Tensor:
    return torch.tensor([[t < len(row) for t in range(width)] for row in rows])


def run_in_microbatches(
    new: list[list[float]],
    old: list[list[float]],
    advantages: list[float],
    weights: Tensor,
    microbatches: list[list[int]],
    dual_clip: float | None = None,
) -> tuple[float, list[list[float]], dict[str, float]]:
    """Loss, gradient and metrics as a trainer sums them, each microbatch padded (with NaN) to its
    own width.
    """
    loss = 0.0
    gradient = [[] for _ in new]
    totals = {}
    for rows in microbatches:
        width = max(len(new[i]) for i in rows) + 2
        logprobs = padded([new[i] for i in rows], width).requires_grad_()
        part, metrics = policy_loss(
            logprobs,
            padded([old[i] for i in rows], width),
            torch.tensor([advantages[i] for i in rows], dtype=torch.float64),
            masks([new[i] for i in rows], width),
            weights[rows],
            **CLIP,
            dual_clip=dual_clip,
        )
        part.backward()
        loss += part.item()
        for i, row in zip(rows, logprobs.grad.tolist(), strict=True):
            gradient[i] = row[: len(new[i])]
        totals = {name: totals.get(name, 0.0) + value.item() for name, value in metrics.items()}
    return loss, gradient, totals


def flat(rows: list[list[float]]) -> list[float]:
    return [value for row in rows for value in row]


def one_token(
    ratio: float, advantage: float, dual_clip: float | None = None
) -> tuple[float, float, dict[str, Tensor]]:
    """Loss, gradient (of the loss, by the log-probability) and metrics of a single token of weight
    1.
    """
    logprobs = torch.tensor([[-1.0 + math.log(ratio)]], dtype=torch.float64, requires_grad=True)
    old = torch.tensor([[-1.0]], dtype=torch.float64)
    one = torch.ones(1, dtype=torch.float64)
    loss, metrics = policy_loss(
        logprobs, old, advantage * one, torch.tensor([[True]]), one, **CLIP, dual_clip=dual_clip
    )
    loss.backward()
    return loss.item(), logprobs.grad.item(), metrics


# --- trap 1: any cut into microbatches and ranks


@pytest.mark.parametrize("dual_clip", [None, 1.5, 1.1])
@pytest.mark.parametrize("aggregate", AGGREGATES)
def test_loss_and_gradient_equal_those_of_the_double_loop(aggregate, dual_clip):
    new, old = ragged(seed=1)
    weights = aggregation_weights(
        torch.tensor(LENGTHS), torch.tensor(GROUPS), aggregate=aggregate, max_length=MAX_LENGTH
    )
    expected, expected_gradient = naive_loss(
        new, old, ADVANTAGES_ALL, weights_of(aggregate), dual_clip=dual_clip
    )
    loss, gradient, _ = run_in_microbatches(
        new, old, ADVANTAGES_ALL, weights, [[0, 1, 2, 3]], dual_clip
    )
    assert loss == pytest.approx(expected, abs=1e-12)
    assert flat(gradient) == pytest.approx(flat(expected_gradient), abs=1e-12)
    assert 0 in flat(gradient)  # some tokens are clipped
    assert sum(g != 0 for g in flat(gradient)) > 30  # and most are not


@settings(max_examples=60)
@given(
    aggregate=st.sampled_from(AGGREGATES),
    cut=st.lists(st.tuples(st.integers(0, 1), st.integers(0, 2)), min_size=4, max_size=4),
    order=st.permutations(range(4)),
    seed=st.integers(0, 5),
)
def test_any_partition_into_microbatches_on_two_ranks_gives_the_same_gradient(
    aggregate, cut, order, seed
):
    new, old = ragged(seed)
    weights = aggregation_weights(
        torch.tensor(LENGTHS), torch.tensor(GROUPS), aggregate=aggregate, max_length=MAX_LENGTH
    )
    expected, expected_gradient = naive_loss(new, old, ADVANTAGES, weights_of(aggregate))
    ranks: dict[int, dict[int, list[int]]] = {}
    for i in order:
        rank, microbatch = cut[i]
        ranks.setdefault(rank, {}).setdefault(microbatch, []).append(i)
    loss = 0.0
    summed = [[0.0] * length for length in LENGTHS]
    totals = {}
    for microbatches in ranks.values():  # what an all-reduce with SUM adds up
        part, gradient, metrics = run_in_microbatches(
            new, old, ADVANTAGES, weights, list(microbatches.values())
        )
        loss += part
        for i, row in enumerate(gradient):
            summed[i] = [a + b for a, b in zip(summed[i], row or [0.0] * LENGTHS[i], strict=True)]
        totals = {name: totals.get(name, 0.0) + value for name, value in metrics.items()}
    assert loss == pytest.approx(expected, abs=1e-10)
    assert flat(summed) == pytest.approx(flat(expected_gradient), abs=1e-10)
    whole = run_in_microbatches(new, old, ADVANTAGES, weights, [[0, 1, 2, 3]])[2]
    assert totals == pytest.approx(whole, abs=1e-9)


def test_a_mean_over_microbatches_would_not_be_the_same():
    # lengths 1 and 3: token means of the two microbatches, averaged, weigh the lone token 3 times
    # as much
    weights = aggregation_weights(torch.tensor([1, 3]), torch.tensor([0, 0]), aggregate="token")
    new = [[0.0], [0.0] * 3]
    old = [[0.0], [0.0] * 3]
    loss, gradient, _ = run_in_microbatches(new, old, [3.0, -1.0], weights, [[0], [1]])
    assert loss == pytest.approx(0.0)  # -(3 - 1 - 1 - 1) / 4
    assert gradient == [[-0.75], [0.25, 0.25, 0.25]]


@pytest.mark.parametrize("aggregate", AGGREGATES)
def test_packed_tokens_give_the_same_loss(aggregate):
    new, old = ragged(seed=2)
    weights = aggregation_weights(
        torch.tensor(LENGTHS), torch.tensor(GROUPS), aggregate=aggregate, max_length=MAX_LENGTH
    )
    owner = [i for i, length in enumerate(LENGTHS) for _ in range(length)]
    loss, gradient, metrics = run_in_microbatches(new, old, ADVANTAGES, weights, [[0, 1, 2, 3]])
    packed = torch.tensor(flat(new), dtype=torch.float64).requires_grad_()
    packed_loss, packed_metrics = policy_loss(
        packed,
        torch.tensor(flat(old), dtype=torch.float64),
        torch.tensor([ADVANTAGES[i] for i in owner], dtype=torch.float64),
        torch.ones(61, dtype=torch.bool),
        weights[owner],
        **CLIP,
    )
    packed_loss.backward()
    assert packed_loss.item() == pytest.approx(loss, abs=1e-12)
    assert packed.grad.tolist() == pytest.approx(flat(gradient), abs=1e-12)
    assert {name: value.item() for name, value in packed_metrics.items()} == pytest.approx(metrics)


# --- traps 2 and 3: the weights


def test_two_groups_of_lengths_1_and_9_give_different_losses_under_each_aggregate():
    # responses of 1 and 9 tokens with A = 1 and -1 in one group, of 1 and 1 with A = -2 and 3 in
    # the other
    lengths = torch.tensor([1, 9, 1, 1])
    groups = torch.tensor([0, 0, 1, 1])
    new = [[0.0] * n for n in lengths.tolist()]
    losses = {}
    for aggregate in AGGREGATES:
        weights = aggregation_weights(lengths, groups, aggregate=aggregate, max_length=9)
        losses[aggregate] = run_in_microbatches(
            new, new, [1.0, -1.0, -2.0, 3.0], weights, [[0, 1, 2, 3]]
        )[0]
    assert losses == pytest.approx(
        {
            "token": 7 / 12,  # -(1 - 9 - 2 + 3) / 12
            "group": 0.15,  # -((1 - 9) / 10 + (-2 + 3) / 2) / 2
            "sequence": -0.25,  # -(1 - 1 - 2 + 3) / 4
            "constant": 7 / 36,  # -(1 - 9 - 2 + 3) / (4 x 9)
        }
    )


def test_zero_advantage_samples_stay_in_the_denominator():
    new = [[0.0, 0.0], [0.0] * 6]
    weights = aggregation_weights(torch.tensor([2, 6]), torch.tensor([0, 0]), aggregate="token")
    loss, gradient, metrics = run_in_microbatches(new, new, [2.0, 0.0], weights, [[0, 1]])
    assert loss == pytest.approx(-0.5)  # -2 x 2 / 8, not / 2
    assert gradient == [[-0.25, -0.25], [0.0] * 6]
    assert metrics["tokens"] == 8


def test_padding_prompt_and_masked_tokens_are_neither_counted_nor_trained():
    # one row: two prompt tokens, a response of three with its middle one masked, two of padding
    mask = torch.tensor([[False, False, True, False, True, False, False]])
    logprobs = torch.zeros(1, 7, dtype=torch.float64, requires_grad=True)
    weights = aggregation_weights(mask.sum(dim=1), torch.tensor([0]), aggregate="token")
    one = torch.ones(1, dtype=torch.float64)
    loss, metrics = policy_loss(logprobs, logprobs, one, mask, weights, **CLIP)
    loss.backward()
    assert loss.item() == -1.0
    assert logprobs.grad.tolist() == [[0, 0, -0.5, 0, -0.5, 0, 0]]
    assert metrics["tokens"].item() == 2


@pytest.mark.parametrize("aggregate", AGGREGATES)
def test_responses_without_a_trained_token_weigh_nothing_and_are_not_counted(aggregate):
    full = aggregation_weights(
        torch.tensor([4, 2, 5]), torch.tensor([0, 0, 1]), aggregate=aggregate, max_length=8
    )
    # the same with two empty responses, one of them a group of its own
    some = aggregation_weights(
        torch.tensor([0, 4, 2, 0, 5]),
        torch.tensor([0, 0, 0, 2, 1]),
        aggregate=aggregate,
        max_length=8,
    )
    assert some.tolist() == [0.0, full[0], full[1], 0.0, full[2]]
    assert all(full > 0)


@pytest.mark.parametrize("aggregate", AGGREGATES)
@pytest.mark.parametrize("lengths", [[], [0], [0, 0, 0]])
def test_a_minibatch_without_a_trained_token_has_zero_weights(aggregate, lengths):
    weights = aggregation_weights(
        torch.tensor(lengths, dtype=torch.int64),
        torch.arange(len(lengths)),
        aggregate=aggregate,
        max_length=8,
    )
    assert weights.tolist() == [0.0] * len(lengths)


@pytest.mark.parametrize("ids", [[0, 1, 0, 1], [-5, 2**62, -5, 2**62], [7, 3, 7, 3]])
def test_group_ids_are_names_of_any_value_in_any_order(ids):
    weights = aggregation_weights(torch.tensor([1, 2, 3, 6]), torch.tensor(ids), aggregate="group")
    assert weights.tolist() == [1 / 8, 1 / 16, 1 / 8, 1 / 16]


@settings(max_examples=60)
@given(
    aggregate=st.sampled_from(AGGREGATES),
    responses=st.lists(st.tuples(st.integers(0, 60), st.integers(-3, 3)), min_size=1, max_size=12),
)
def test_weights_equal_the_table_and_sum_to_one_over_tokens(aggregate, responses):
    lengths = [n for n, _ in responses]
    groups = [g for _, g in responses]
    weights = aggregation_weights(
        torch.tensor(lengths), torch.tensor(groups), aggregate=aggregate, max_length=MAX_LENGTH
    )
    assert weights.dtype == torch.float64
    assert weights.tolist() == pytest.approx(
        naive.aggregation_weights(lengths, groups, aggregate, MAX_LENGTH), rel=1e-14
    )
    if any(lengths) and aggregate != "constant":
        assert (weights * torch.tensor(lengths)).sum().item() == pytest.approx(1.0)


@pytest.mark.parametrize("max_length", [None, 0])
def test_constant_weights_need_the_limit(max_length):
    with pytest.raises(ValueError, match="needs max_length, the response limit in tokens"):
        aggregation_weights(
            torch.tensor([1]), torch.tensor([0]), aggregate="constant", max_length=max_length
        )


def test_wrong_arguments_of_the_weights_are_errors_that_say_why():
    two = torch.tensor([1, 2])
    with pytest.raises(ValueError, match="'constant', got 'mean'"):
        aggregation_weights(two, two, aggregate="mean")
    with pytest.raises(ValueError, match=r"both be \[N\], got shapes \[2\] and \[1\]"):
        aggregation_weights(two, torch.tensor([1]), aggregate="token")
    with pytest.raises(ValueError, match=r"not be negative, got \[1, -2\]"):
        aggregation_weights(torch.tensor([1, -2]), two, aggregate="token")


# --- trap 4: masks


@pytest.mark.parametrize("garbage", [NAN, math.inf, -math.inf, 1e30, 0.0])
def test_what_padding_holds_changes_neither_loss_nor_gradient_nor_metrics(garbage):
    mask = torch.tensor([[True, True, False], [True, False, False]])
    clean = torch.tensor([[-0.5, -1.0, 0.0], [-2.0, 0.0, 0.0]], dtype=torch.float64)
    results = []
    for fill in (0.0, garbage):
        logprobs = clean.masked_fill(~mask, fill).requires_grad_()
        old = (clean - 0.1).masked_fill(~mask, -fill)
        loss, metrics = policy_loss(
            logprobs,
            old,
            torch.tensor([1.0, -1.0]),
            mask,
            torch.tensor([0.5, 0.25]),
            **CLIP,
            dual_clip=10.0,
        )
        penalty = kl_penalty(logprobs, old, mask, torch.tensor([0.5, 0.25]))
        (loss + penalty).backward()
        results.append(
            [
                loss.item(),
                penalty.item(),
                *logprobs.grad.flatten().tolist(),
                *(m.item() for m in metrics.values()),
            ]
        )
    assert results[0] == results[1]
    assert all(math.isfinite(number) for number in results[1])
    assert results[1][2:8] != [0.0] * 6


@pytest.mark.parametrize("advantage", [1.0, NAN])
def test_a_fully_masked_microbatch_gives_loss_zero_and_finite_gradients(advantage):
    logprobs = torch.full((2, 3), NAN, requires_grad=True)
    loss, metrics = policy_loss(
        logprobs,
        torch.full((2, 3), -math.inf),
        torch.full((2,), advantage),
        torch.zeros(2, 3, dtype=torch.bool),
        torch.zeros(2),
        **CLIP,
        dual_clip=10.0,
    )
    loss.backward()
    assert loss.item() == 0.0
    assert logprobs.grad.tolist() == [[0.0] * 3] * 2
    assert {name: value.item() for name, value in metrics.items()} == dict.fromkeys(metrics, 0.0)


@pytest.mark.parametrize("shape", [(0, 0), (0, 5), (3, 0)])
def test_a_microbatch_without_rows_or_columns_gives_loss_zero(shape):
    logprobs = torch.zeros(shape, requires_grad=True)
    row = torch.ones(shape[0])
    loss, metrics = policy_loss(
        logprobs, logprobs, row, torch.zeros(shape, dtype=torch.bool), row, **CLIP
    )
    loss.backward()
    assert loss.item() == 0.0
    assert metrics["tokens"].item() == 0


def test_a_mask_of_zeros_and_ones_is_as_good_as_a_boolean_one():
    values = torch.tensor([[-1.0, -2.0]], dtype=torch.float64)
    one = torch.ones(1, dtype=torch.float64)
    losses = [
        policy_loss(values, values - 0.1, one, torch.tensor([[1, 0]]).to(dtype), one, **CLIP)[
            0
        ].item()
        for dtype in (torch.bool, torch.int64, torch.float32)
    ]
    assert losses == [losses[0]] * 3
    assert losses[0] == pytest.approx(-math.exp(0.1))


def test_nan_in_a_token_that_trains_is_not_hidden():
    loss, metrics = policy_loss(
        torch.tensor([[NAN, -1.0]]),
        torch.tensor([[-1.0, -1.0]]),
        torch.ones(1),
        torch.tensor([[True, True]]),
        torch.ones(1),
        **CLIP,
    )
    assert loss.isnan()
    assert metrics["ratio_sum"].isnan()


# --- trap 5: the table of clips


@for_each_row(
    ("advantage", "ratio", "objective", "has_gradient", "clipped"),
    [
        (1.0, 0.5, 0.5, True, None),
        (1.0, 0.7, 0.7, True, None),
        (1.0, 1.0, 1.0, True, None),
        # a symmetric clip at 1.2 would stop here: clip-higher does not
        (1.0, 1.25, 1.25, True, None),
        (1.0, 1.3, 1.28, False, "clipped_high"),
        (1.0, 3.0, 1.28, False, "clipped_high"),
        (-1.0, 0.5, -0.8, False, "clipped_low"),
        (-1.0, 0.7, -0.8, False, "clipped_low"),
        (-1.0, 0.9, -0.9, True, None),
        (-1.0, 1.0, -1.0, True, None),
        (-1.0, 1.5, -1.5, True, None),
        (-1.0, 50.0, -50.0, True, None),  # without dual clip nothing bounds this
        (0.0, 5.0, 0.0, False, None),
    ],
)
def test_table_of_clips(advantage, ratio, objective, has_gradient, clipped):
    loss, gradient, metrics = one_token(ratio, advantage)
    assert loss == pytest.approx(-objective)
    assert gradient == pytest.approx(-ratio * advantage if has_gradient else 0.0)
    counts = {
        name: metrics[name].item() for name in ("clipped_low", "clipped_high", "clipped_dual")
    }
    assert counts == {name: float(name == clipped) for name in counts}


@pytest.mark.parametrize(
    ("advantage", "ratio", "objective", "has_gradient", "clipped"),
    [
        (-1.0, 9.9, -9.9, True, None),
        (-1.0, 10.1, -10.0, False, "clipped_dual"),
        (-2.0, 500.0, -20.0, False, "clipped_dual"),
        (-1.0, 0.9, -0.9, True, None),
        (-1.0, 0.5, -0.8, False, "clipped_low"),
        (1.0, 10.1, 1.28, False, "clipped_high"),
        (1.0, 0.5, 0.5, True, None),
    ],
)
def test_dual_clip_acts_only_on_negative_advantages_and_ratios_above_it(
    advantage, ratio, objective, has_gradient, clipped
):
    loss, gradient, metrics = one_token(ratio, advantage, dual_clip=10.0)
    assert loss == pytest.approx(-objective)
    assert gradient == pytest.approx(-ratio * advantage if has_gradient else 0.0)
    counts = {
        name: metrics[name].item() for name in ("clipped_low", "clipped_high", "clipped_dual")
    }
    assert counts == {name: float(name == clipped) for name in counts}


def test_on_policy_the_gradient_is_minus_the_advantage_even_if_old_is_the_same_tensor():
    logprobs = torch.tensor([[-0.3, -2.0]], dtype=torch.float64, requires_grad=True)
    half = torch.tensor([0.5], dtype=torch.float64)
    loss, metrics = policy_loss(logprobs, logprobs, 3 * half, torch.ones(1, 2), half, **CLIP)
    loss.backward()
    assert loss.item() == -1.5
    assert logprobs.grad.tolist() == [[-0.75, -0.75]]
    assert metrics["ratio_sum"].item() == 2.0
    assert metrics["approx_kl_sum"].item() == 0.0


# --- trap 6: extremes


@for_each_row("dtype", [torch.float32, torch.float64, torch.bfloat16])
@for_each_row("advantage", [1.0, -1.0])
@for_each_row("log_ratio", [100.0, -100.0, math.inf, -math.inf])
def test_a_log_ratio_of_a_hundred_or_more_stays_finite(log_ratio, advantage, dtype):
    logprobs = torch.tensor([[log_ratio]], dtype=dtype, requires_grad=True)
    zero = torch.zeros(1, 1, dtype=dtype)
    one = torch.ones(1, dtype=dtype)
    mask = torch.ones(1, 1, dtype=torch.bool)
    loss, metrics = policy_loss(logprobs, zero, advantage * one, mask, one, **CLIP)
    penalty = kl_penalty(logprobs, zero, mask, one)
    (loss + penalty).backward()
    assert loss.isfinite()
    assert penalty.isfinite()
    assert logprobs.grad.isfinite().all()
    assert metrics["ratio_sum"].item() == pytest.approx(
        math.exp(math.copysign(20, log_ratio)), rel=1e-5
    )
    assert metrics["approx_kl_sum"].isfinite()


def test_the_loss_is_at_least_float32_and_keeps_float64():
    mask = torch.ones(1, 1, dtype=torch.bool)
    one = torch.ones(1, dtype=torch.float64)
    for dtype, expected in [
        (torch.bfloat16, torch.float32),
        (torch.float16, torch.float32),
        (torch.float32, torch.float32),
        (torch.float64, torch.float64),
    ]:
        logprobs = torch.zeros(1, 1, dtype=dtype, requires_grad=True)
        loss, metrics = policy_loss(logprobs, logprobs.float(), one, mask, one, **CLIP)
        assert loss.dtype == kl_penalty(logprobs, logprobs, mask, one).dtype == expected
        assert {value.dtype for value in metrics.values()} == {torch.float64}
        loss.backward()
        assert logprobs.grad.dtype == dtype


# --- metrics


def test_metrics_are_plain_sums_with_hand_computed_values():
    new = (
        torch.tensor([[0.1, 0.4, 0.9], [0.3, 0.2, NAN]], dtype=torch.float64).log().requires_grad_()
    )
    old = torch.tensor([[0.1, 0.2, 0.3], [0.1, 0.4, NAN]], dtype=torch.float64).log()
    mask = torch.tensor([[True, True, True], [True, True, False]])
    # ratios 1, 2, 3 with A = 1: two clipped high; 3 and 0.5 with A = -1: one above the dual clip,
    # one clipped low
    loss, metrics = policy_loss(
        new, old, torch.tensor([1.0, -1.0]), mask, torch.tensor([7.0, 7.0]), **CLIP, dual_clip=2.5
    )
    assert loss.item() == pytest.approx(-7 * (1 + 1.28 + 1.28 - 2.5 - 0.8))
    assert not any(value.requires_grad or value.ndim for value in metrics.values())
    assert {name: value.item() for name, value in metrics.items()} == pytest.approx(
        {
            "tokens": 5.0,
            "clipped_low": 1.0,
            "clipped_high": 2.0,
            "clipped_dual": 1.0,
            "ratio_sum": 9.5,
            # 0 + (1 - ln 2) + 2 (2 - ln 3) + (ln 2 - 0.5) = 4.5 - 2 ln 3
            "approx_kl_sum": 2.3027754,
            "prob_sum": 1.9,
            "clipped_high_prob_sum": 1.3,
        },
        abs=1e-6,
    )


# --- wrong arguments


def test_shapes_that_would_broadcast_into_a_wrong_loss_are_refused_by_name():
    tokens = torch.zeros(4, 4)
    rows = torch.ones(4)
    mask = torch.ones(4, 4, dtype=torch.bool)
    fits = r"must have a value for each token: \[4, 4\], got"
    with pytest.raises(ValueError, match=rf"advantages {fits} \[1, 4\]"):
        policy_loss(tokens, tokens, tokens[:1], mask, rows, **CLIP)
    with pytest.raises(ValueError, match=rf"weights {fits} \[4, 1\]"):
        policy_loss(tokens, tokens, rows, mask, rows.unsqueeze(1), **CLIP)
    with pytest.raises(ValueError, match=rf"mask {fits} \[4\]"):
        policy_loss(tokens, tokens, rows, mask[0], rows, **CLIP)
    with pytest.raises(ValueError, match=rf"old_logprobs {fits} \[1, 4\]"):
        policy_loss(tokens, tokens[:1], rows, mask, rows, **CLIP)
    with pytest.raises(ValueError, match=rf"reference_logprobs {fits} \[1, 4\]"):
        kl_penalty(tokens, tokens[:1], mask, rows)
    with pytest.raises(ValueError, match=rf"weights {fits} \[4, 1\]"):
        kl_penalty(tokens, tokens, mask, rows.unsqueeze(1))


@pytest.mark.parametrize("dual_clip", [1.0, 0.5, -3.0])
def test_a_dual_clip_that_would_cut_on_policy_tokens_is_refused(dual_clip):
    with pytest.raises(ValueError, match="dual_clip must be above 1"):
        one_token(1.0, -1.0, dual_clip=dual_clip)


# --- the derivatives that training uses, at ratios far outside of the clips


INF = math.inf
LOG_RATIOS = [
    0.0,
    0.1,
    0.24,
    0.25,
    -0.22,
    -0.23,
    0.4,
    0.41,
    3.0,
    19.9,
    20.1,
    500.0,
    -3.0,
    -19.9,
    -20.1,
    -500.0,
    NAN,
    INF,
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize(
    "clip", [{}, {"dual_clip": 1.5}, {"clip_low": 1.0}, {"clip_high": 1e12}], ids=str
)
def test_the_written_gradients_equal_the_naive_ones(
    clip: dict[str, float], dtype: torch.dtype
) -> None:
    options = {**CLIP, **clip}
    log_ratios = torch.tensor(LOG_RATIOS, dtype=dtype).repeat(6)
    num = len(LOG_RATIOS)
    advantages = torch.tensor([1.7, 0.0, -0.6], dtype=dtype).repeat_interleave(num).repeat(2)
    mask = torch.arange(6 * num) < 3 * num
    mask &= log_ratios.isfinite()
    old = torch.linspace(-4, -0.5, 6 * num, dtype=dtype)
    weights = torch.linspace(0.5, 2, 6 * num, dtype=dtype)
    logprobs = (old + log_ratios).requires_grad_()
    rows = [
        [[x] for x in each.tolist()]
        for each in (logprobs.detach() - old, torch.zeros(6 * num), mask)
    ]
    _, gradient = naive.policy_loss(*rows, advantages.tolist(), weights.tolist(), **options)
    expected = torch.tensor(gradient, dtype=dtype).flatten()
    loss, _ = policy_loss(logprobs, old, advantages, mask, weights, **options)
    (through_loss,) = torch.autograd.grad(loss, logprobs)
    torch.testing.assert_close(
        through_loss, expected, rtol=1e-6 if dtype == torch.float32 else 1e-14, atol=0
    )
    scale = torch.where(mask, -weights * advantages, 0.0)
    bounds = clip_bounds(advantages, **options)
    found = clipped_gradient(logprobs.detach() - old, scale, *bounds)
    torch.testing.assert_close(
        found, expected, rtol=1e-6 if dtype == torch.float32 else 1e-14, atol=0
    )
    assert 10 < found.count_nonzero() < mask.sum()
