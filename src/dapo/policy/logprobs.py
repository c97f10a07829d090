"""Log-probabilities and entropies of tokens from hidden states and a head, chunk by chunk.

For gradients, the caller runs loss and backward of each chunk before the next chunk: the backward
reuses the forward's probabilities, and no tensor of the size `[tokens, vocabulary]` ever exists.
"""

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from transformers import PreTrainedModel

from dapo.libs.cpu_kernels import DTYPES, TokenScores, is_compiled, linear
from dapo.libs.cpu_kernels.compiled import serves
from dapo.policy.packing import Microbatch

# logits in memory at a time: 256 MB in float32, 1,365 positions of a vocabulary of 49,152
CHUNK_LOGITS = 2**26
CUDA_CHUNK_LOGITS = 2**28
"""The same on a GPU, where each chunk also reads and writes the head's whole gradient: 1,766
positions of a vocabulary of 152,000, so that a microbatch of 16,384 tokens reads and writes that
gradient ten times.
"""
BLOCK_LOGITS = 2**21
"""Logits per elementwise operation on a CPU, so that temporaries stay in the cache and their memory
is reused. On a GPU, where each operation launches a kernel, it is the whole chunk.
"""


def hidden_states(model: PreTrainedModel, microbatch: Microbatch) -> Tensor:
    """Return `[M, hidden]` last hidden states that predict response tokens; differentiable."""
    outputs = model.base_model(
        input_ids=microbatch.input_ids.unsqueeze(0),
        position_ids=microbatch.positions.unsqueeze(0),
        use_cache=False,
        packed_attention_plan=microbatch.attention_plan,
    )
    return outputs.last_hidden_state[0].index_select(0, microbatch.predictors)


def score_tokens(
    hidden: Tensor,
    head: Any,
    targets: Tensor,
    rows: Tensor | None = None,
    *,
    temperature: float,
    differentiable_entropy: bool = False,
    reference: tuple[Tensor, Any] | None = None,
) -> tuple[Tensor, ...]:
    """Return `[n]` log pi(target) and `[m]` entropies in nats for one chunk.

    Args:
        hidden: `[m, hidden]` states.
        head: a linear layer to the vocabulary, with or without bias.
        targets: `[n]` token ids.
        rows: `[n]` the index of the hidden state that predicts each target, ascending; None: each
            its own.
        temperature: the distribution is softmax(logits / temperature).
        differentiable_entropy: whether entropies carry a gradient.
        reference: the hidden states `[m, width]` and the head of a reference.

    The matmuls run in the type of the weights; everything else, and the results, is float32
    (float64 for float64 weights). Backward may run once.

    With a `reference` the third tensor is `[m]` KL(policy || reference) in nats, which carries a
    gradient for the policy alone: over the entries that both vocabularies have, with both
    distributions renormalised there. Entries that only one has pad it and belong to no token.
    """
    bias = getattr(head, "bias", None)
    scores: tuple[Tensor, ...]
    if reference is None and serves(hidden) and hidden.dtype == head.weight.dtype:
        row_of_target = rows
        if row_of_target is None:
            row_of_target = torch.arange(len(hidden))
        # the number of targets of the rows up to each
        ends = torch.bincount(row_of_target, minlength=len(hidden)).cumsum(0)
        logits = linear(hidden, head.weight, bias)
        scores = TokenScores.apply(logits, targets, ends, temperature, differentiable_entropy)
        return scores
    reference_logits = None  # [m, V of the reference]
    if reference is not None:
        states, layer = reference
        with torch.no_grad():
            reference_logits = linear(states, layer.weight, getattr(layer, "bias", None))
    settings = _Settings(temperature, differentiable_entropy, reference_logits)
    scores = _Score.apply(hidden, head.weight, bias, targets, rows, settings)
    return scores


