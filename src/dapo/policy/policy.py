"""The trained model: scores before a step, and the updates of Algorithm 1, line 11."""

import copy
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dapo.algo.entropy import EntropyBonus
from dapo.algo.kl import token_kl
from dapo.config import Config, LossConfig
from dapo.core.memory import FreedMemory, explain_out_of_memory
from dapo.core.ranges import select
from dapo.policy.checkpoint import (
    ReadTensors,
    State,
    StateCopy,
    load_optimizer,
    read_counters,
    read_tensors,
    state_of,
    write_state,
)
from dapo.policy.critic import Critic
from dapo.policy.custom_loss import CustomLoss
from dapo.policy.hf_io import NamedWeights, layout_of
from dapo.policy.logprobs import (
    chunks,
    hidden_logprobs,
    hidden_states,
    score_tokens,
    token_logprobs,
)
from dapo.policy.lora import add_adapters
from dapo.policy.minibatch import loss_tokens, partition_minibatch, whole_responses
from dapo.policy.model import LESS_ON_A_GPU, LoadedModel, load_teacher
from dapo.policy.objective import (
    add_sums,
    add_values,
    gradient_terms,
    is_valid_update,
    knows_responses,
    objective_gradient,
    objective_metrics,
    objective_sums,
    require_engine_agrees,
)
from dapo.policy.optim import MasterAdamW, learning_rate, schedule_of
from dapo.policy.packed_forward import recompute_layers, use_packed_forward
from dapo.policy.packing import Microbatch, RankMicrobatch, in_callers_order, pack, pack_microbatch
from dapo.policy.reference import REFERENCE, REFERENCE_STEP, Reference
from dapo.types import Sample


def peak_gpu_memory(device: torch.device, cuda: Any = torch.cuda) -> dict[str, float]:
    """Return `time/peak_gpu_memory_gib` since the last call on a GPU; nothing on a CPU."""
    if device.type != "cuda" or not cuda.is_available():
        return {}
    peak = cuda.max_memory_allocated(device)
    cuda.reset_peak_memory_stats(device)
    return {"time/peak_gpu_memory_gib": round(peak / 2**30, 3)}


ENTROPY_BONUS = "entropy_bonus"  # checkpoint key: the state of `EntropyBonus`
SMALLER_MICROBATCHES = "lower train.microbatch_tokens or set train.recompute=true"


