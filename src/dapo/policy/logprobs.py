"""Log-probabilities and entropies of response tokens, from hidden states and the head's weights, chunk by chunk.

Where gradients are wanted, the caller takes each chunk through its loss and backward before the next one: the forward's
probabilities are then still there for the backward, and yet nothing of the size `[tokens, vocabulary]` ever exists.
"""

from collections.abc import Callable, Iterator
from itertools import chain
from statistics import fmean
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn.functional import linear
from transformers import PreTrainedModel

from dapo.policy.packed_attention import IMPLEMENTATION, unsupported_model_error, use_packed_attention
from dapo.policy.packing import Microbatch, in_callers_order, pack
from dapo.types import Sample

CHUNK_LOGITS = 2**26  # logits that exist at a time: 256 MB in float32, 1,365 positions of a vocabulary of 49,152

CUDA_CHUNK_LOGITS = 2**28
"""The same on a GPU, where each chunk also reads and writes the head's whole gradient: 1,766 positions of a vocabulary
of 152,000, so that the products of a microbatch of 16,384 tokens take ten passes over it."""

BLOCK_LOGITS = 2**21
"""Logits that elementwise work takes at a time on a CPU: its temporaries stay in the cache and their memory is reused.
On a GPU, where each operation is a kernel to launch, it takes the whole chunk."""

PACKED_TOLERANCE = {torch.float64: 1e-8, torch.float32: 1e-3, torch.bfloat16: 0.1}
"""Nats by which packed and plain log-probabilities may differ on average."""


def hidden_states(model: PreTrainedModel, microbatch: Microbatch) -> Tensor:
    """`[M, hidden]` the last hidden states that predict the microbatch's response tokens; differentiable."""
    outputs = model.base_model(
        input_ids=microbatch.input_ids.unsqueeze(0),
        position_ids=microbatch.positions.unsqueeze(0),
        use_cache=False,
        packed_attention_plan=microbatch.attention_plan,
    )
    return outputs.last_hidden_state[0].index_select(0, microbatch.predictors)


def score_tokens(
    hidden: Tensor,
    head: torch.nn.Module,
    targets: Tensor,
    rows: Tensor | None = None,
    *,
    temperature: float,
    differentiable_entropy: bool = False,
) -> tuple[Tensor, Tensor]:
    """`[n]` log pi(target) and `[m]` entropy in nats, both of `softmax(logits / temperature)`, for one chunk.

    The matmuls run in the type of the weights; everything else, and the results, is float32 (float64 for float64
    weights). Backward may run once.

    Args:
        hidden: `[m, hidden]`.
        head: a linear layer to the vocabulary, with or without bias.
        targets: `[n]` token ids.
        rows: `[n]` the hidden state that predicts each target, ascending; None: each its own.
        temperature: divides the logits.
        differentiable_entropy: whether the entropies carry a gradient.
    """
    bias = getattr(head, "bias", None)
    logprobs, entropies = _Score.apply(hidden, head.weight, bias, targets, rows, temperature, differentiable_entropy)
    return logprobs, entropies