def chunk_tokens(vocabulary: int, device_type: str) -> int:
    """Return the number of positions, at least 1, whose logits are in memory at a time."""
    logits = CUDA_CHUNK_LOGITS if device_type == "cuda" else CHUNK_LOGITS
    return max(1, logits // vocabulary)


def chunk_bytes(vocabulary: int, device_type: str, dtype: torch.dtype) -> int:
    """Return the peak bytes per position of a chunk: all tensors as wide as the vocabulary.

    The peak is reached in the forward.

    These are the logits in the weights' type `dtype`, the probabilities (in the logits' memory,
    unless that type is narrower than float32), and on a GPU also their logarithms; a CPU computes
    those block by block, and its compiled kernel also the probabilities. The backward needs no
    more.
    """
    if device_type == "cpu" and dtype in DTYPES and is_compiled():
        return vocabulary * dtype.itemsize
    wide = torch.promote_types(dtype, torch.float32)
    tensors = [dtype] if wide == dtype else [dtype, wide]
    if device_type == "cuda":
        tensors.append(wide)
    return vocabulary * sum(tensor.itemsize for tensor in tensors)


def chunks(
    num_tokens: int, vocabulary: int, device_type: str, *, tensors: int = 1
) -> Iterator[slice]:
    """Return slices that cover `num_tokens` positions, each of `chunk_tokens` except the last.

    Args:
        num_tokens: the number of positions.
        vocabulary: the number of entries of the head.
        device_type: `cpu` or `cuda`.
        tensors: the number of tensors as wide as the vocabulary: three with a reference. A chunk
            with more is shorter, so that none needs more memory.
    """
    return _slices(num_tokens, chunk_tokens(tensors * vocabulary, device_type))


@torch.no_grad()
def token_logprobs(model: PreTrainedModel, microbatch: Microbatch, *, temperature: float) -> Tensor:
    """Return `[S]` log-probabilities of the targets, float32 or float64, without a gradient."""
    hidden = hidden_states(model, microbatch)
    head = model.get_output_embeddings()
    return hidden_logprobs(hidden, head, microbatch, temperature)


@torch.no_grad()
def hidden_logprobs(
    hidden: Tensor, head: Any, microbatch: Microbatch, temperature: float
) -> Tensor:
    """Return `[S]` log-probabilities of the targets from hidden states `[M]`.

    Args:
        hidden: the states that predict the targets.
        head: a linear layer to the vocabulary.
        microbatch: has the targets and their rows among the states.
        temperature: the distribution is softmax(logits / temperature).
    """
    scores = []
    for part in chunks(len(hidden), len(head.weight), hidden.device.type):
        targets = microbatch.targets[microbatch.target_slice(part)]
        rows = microbatch.local_rows(part)
        logprobs, *_ = score_tokens(hidden[part], head, targets, rows, temperature=temperature)
        scores.append(logprobs)
    return torch.cat(scores)


class _Settings(NamedTuple):
    temperature: float
    differentiable_entropy: bool
    reference_logits: Tensor | None


class _Score(torch.autograd.Function):
    """The scores of `score_tokens` with their derivatives.

    With p = softmax(z), z = logits / temperature, entropy H, target y, q of the reference, and
    K = KL(p || q):

        d log p_y / dz_v = [v = y] - p_v
        dH / dz_v = -p_v (log p_v + H)
        dK / dz_v = p_v (log p_v - log q_v - K)

    Where the policy has more entries than the reference, the p of K is p_v / sum of p over the
    common entries C, and dK / dz_v = 0 beyond C.
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        targets: Tensor,
        rows: Tensor | None,
        settings: "_Settings",
    ) -> tuple[Tensor, ...]:
        temperature, differentiable_entropy, reference_logits = settings
        logits = linear(hidden, weight, bias)  # [m, V]
        wide = torch.promote_types(logits.dtype, torch.float32)
        # probabilities take the memory of the logits if their type is wide enough
        p = logits if logits.dtype == wide else torch.empty_like(logits, dtype=wide)
        width = p.shape[1]
        logprobs = p.new_empty(len(targets))
        entropies = p.new_empty(len(p))
        differences, divergences, shares = _comparison_memory(p, reference_logits)
        # [n] each target's place among the logits
        cells = None if rows is None else rows * width + targets
        for part in _blocks(logits):
            block = p[part]
            if p is not logits:
                block.copy_(logits[part])
            if temperature != 1:
                block.div_(temperature)
            log_p = block.log_softmax(dim=1)  # [block, V]
            if rows is None or cells is None:
                torch.gather(log_p, 1, targets[part, None], out=logprobs[part, None])
            else:
                chosen = _target_slice(part, rows, len(p))
                block_cells = cells[chosen]
                if part.start:
                    block_cells = block_cells - part.start * width
                torch.index_select(log_p.view(-1), 0, block_cells, out=logprobs[chosen])
            torch.exp(log_p, out=block)
            # before `log_p` is overwritten
            if differences is not None and divergences is not None and reference_logits is not None:
                common = differences.shape[1]
                log_q = _log_softmax(reference_logits[part, :common], temperature)
                share = None if shares is None else shares[part]
                _compare(block, log_p, log_q, differences[part], divergences[part], share)
            torch.sum(log_p.mul_(block), dim=1, out=entropies[part])
        entropies.neg_()
        ctx.save_for_backward(
            hidden, weight, bias, targets, rows, cells, entropies, divergences, shares
        )
        ctx.probabilities = p
        ctx.differences = differences  # not saved tensors: backward overwrites them
        ctx.temperature = temperature
        ctx.differentiable_entropy = differentiable_entropy
        ctx.set_materialize_grads(differentiable_entropy or divergences is not None)
        if not differentiable_entropy:
            ctx.mark_non_differentiable(entropies)
        return (logprobs, entropies) if divergences is None else (logprobs, entropies, divergences)

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any,
        grad_logprobs: Tensor,
        grad_entropies: Tensor | None,
        grad_divergences: Tensor | None = None,
    ) -> tuple[Tensor | None, ...]:
        hidden, weight, _, targets, rows, cells, entropies, divergences, shares = ctx.saved_tensors
        p = ctx.probabilities
        differences = ctx.differences  # [m, V], p becomes dloss/dlogits in place
        del ctx.probabilities, ctx.differences
        if not ctx.differentiable_entropy:
            grad_entropies = None
        if ctx.temperature != 1:
            grad_logprobs = grad_logprobs / ctx.temperature
            grad_entropies = _divided(grad_entropies, ctx.temperature)
            grad_divergences = _divided(grad_divergences, ctx.temperature)
        if grad_divergences is not None and shares is not None:
            # p is p_v / share in K, so each derivative has the factor
            grad_divergences = grad_divergences / shares
        if cells is None:
            negated = -grad_logprobs  # [m]
        else:
            negated = torch.zeros_like(entropies).index_add_(0, rows, grad_logprobs, alpha=-1)
        for part in _blocks(p):
            block = p[part]
            if differences is not None and grad_divergences is not None:
                # dK/dz, in the memory of the differences, before p is overwritten
                divergence_grad = differences[part].sub_(divergences[part, None])
                divergence_grad.mul_(block[:, : differences.shape[1]])
                divergence_grad.mul_(grad_divergences[part, None])
            if grad_entropies is None:
                block.mul_(negated[part, None])
            else:
                # xlogy: a probability that underflowed to 0 has p log p = 0, not nan
                # -dH/dz
                neg_entropy_grad = torch.xlogy(block, block).addcmul_(block, entropies[part, None])
                block.mul_(negated[part, None])
                block.addcmul_(neg_entropy_grad, -grad_entropies[part, None])
            if differences is not None and grad_divergences is not None:
                block[:, : differences.shape[1]].add_(differences[part])
        if cells is None:
            p.scatter_add_(1, targets[:, None], grad_logprobs[:, None])
        else:
            p.view(-1).scatter_add_(0, cells, grad_logprobs)
        grad = p.to(weight.dtype)
        # a frozen head saves a third of the matmuls
        _, for_weight, for_bias, *_ = ctx.needs_input_grad
        grad_weight = grad.T @ hidden if for_weight else None
        grad_bias = grad.sum(dim=0) if for_bias else None
        # neither targets, rows nor settings have a gradient
        return grad @ weight, grad_weight, grad_bias, None, None, None


def _comparison_memory(
    p: Tensor, reference_logits: Tensor | None
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Return the tensors that `_compare` fills, for the C entries that both vocabularies have.

    They are `[m, C]` differences of logarithms, `[m]` divergences, and where the policy has more
    entries `[m]` shares of p; None without a reference.
    """
    if reference_logits is None:
        return None, None, None
    size, width = p.shape
    common = min(width, reference_logits.shape[1])
    shares = p.new_empty(size) if common < width else None
    return p.new_empty(size, common), p.new_empty(size), shares


def _divided(gradient: Tensor | None, temperature: float) -> Tensor | None:
    return None if gradient is None else gradient / temperature


def _compare(
    p: Tensor,
    log_p: Tensor,
    log_q: Tensor,
    differences: Tensor,
    divergences: Tensor,
    shares: Tensor | None,
) -> None:
    """Compute KL(p || q) over the first C entries, which both distributions have.

    Args:
        p: `[m, V]` probabilities.
        log_p: their logarithms.
        log_q: `[m, C]` logarithms of the reference.
        differences: `[m, C]`, becomes log p - log q.
        divergences: `[m]`, becomes the divergence.
        shares: `[m]`, becomes the sum of p over these entries, by which p is renormalised; None: V
            is C.
    """
    common = log_p[:, : log_q.shape[1]]
    torch.sub(common, log_q, out=differences)
    if shares is not None:
        log_shares = common.logsumexp(dim=1)
        differences.sub_(log_shares[:, None])
        # a share that underflows leaves a gradient of 0, not nan
        torch.exp(log_shares, out=shares).clamp_(min=torch.finfo(shares.dtype).tiny)
    torch.linalg.vecdot(p[:, : log_q.shape[1]], differences, out=divergences)
    if shares is not None:
        divergences.div_(shares)


def _target_slice(part: slice, rows: Tensor, num_rows: int) -> slice:
    """Return the targets of a slice of the rows.

    A slice of all rows, as on a GPU, reads nothing from the device.
    """
    if part.stop - part.start == num_rows:
        return slice(0, len(rows))
    bounds = torch.searchsorted(rows, rows.new_tensor([part.start, part.stop]))
    first, last = bounds.tolist()
    return slice(first, last)


def _log_softmax(logits: Tensor, temperature: float) -> Tensor:
    scores = logits.to(torch.promote_types(logits.dtype, torch.float32))
    if temperature != 1:
        scores = scores / temperature
    return scores.log_softmax(dim=1)


def _blocks(logits: Tensor) -> Iterator[slice]:
    """Return the rows of each elementwise operation."""
    size = len(logits)
    if logits.device.type != "cuda":
        size = BLOCK_LOGITS // logits.shape[1]
    return _slices(len(logits), max(1, size))


def _slices(length: int, size: int) -> Iterator[slice]:
    for start in range(0, length, size):
        yield slice(start, min(start + size, length))
