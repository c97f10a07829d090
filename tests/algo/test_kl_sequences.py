"""What the divergence's terms do to responses of several tokens, by enumeration of every
response.
"""

import itertools
import re
from statistics import median

import pytest
import torch
from torch import Tensor
from torch.nn.functional import cosine_similarity

from dapo.algo.kl import KlEstimator, kl_penalty, token_kl
from helpers.paths import ROOT

VOCABULARY = 2
POLICIES = 40
LENGTHS = (1, 2, 3)


class Responses:
    """All responses of a length, and the row of a table of logits that each of their tokens is
    sampled from.
    """

    def __init__(self, length: int) -> None:
        prefixes = [
            prefix
            for n in range(length)
            for prefix in itertools.product(range(VOCABULARY), repeat=n)
        ]
        row = {prefix: i for i, prefix in enumerate(prefixes)}
        responses = list(itertools.product(range(VOCABULARY), repeat=length))
        self.tokens = torch.tensor(responses)  # [N, T]
        # [N, T]
        self.rows = torch.tensor(
            [[row[response[:t]] for t in range(length)] for response in responses]
        )
        self.num_rows = len(prefixes)
        self.mask = torch.ones_like(self.tokens, dtype=torch.bool)

    def logprobs(self, logits: Tensor) -> Tensor:
        """`[N, T]` of each token of each response, under a policy with a distribution for each
        prefix.
        """
        return logits.log_softmax(1)[self.rows, self.tokens]

    def prefix_probabilities(self, logits: Tensor) -> Tensor:
        """`[rows]` the probability that a response begins with the prefix of each row."""
        logprobs = self.logprobs(logits)
        before = logprobs.cumsum(1) - logprobs
        found = torch.zeros(self.num_rows, dtype=logits.dtype)
        found[self.rows] = before.exp()
        return found

    def table(self, seed: int) -> Tensor:
        generator = torch.Generator().manual_seed(seed)
        return torch.randn(self.num_rows, VOCABULARY, dtype=torch.float64, generator=generator)


def gradient(of: Tensor, logits: Tensor) -> Tensor:
    (found,) = torch.autograd.grad(of, logits)
    return found.flatten()


def exact(responses: Responses, logits: Tensor, reference: Tensor, *, reverse: bool) -> Tensor:
    """The gradient of KL(policy || reference) over responses, or of KL(reference || policy)."""
    logits = logits.clone().requires_grad_()
    policy = responses.logprobs(logits).sum(1)
    base = responses.logprobs(reference).sum(1)
    p, q = (policy, base) if reverse else (base, policy)
    return gradient((p.exp() * (p - q)).sum(), logits)


def states_fixed(
    responses: Responses, logits: Tensor, reference: Tensor, *, reverse: bool
) -> Tensor:
    """The gradient of the tokens' divergences, each in its state, while the policy's states stay as
    they are.
    """
    logits = logits.clone().requires_grad_()
    policy = logits.log_softmax(1)
    base = reference.log_softmax(1)
    p, q = (policy, base) if reverse else (base, policy)
    of_states = (p.exp() * (p - q)).sum(1)
    return gradient((responses.prefix_probabilities(logits.detach()) * of_states).sum(), logits)


def in_loss(
    responses: Responses, logits: Tensor, reference: Tensor, estimator: KlEstimator
) -> Tensor:
    """The expected gradient of the penalty over responses that the policy samples."""
    logits = logits.clone().requires_grad_()
    logprobs = responses.logprobs(logits)
    weights = logprobs.detach().sum(1).exp()
    penalty = kl_penalty(
        logprobs, responses.logprobs(reference), responses.mask, weights, estimator=estimator
    )
    return gradient(penalty, logits)


def in_reward(
    responses: Responses, logits: Tensor, reference: Tensor, estimator: KlEstimator
) -> Tensor:
    """The expected policy gradient of the sum of the estimates over a response, as a cost."""
    logits = logits.clone().requires_grad_()
    logprobs = responses.logprobs(logits)
    cost = token_kl(
        logprobs.detach(), responses.logprobs(reference), responses.mask, estimator=estimator
    ).sum(1)
    return gradient((logprobs.detach().sum(1).exp() * cost * logprobs.sum(1)).sum(), logits)


def cases(length: int) -> list[tuple[Responses, Tensor, Tensor]]:
    responses = Responses(length)
    return [
        (responses, responses.table(2 * i), responses.table(2 * i + 1)) for i in range(POLICIES)
    ]


@pytest.mark.parametrize("length", LENGTHS)
def test_k1_in_the_reward_has_the_gradient_of_the_divergence_at_any_length(length: int):
    for case in cases(length):
        torch.testing.assert_close(
            in_reward(*case, "k1"), exact(*case, reverse=True), rtol=0, atol=1e-12
        )


@pytest.mark.parametrize("length", LENGTHS)
def test_k1_in_the_loss_has_none_at_any_length(length: int):
    for case in cases(length):
        assert float(in_loss(*case, "k1").abs().max()) < 1e-12


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize(("estimator", "reverse"), [("k2", True), ("k3", False)])
def test_k2_and_k3_in_the_loss_have_the_gradient_of_the_tokens_divergences_in_fixed_states(
    estimator: KlEstimator, reverse: bool, length: int
):
    for case in cases(length):
        found = in_loss(*case, estimator)
        torch.testing.assert_close(found, states_fixed(*case, reverse=reverse), rtol=0, atol=1e-12)
        whole = exact(*case, reverse=reverse)
        assert torch.allclose(found, whole, rtol=0, atol=1e-9) == (length == 1)


def cosines(length: int, estimator: KlEstimator, *, reverse: bool) -> list[float]:
    """The cosine between the gradient of the term in the loss and that of the divergence over
    responses.
    """
    return [
        float(cosine_similarity(in_loss(*case, estimator), exact(*case, reverse=reverse), dim=0))
        for case in cases(length)
    ]


def table() -> str:
    """The table of docs/losses.md: median and smallest cosine over random policies."""
    lines = [
        (
            "| tokens of a response | k1 in the reward, KL(pi, pi_ref) | k2 in the loss, KL(pi,"
            " pi_ref) | k3 in the loss, KL(pi_ref, pi) |"
        ),
        "|--:|---|---|---|",
    ]
    for length in LENGTHS:
        found = [cosines(length, "k2", reverse=True), cosines(length, "k3", reverse=False)]
        texts = [
            "1" if min(each) > 1 - 1e-9 else f"{median(each):.2f}, smallest {min(each):.2f}"
            for each in found
        ]
        lines.append(f"| {length} | 1 | {' | '.join(texts)} |")
    return "\n".join(lines)


def test_the_page_has_the_cosines_of_this_enumeration():
    page = (ROOT / "docs" / "losses.md").read_text(encoding="utf-8")
    assert table() in page
    counts = re.search(r"(\d+) random policies", page)
    assert counts
    assert int(counts[1]) == POLICIES


if __name__ == "__main__":
    print(table())