class PolicyCore:
    """pi_theta and its optimiser: the parts shared by a policy in one process and a sharded one."""

    @explain_out_of_memory(
        torch.OutOfMemoryError, "preparing the policy", LESS_ON_A_GPU, then="start again"
    )
    def __init__(
        self, config: Config, loaded: LoadedModel, custom_loss: CustomLoss | None = None
    ) -> None:
        """Take ownership of `loaded.model` and train it in place, with the loss of `loss.function`.

        With `loss.kl_coef` above 0 a frozen copy of the model becomes the reference, unless
        `loss.reference.model` names another. To resume, therefore, construct the policy from the
        initial model and then call `load`. With `model.lora` adapters are trained, and the
        reference is the model without them. Raises ConfigError for models that cannot be packed,
        recomputed or adapted.
        """
        assert (custom_loss is None) == (config.loss.function is None), "loss.function is loaded"
        self._config = config
        self._custom_loss = custom_loss
        self._model: Any = loaded.model
        self._compute_dtype: torch.dtype = loaded.model.dtype
        lora = config.model.lora
        self._adapters = None
        if lora is not None:
            self._adapters = add_adapters(self._model, lora, seed=config.train.seed)
        self._use_packed_forward()
        self._reference: Reference | None = None
        # with adapters the reference is the model without them, which needs no copy
        needs_model = config.loss.teacher is not None or self._adapters is None
        if config.has_kl and config.loss.server is None and needs_model:
            frozen = self._make_reference()
            self._reference = Reference(
                frozen, self._local_weights(frozen), every=config.loss.reference_steps
            )
        target = config.loss.entropy_target
        self._entropy_bonus = None if target is None else EntropyBonus(target)
        self.critic: Critic | None = None
        """The value function of `advantage.estimator: gae`, also trained by each update."""
        if config.has_critic:
            self.critic = Critic(config, self._model)
        # before the layers are sharded (`recompute_layers`)
        if config.train.recompute:
            recompute_layers(self._model)
            if self.critic is not None:
                recompute_layers(self.critic.model)
        self._optimizer = self._make_optimizer()
        self._copy = StateCopy()
        self._freed_memory = FreedMemory()

    @property
    def skipped_in_a_row(self) -> int:
        """Return the number of skipped updates in a row, of the policy or of its critic."""
        critic_skips = 0 if self.critic is None else self.critic.skipped_in_a_row
        return max(self._optimizer.skipped_in_a_row, critic_skips)

    def _use_packed_forward(self) -> None:
        use_packed_forward(self._model)

    def _make_reference(self) -> Any:
        """Return the frozen model of `loss.reference.model`, or a copy of the initial policy."""
        if self._config.loss.teacher is None:
            return copy.deepcopy(self._model).requires_grad_(False)
        loaded = load_teacher(self._config, device=self._model.device, dtype=self._compute_dtype)
        use_packed_forward(loaded.model)
        return loaded.model.requires_grad_(False)

    def _make_optimizer(self) -> MasterAdamW:
        lora = None if self._adapters is None else self._adapters.settings
        return MasterAdamW(self._model, self._config.optim, lora=lora)

    def _reference_logprobs(self, microbatch: Microbatch) -> Tensor:
        """Return `[S]` log-probabilities of the frozen copy, or the model without adapters."""
        if self._reference is not None:
            return self._score(microbatch, self._reference.model)
        assert self._adapters is not None
        with self._adapters.disabled():
            return self._score(microbatch, self._model)

    @contextmanager
    def _reference_states(self, microbatch: Microbatch) -> Iterator[tuple[Tensor, Any]]:
        """Give the reference's states `[M, width]` and its head, for a divergence."""
        model = self._model
        disabled_adapters: AbstractContextManager[None] = nullcontext()
        if self._reference is not None:
            model = self._reference.model
        elif self._adapters is not None:
            disabled_adapters = self._adapters.disabled()
        with torch.no_grad(), disabled_adapters:
            states = hidden_states(model, microbatch)
        # the adapters are enabled again: a head has none
        yield states, model.get_output_embeddings()

    def _token_kl(self, microbatch: Microbatch) -> Tensor:
        """Return `[S]` estimates of the divergence from the policy to the reference."""
        logprobs = self._score(microbatch, self._model)
        reference = self._reference_logprobs(microbatch)
        every_token = torch.ones_like(logprobs, dtype=torch.bool)
        return token_kl(logprobs, reference, every_token, estimator=self._config.loss.kl_estimate)

    def _local_weights(self, model: Any) -> dict[str, Tensor]:
        """Return the weights that this process holds of a model."""
        return {name: weight.detach() for name, weight in model.named_parameters()}

    def _begin_step(self, step: int) -> None:
        """Update the reference and the entropy weight before step `step` uses them."""
        if self._entropy_bonus is not None:
            self._entropy_bonus = self._entropy_bonus.at_step(step)
        if self._reference is not None and self._reference.is_updated:
            self._reference.sync_to(self._optimizer.model_weights, step=step)

    @property
    def _loss(self) -> LossConfig:
        """Return the options of the next update's loss, with the current entropy weight."""
        loss = self._config.loss
        if loss.entropy_target is None or self._entropy_bonus is None:
            return loss
        return loss.model_copy(update={"entropy_coef": self._entropy_bonus.weight})

    def _state(self) -> State:
        """Return the content of a checkpoint. Later updates change its tensors in place."""
        tensors, counters = state_of(self._optimizer)
        if self._entropy_bonus is not None:
            counters = {**counters, ENTROPY_BONUS: asdict(self._entropy_bonus)}
        if self._reference is not None and self._reference.is_updated:
            tensors = {**tensors, REFERENCE: self._reference.weights}
            counters = {**counters, REFERENCE_STEP: self._reference.step}
        return State(tensors, counters)

    def _load(self, directory: Path, read: ReadTensors = read_tensors) -> None:
        """Restore a checkpoint; a reference or entropy bonus that it lacks stays as it is."""
        load_optimizer(self._optimizer, directory, read=read)
        counters = read_counters(directory)
        is_stored = REFERENCE_STEP in counters
        if self._reference is not None and self._reference.is_updated and is_stored:
            weights = read(directory, REFERENCE, self._reference.weights)
            self._reference.restore(weights, step=counters[REFERENCE_STEP])
        stored_bonus = counters.get(ENTROPY_BONUS)
        if self._entropy_bonus is not None and stored_bonus is not None:
            # the target is an option, which a resumed run may change
            state = stored_bonus | {"target": self._entropy_bonus.target}
            self._entropy_bonus = EntropyBonus(**state)

    def _score(self, microbatch: Microbatch, model: Any) -> Tensor:
        return token_logprobs(model, microbatch, temperature=self._config.rollout.temperature)

    def _apply_gradient(self, sums: Mapping[str, float], *, step: int) -> dict[str, float]:
        """Update the weights by the accumulated gradient unless it is invalid; return the metrics.

        `sums` are the loss sums and the optimiser's measurements, added over all ranks.
        """
        optim = self._config.optim
        rate = learning_rate(step, lr=optim.lr, **schedule_of(optim, self._config.train.num_steps))
        metrics = objective_metrics(sums, self._config.loss)
        require_engine_agrees(metrics, self._config.loss)
        if self._config.is_supervised and sums["tokens"]:
            metrics["loss/nll"] = sums["nll"] / sums["tokens"]
        if self._entropy_bonus is not None:
            metrics["loss/entropy_coef"] = self._entropy_bonus.weight
        is_valid = is_valid_update(metrics, self._config.loss)
        norm, skipped = self._optimizer.update(rate, sums, is_valid=is_valid)
        # without trained tokens there is no entropy
        entropy = metrics.get("loss/entropy")
        if self._entropy_bonus is not None and entropy is not None and not skipped:
            self._entropy_bonus = self._entropy_bonus.after(entropy)
        metrics |= {"optim/grad_norm": norm, "optim/lr": rate, "optim/skipped": float(skipped)}
        return metrics | self._peak_gpu_memory()

    def _peak_gpu_memory(self) -> dict[str, float]:
        return peak_gpu_memory(self._model.device)

    @contextmanager
    def _head(self) -> Iterator[Any]:
        """Give the layer that scores chunks; its gradient is complete when the block ends."""
        yield self._model.get_output_embeddings()

    def _backward(
        self, rank_microbatch: RankMicrobatch, custom: CustomLoss | None = None
    ) -> Mapping[str, Tensor | float]:
        """Accumulate the gradient of a microbatch's loss; return the sums over its trained tokens.

        The loss is a sum over tokens, so each chunk of predictors passes forward and backward
        through head and loss on its own; the layers' backward then runs once for all chunks. What
        is of whole responses, which a chunk may cut, is computed before, as a factor of each token.
        `custom` is the user's loss; it is not called for the masked token of a dummy microbatch.
        """
        microbatch = pack_microbatch(rank_microbatch, self._model.device)
        loss = self._loss
        chunk_loss = custom if rank_microbatch.indices else None
        dtype = torch.promote_types(self._model.dtype, torch.float32)
        tokens = loss_tokens(rank_microbatch, microbatch, loss, dtype, self._model.device)
        if loss.has_kl_term and not loss.has_full_kl and "reference" not in tokens:
            tokens["reference"] = self._reference_logprobs(microbatch)
        responses = None
        if loss.needs_whole_responses:
            responses = whole_responses(microbatch, self._model.device)
        scores = []
        gradients = []
        parts = []
        with ExitStack() as stack:
            reference = None
            if loss.has_full_kl:
                reference = stack.enter_context(self._reference_states(microbatch))
            hidden = hidden_states(self._model, microbatch)  # [M, hidden]
            head = stack.enter_context(self._head())
            logprobs_before = None
            if not knows_responses(tokens, loss):  # a pass through the head before
                temperature = self._config.rollout.temperature
                logprobs_before = hidden_logprobs(hidden, head, microbatch, temperature)
            terms = gradient_terms(tokens, loss, responses, logprobs_before)
            # as wide as the vocabulary: the logits, with a reference also its and their difference
            tensors = 1 if reference is None else 3
            for part in chunks(len(hidden), len(head.weight), hidden.device.type, tensors=tensors):
                # a leaf of its own: the layers' backward runs once, after the last chunk
                inputs = hidden.detach()[part].requires_grad_()
                score = self._score_chunk(inputs, head, microbatch, part, reference)
                scores.append([values.detach() for values in score])
                slopes, part_values = self._slopes(
                    scores[-1][0], terms, microbatch, part, chunk_loss
                )
                parts.append(part_values)
                torch.autograd.backward([score[k] for k in slopes], list(slopes.values()))
                assert inputs.grad is not None
                gradients.append(inputs.grad)
        # after the head's block: its gathered weights are complete then
        hidden.backward(torch.cat(gradients))
        logprobs, entropies, divergences = _joined_scores(scores, microbatch)
        values = None if custom is None else add_values(parts)
        sums = objective_sums(
            logprobs,
            entropies,
            terms,
            loss,
            values,
            divergences,
            responses=responses,
            with_nll=self._config.is_supervised,
        )
        if not rank_microbatch.indices:
            return sums
        return {
            **sums,
            "positions": microbatch.num_tokens,
            "separate_positions": microbatch.separate_tokens,
        }

    def _score_chunk(
        self,
        inputs: Tensor,
        head: Any,
        microbatch: Microbatch,
        part: slice,
        reference: tuple[Tensor, Any] | None,
    ) -> Sequence[Tensor]:
        """Return the scores of a chunk of hidden states (`score_tokens`)."""
        reference_chunk = None
        if reference is not None:
            states, reference_head = reference
            reference_chunk = (states[part], reference_head)
        return score_tokens(
            inputs,
            head,
            microbatch.targets[microbatch.target_slice(part)],
            microbatch.local_rows(part),
            temperature=self._config.rollout.temperature,
            differentiable_entropy=self._loss.entropy_coef > 0,
            reference=reference_chunk,
        )

    def _slopes(
        self,
        logprobs: Tensor,
        terms: Mapping[str, Tensor],
        microbatch: Microbatch,
        part: slice,
        custom: CustomLoss | None,
    ) -> tuple[dict[int, Tensor], Mapping[str, Tensor | float]]:
        """Return a chunk's derivatives by score, by index, and the sums of a custom loss."""
        chosen = microbatch.target_slice(part)
        part_terms = {name: values[chosen] for name, values in terms.items()}
        gradient = objective_gradient(logprobs, part_terms, self._loss, custom)
        slopes = {0: gradient.by_logprob}
        if gradient.by_entropy is not None:
            slopes[1] = microbatch.sum_over_targets(gradient.by_entropy, part)
        if gradient.by_divergence is not None:
            slopes[2] = microbatch.sum_over_targets(gradient.by_divergence, part)
        return slopes, gradient.values