def chunk_tokens(vocabulary: int, device_type: str) -> int:
    """The positions whose logits exist at a time on a device of that type: one at least."""
    return max(1, (CUDA_CHUNK_LOGITS if device_type == "cuda" else CHUNK_LOGITS) // vocabulary)


def chunk_bytes(vocabulary: int, device_type: str, dtype: torch.dtype) -> int:
    """The bytes per position of a chunk at their peak, which is the forward: all tensors as wide as the vocabulary.

    These are the logits in the weights' type `dtype`, their probabilities (in the logits' memory, unless that type is
    narrower than float32), and on a GPU also their logarithms, which a CPU has of one small block at a time. The
    backward holds no more.
    """
    wide = torch.promote_types(dtype, torch.float32)
    tensors = [dtype] if wide == dtype else [dtype, wide]
    if device_type == "cuda":
        tensors.append(wide)
    return vocabulary * sum(tensor.itemsize for tensor in tensors)


def chunks(num_tokens: int, vocabulary: int, device_type: str) -> Iterator[slice]:
    """Slices that cover `num_tokens` positions, each of `chunk_tokens` but for the last."""
    return _slices(num_tokens, chunk_tokens(vocabulary, device_type))


@torch.no_grad()
def token_logprobs(model: PreTrainedModel, microbatch: Microbatch, *, temperature: float) -> Tensor:
    """`[S]` log-probabilities of the microbatch's targets, float32 or float64, without a gradient."""
    return hidden_logprobs(hidden_states(model, microbatch), model.get_output_embeddings(), microbatch, temperature)


@torch.no_grad()
def hidden_logprobs(hidden: Tensor, head: Any, microbatch: Microbatch, temperature: float) -> Tensor:
    """`[S]` log-probabilities of the microbatch's targets from the hidden states `[M]` that predict them."""
    scores = []
    for part in chunks(len(hidden), len(head.weight), hidden.device.type):
        logits = linear(hidden[part], head.weight, getattr(head, "bias", None))
        for block in _blocks(logits):
            start, stop = part.start + block.start, part.start + block.stop
            of_block = microbatch.target_slice(slice(start, stop))
            log_p = _log_softmax(logits[block], temperature)
            scores.append(log_p[microbatch.rows[of_block] - start, microbatch.targets[of_block]])
    return torch.cat(scores)


def use_packed_forward(model: PreTrainedModel) -> None:
    """Switch `model` to packed attention, and check on a few tokens that it still computes the same.

    Raises ConfigError if it does not, as with an architecture that mixes tokens outside of attention or changes logits
    after the head.
    """
    if (plain := model.config._attn_implementation) != IMPLEMENTATION:
        use_packed_attention(model)
        check_packed_forward(model, plain, lambda ids: model(input_ids=ids, use_cache=False).logits, dtype=model.dtype)


@torch.no_grad()
def check_packed_forward(
    model: PreTrainedModel,
    plain: str,
    logits: Callable[[Tensor], Tensor],
    *,
    dtype: torch.dtype,
    sharded: Any = None,
) -> None:
    """Compare log-probabilities of packed sequences to those of single ones.

    Args:
        model: With packed attention.
        plain: The name of the attention that single sequences are computed with.
        logits: The model's own forward: `[1, T]` token ids -> `[1, T, V]`.
        dtype: The type that the model computes in.
        sharded: What computes instead of `model` where its weights are sharded over ranks, which all call this.

    Raises:
        ConfigError: They differ.
    """
    try:
        difference = _packed_difference(model, plain, logits, sharded or model)
    except torch.OutOfMemoryError:  # which is a RuntimeError
        raise
    except (TypeError, ValueError, RuntimeError) as error:
        raise unsupported_model_error(model, f"it does not run on packed sequences ({error})") from error
    if not difference <= PACKED_TOLERANCE[dtype]:
        raise unsupported_model_error(
            model, f"log-probabilities of packed sequences differ by {difference:.2g} nats from those of single ones"
        )


def _packed_difference(model: PreTrainedModel, plain: str, logits: Callable[[Tensor], Tensor], computes: Any) -> float:
    """The mean difference in nats between log-probabilities with packed and with `plain` attention."""
    ids = tuple((7 * i + 3) % model.config.get_text_config().vocab_size for i in range(15))
    prompts, responses = (ids[:3], ids[3:8]), (ids[8:10], ids[10:14], ids[14:])
    samples = [
        Sample(group, prompt, response, 0.0, 0.0, (), None, (True,) * len(response))
        for group, prompt in enumerate(prompts)
        for response in responses
    ]
    (microbatch,) = pack(samples, max_tokens=1000, device=model.device)
    packed = in_callers_order([microbatch], [token_logprobs(computes, microbatch, temperature=1.0)], len(samples))
    model.set_attn_implementation(plain)
    alone = [_plain_logprobs(logits, sample, model.device) for sample in samples]
    model.set_attn_implementation(IMPLEMENTATION)
    return fmean(abs(a - b) for a, b in zip(chain(*packed), chain(*alone), strict=True))


class _Score(torch.autograd.Function):
    """With p = softmax(z), z = logits / temperature, entropy H and target y:

    d log p_y / dz_v = [v = y] - p_v        dH / dz_v = -p_v (log p_v + H)
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        targets: Tensor,
        rows: Tensor | None,
        temperature: float,
        differentiable_entropy: bool,
    ) -> tuple[Tensor, Tensor]:
        logits = linear(hidden, weight, bias)  # [m, V]
        wide = torch.promote_types(logits.dtype, torch.float32)
        p = logits if logits.dtype == wide else torch.empty_like(logits, dtype=wide)
        logprobs, entropies = p.new_empty(len(targets)), p.new_empty(len(p))
        cells = None if rows is None else rows * p.shape[1] + targets  # [n] each target's place among the logits
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
                of_block = cells[chosen] - part.start * p.shape[1] if part.start else cells[chosen]
                torch.index_select(log_p.view(-1), 0, of_block, out=logprobs[chosen])
            torch.exp(log_p, out=block)
            torch.sum(log_p.mul_(block), dim=1, out=entropies[part])
        entropies.neg_()
        ctx.save_for_backward(hidden, weight, bias, targets, rows, cells, entropies)
        ctx.probabilities = p  # not a saved tensor: backward overwrites it
        ctx.temperature = temperature
        ctx.set_materialize_grads(differentiable_entropy)
        if not differentiable_entropy:
            ctx.mark_non_differentiable(entropies)
        return logprobs, entropies

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_logprobs: Tensor, grad_entropies: Tensor | None) -> tuple[Tensor | None, ...]:
        hidden, weight, _, targets, rows, cells, entropies = ctx.saved_tensors
        p = ctx.probabilities  # [m, V], becomes dloss/dlogits in place
        del ctx.probabilities
        if ctx.temperature != 1:
            grad_logprobs = grad_logprobs / ctx.temperature
            grad_entropies = None if grad_entropies is None else grad_entropies / ctx.temperature
        if cells is None:
            negated = -grad_logprobs  # [m]
        else:
            negated = torch.zeros_like(entropies).index_add_(0, rows, grad_logprobs, alpha=-1)
        for part in _blocks(p):
            block = p[part]
            if grad_entropies is None:
                block.mul_(negated[part, None])
            else:
                # xlogy: a probability that underflowed to 0 has p log p = 0, not nan
                neg_entropy_grad = torch.xlogy(block, block).addcmul_(block, entropies[part, None])  # -dH/dz
                block.mul_(negated[part, None]).addcmul_(neg_entropy_grad, -grad_entropies[part, None])
        if cells is None:
            p.scatter_add_(1, targets[:, None], grad_logprobs[:, None])
        else:
            p.view(-1).scatter_add_(0, cells, grad_logprobs)
        grad = p.to(weight.dtype)
        # a frozen head saves a third of the matmuls
        _, for_weight, for_bias, *_ = ctx.needs_input_grad
        grad_weight = grad.T @ hidden if for_weight else None
        return grad @ weight, grad_weight, grad.sum(dim=0) if for_bias else None, None, None, None, None


def _target_slice(part: slice, rows: Tensor, num_rows: int) -> slice:
    """The targets of some of the rows; of all, as on a GPU, nothing is read."""
    if part.stop - part.start == num_rows:
        return slice(0, len(rows))
    return slice(*torch.searchsorted(rows, rows.new_tensor([part.start, part.stop])).tolist())


def _log_softmax(logits: Tensor, temperature: float) -> Tensor:
    scaled = logits.to(torch.promote_types(logits.dtype, torch.float32))
    return (scaled if temperature == 1 else scaled / temperature).log_softmax(dim=1)


def _blocks(logits: Tensor) -> Iterator[slice]:
    size = len(logits) if logits.device.type == "cuda" else BLOCK_LOGITS // logits.shape[1]
    return _slices(len(logits), max(1, size))


def _slices(length: int, size: int) -> Iterator[slice]:
    return (slice(start, min(start + size, length)) for start in range(0, length, size))


def _plain_logprobs(logits: Callable[[Tensor], Tensor], sample: Sample, device: torch.device) -> list[float]:
    """A response's log-probabilities from the model's own forward over the single sequence."""
    ids = torch.tensor([(*sample.prompt_ids, *sample.response_ids)], device=device)
    of_response = logits(ids)[0, len(sample.prompt_ids) - 1 : -1]  # [response, V]
    return _log_softmax(of_response, 1.0).gather(1, ids[0, len(sample.prompt_ids) :, None]).flatten().tolist()