def _joined_scores(
    scores: Sequence[Sequence[Tensor]], microbatch: Microbatch
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Join the scores of all chunks: `[S]` log-probabilities, entropies and divergences, if any."""
    logprobs, entropies, *divergences = map(torch.cat, zip(*scores, strict=True))
    # one per predictor, which may predict several tokens
    token_divergences = None
    if divergences:
        token_divergences = divergences[0][microbatch.rows]
    return logprobs, entropies[microbatch.rows], token_divergences


class Policy(PolicyCore):
    """A policy in one process."""

    def weights(self, *, version: int) -> NamedWeights:
        """Return the weights for engines: adapters merged, in the type of the computation.

        They are read when they are iterated over. `version` is ignored here: it names weights that
        a trainer group writes to a file. Checkpoints hold the master weights unrounded (`save`).
        Raises NumericsError if a weight is not finite.
        """
        self._optimizer.require_finite()
        if self._adapters is not None:
            return self._adapters.merged(self._optimizer.master_weights, self._compute_dtype)
        weights = self._optimizer.model_weights
        layout = layout_of(weights, self._optimizer.tied)

        def read() -> Iterator[tuple[str, Tensor]]:
            for name, weight in weights.items():
                yield name, weight.detach()

        return NamedWeights(read, layout)

    @explain_out_of_memory(
        torch.OutOfMemoryError, "the old log-probabilities", SMALLER_MICROBATCHES
    )
    def record_old_logprobs(self, samples: Sequence[Sample]) -> list[Sample]:
        """Return the samples with `old_logprobs`: pi_old of a step with several updates (Eq. 6)."""
        rows = self._score_all(samples, lambda microbatch: self._score(microbatch, self._model))
        pairs = zip(samples, rows, strict=True)
        return [replace(sample, old_logprobs=row) for sample, row in pairs]

    def values(self, samples: Sequence[Sample]) -> list[Sequence[float]]:
        """Return the critic's value of each response token, one row per sample.

        Needs `advantage.estimator: gae`.
        """
        assert self.critic is not None, "values need a critic: advantage.estimator=gae"
        return self.critic.values(samples)

    def reference_logprobs(self, samples: Sequence[Sample], *, step: int) -> list[Sequence[float]]:
        """Return log-probabilities of the samples' tokens under the reference of step `step`."""
        self._begin_step(step)
        return self._score_all(samples, self._reference_logprobs)

    @explain_out_of_memory(
        torch.OutOfMemoryError, "the divergence to the reference", SMALLER_MICROBATCHES
    )
    def token_kl(self, samples: Sequence[Sample], *, step: int) -> list[Sequence[float]]:
        """Return the divergence from the reference at each token, by `loss.kl_estimator`.

        Tokens that are masked or were not sampled are included, and `loss.kl_coef` is not applied.
        Call it before step `step` updates the policy; the reference is that step's. There is no
        gradient.
        """
        self._begin_step(step)
        return self._score_all(samples, self._token_kl)

    def response_kl(self, samples: Sequence[Sample], *, step: int) -> list[float]:
        """Return the sum of `token_kl` over each sample's sampled tokens."""
        rows = zip(self.token_kl(samples, step=step), samples, strict=True)
        return [math.fsum(select(row, sample.sampled)) for row, sample in rows]

    def _score_all(
        self, samples: Sequence[Sample], score: Callable[[Microbatch], Tensor]
    ) -> list[Sequence[float]]:
        """Return the scores of all samples' response tokens, a row per sample."""
        max_tokens = self._config.microbatch_tokens
        microbatches = pack(samples, max_tokens=max_tokens, device=self._model.device)
        scores = [score(microbatch) for microbatch in microbatches]
        return in_callers_order(microbatches, scores, len(samples))

    @explain_out_of_memory(torch.OutOfMemoryError, "an update of the policy", SMALLER_MICROBATCHES)
    def update(
        self, minibatch: Sequence[Sample], *, step: int, custom: CustomLoss | None = None
    ) -> dict[str, float]:
        """Update the policy on whole groups, at the learning rate of training step `step` (from 1).

        Samples without `old_logprobs` are on policy: their ratio is 1. Samples with an advantage of
        exactly 0 count in the loss weights (Eq. 12), but are computed only if KL, entropy or a
        custom loss need them. A critic is updated on the same minibatch; during the first
        `critic.pretrain_steps` steps only the critic is. The update is skipped if the loss or the
        gradient's norm is not finite, or if `loss/approx_kl` exceeds `loss.max_approx_kl`.

        The samples of a group are adjacent. `custom` is a loss for this update that replaces
        `loss.function`. Returns the metrics `loss/*`, `optim/*` and `rollout/engine_logprob_gap_*`
        of `dapo show docs metrics`, and on a GPU `time/peak_gpu_memory_gib`.

        Raises:
            NumericsError: the previous update made a weight infinite or NaN (`weights`, `save` and
                `snapshot` raise it for the last update).
            EngineError: the engine's log-probabilities do not fit `loss.old_logprobs: engine`; the
                policy is unchanged.
            LossFailed: a custom loss failed; the policy is unchanged.
        """
        if self.critic is not None and step <= self._config.critic.pretrain_steps:
            metrics = self.critic.apply_gradient(self.critic.backward(minibatch), step=step)
            return metrics | {"optim/lr": 0.0, "optim/update_tokens": 0.0, "optim/skipped": 0.0}
        custom = custom or self._custom_loss
        self._begin_step(step)
        (passes,) = partition_minibatch(
            minibatch, self._config, ranks=1, every_sample=custom is not None
        )
        self._optimizer.zero_grad()
        sums = []
        for rank_microbatch in passes:
            part = self._backward(rank_microbatch, custom)
            sums.append(part)
        # both gradients before either is applied: an update that fails in between changes nothing
        critic_sums = {} if self.critic is None else self.critic.backward(minibatch)
        metrics = self._apply_gradient(add_sums([*sums, self._optimizer.measure()]), step=step)
        if self.critic is not None:
            metrics |= self.critic.apply_gradient(critic_sums, step=step)
        self._freed_memory.trim_if_grown()
        return metrics

    def gradient(self, minibatch: Sequence[Sample], loss: LossConfig) -> dict[str, Tensor]:
        """Return the unclipped gradient of a loss on whole groups, by trained weight.

        Weights and moments do not change. A custom loss is ignored.
        """
        config = self._config
        self._config = config.model_copy(update={"loss": loss})
        self._optimizer.zero_grad()
        try:
            (passes,) = partition_minibatch(minibatch, self._config, ranks=1)
            for rank_microbatch in passes:
                self._backward(rank_microbatch)
            self._optimizer.measure()  # gives weights that no sample reached a gradient of zeros
            gradients = {}
            for name, weight in self._optimizer.master_weights.items():
                assert weight.grad is not None
                gradients[name] = weight.grad
            return gradients
        finally:
            self._config = config
            self._optimizer.zero_grad()

    def save(self, directory: str | Path) -> None:
        """Write weights, AdamW's moments and counters into `directory`, a critic's below it.

        The directory exists.

        Raises:
            NumericsError: a weight is not finite; nothing is written.
            OSError: writing fails.
        """
        self._writer(copies=False)(Path(directory))

    def snapshot(self) -> Callable[[Path], None]:
        """Copy the state.

        The returned function writes the copy like `save`, in any thread, until the next snapshot.

        Raises NumericsError if a weight is not finite.
        """
        return self._writer(copies=True)

    def _writer(self, *, copies: bool) -> Callable[[Path], None]:
        """Return a function that writes the state, or a copy of the present one, into a folder."""
        self._optimizer.require_finite()
        write_critic = None
        if self.critic is not None:
            write_critic = self.critic.writer(copies=copies)
        state = self._state()
        if copies:
            state = self._copy.take(state)

        def write(directory: Path) -> None:
            if write_critic is not None:
                write_critic(directory)
            write_state(directory, state)

        return write

    def load(self, directory: str | Path) -> None:
        """Restore a state that `save` wrote, bit for bit. Raises CheckpointError.

        The reference is restored only if it is updated during training (`loss.reference.every`).
        """
        self._load(Path(directory))
        if self.critic is not None:
            self.critic.load(Path(directory))
