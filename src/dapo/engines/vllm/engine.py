"""The engine of `rollout.engine: vllm`: samples with vLLM, one step per poll.

`start.py` starts vLLM.
"""

from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import chain
from typing import Any

import torch

from dapo.core.errors import EngineError
from dapo.core.memory import explain_out_of_memory
from dapo.engines import request_checks as checks
from dapo.engines.engine import Capabilities, WeightSource, float_array
from dapo.types import Finish, Generation, GenerationRequest, WeightLayout

LOAD = "dapo_load_weights"
"""Method of `start.WeightReader` in vLLM's workers: loads weights, returns names left unset."""


class VllmEngine(checks.EngineState):
    """A RolloutEngine on vLLM's synchronous engine.

    Each request is a sequence of its own, with its own seed.

    vLLM's generator samples the tokens from the request's seed. Equal seeds give equal responses,
    up to rounding that depends on the composition of a batch; another engine samples different
    tokens from the same seed. A response that continues at an offset is sampled from the same
    distributions as the whole one, but has other tokens.
    """

    def __init__(
        self,
        llm_engine: Any,
        *,
        sampling_params: Callable[[GenerationRequest], Any],
        weight_shapes: Mapping[str, tuple[int, ...]],
        temperatures: tuple[float, float],
        sleeps: bool = False,
    ) -> None:
        """Wrap a started `vllm.LLMEngine`, whose initial weights are never used.

        Args:
            llm_engine: the engine.
            sampling_params: makes vLLM's parameters for a request.
            weight_shapes: the shapes of all weights by their Hugging Face names.
            temperatures: the lowest and the highest besides 0.
            sleeps: whether it gives weights and cache back to the GPU while the policy updates.
        """
        super().__init__(version=None)
        self._engine: Any = llm_engine
        self._sleeps = sleeps
        self._asleep: set[str] = set()  # the parts of vLLM's memory that the GPU has back
        self._sampling_params = sampling_params
        self._weight_shapes = weight_shapes
        # the most requests that vLLM gets at a time
        self._max_sequences: int = llm_engine.vllm_config.scheduler_config.max_num_seqs
        config = llm_engine.model_config
        self._vocabulary: int = config.get_vocab_size()
        bound = config.max_model_len
        what = "the length that this engine was started for"
        self._temperatures = temperatures
        self._bound = checks.PositionBound(bound, what, "raise data.max_prompt_tokens")
        self._waiting: dict[str, GenerationRequest] = {}
        self._running: dict[str, GenerationRequest] = {}
        self.drop_weights()  # a trainer's rank that starts on this GPU needs its memory

    @property
    def capabilities(self) -> Capabilities:
        return Capabilities(receiver=self)

    @property
    def in_flight(self) -> list[str]:
        return [*self._running, *self._waiting]

    def load_weights(self, weights: WeightSource, version: int) -> None:
        """Sample from these weights from now on; cached keys and values are dropped.

        Raises EngineError and changes nothing while requests are in flight, or if the set is
        incomplete. If vLLM fails or leaves a weight out, closes the engine and raises EngineError.
        """
        self._require_idle("load_weights")
        self._require_complete(weights.layout())
        with self._closed_on_failure(version):
            self._wake("weights")
            self._use(self._engine.collective_rpc(LOAD, args=(weights,)), version)

    def connect_weights(self, init_info: Mapping[str, Any]) -> None:
        """Join the trainer's transfer of weights (`vllm_weights`); the old weights stay in use.

        vLLM keeps the group of an earlier one, which holds memory of the GPU, until it is told.
        """
        self._require_idle("connect_weights")
        self._engine.collective_rpc("shutdown_weight_transfer_engine")
        self._engine.collective_rpc(
            "init_weight_transfer_engine", kwargs={"init_info": dict(init_info)}
        )

    def receive_weights(
        self, update: Mapping[str, Any], layout: WeightLayout | None, version: int | None
    ) -> None:
        """Receive a chunk of weights: the first with the layout of all, the last with the version.

        Weights of vLLM that a complete set leaves out are not detected, as `load_weights` does.
        """
        self._require_idle("receive_weights")
        if layout is not None:
            self._require_complete(layout)
        with self._closed_on_failure(version):
            if layout is not None:
                self._version = None
                self._wake("weights")
                self._engine.collective_rpc("start_weight_update")
            self._engine.collective_rpc("update_weights", kwargs={"update_info": dict(update)})
            if version is not None:
                self._engine.collective_rpc("finish_weight_update")
                self._use((), version)

    @contextmanager
    def _closed_on_failure(self, version: int | None) -> Iterator[None]:
        """Close the engine if the block fails: some of the weights may be old."""
        try:
            yield
        except Exception as error:
            self.close()
            which = ""
            if version is not None:
                which = f" of version {version}"
            raise EngineError(f"vLLM failed to load the weights{which}: {error}") from error

    def _use(self, left_out_by_worker: Sequence[Sequence[str]], version: int) -> None:
        """Sample from the weights that have been loaded, if they are complete."""
        left_out = sorted(set(chain.from_iterable(left_out_by_worker)))
        self._wake("kv_cache")
        # keys and values of the old weights must not be shared with new responses
        is_reset = self._engine.reset_prefix_cache()
        old_values = None
        if left_out:
            old_values = f"the weights {checks.format_names(left_out)}"
        elif not is_reset:
            old_values = "keys and values of its prefix cache"
        if old_values is not None:
            raise EngineError(
                f"vLLM still holds values older than the weights of version {version}: {old_values}"
            )
        self._engine.set_weight_version(str(version))
        self._version = version

    def drop_weights(self) -> None:
        """Give weights and cache back to the GPU until `load_weights`, if it is shared."""
        super().drop_weights()
        if self._sleeps and not self._asleep:
            # nothing is copied to main memory; the prefix cache is reset
            self._engine.sleep(level=2)
            self._version = None
            self._asleep = {"weights", "kv_cache"}

    def _wake(self, part: str) -> None:
        if part in self._asleep:
            self._engine.wake_up([part])
            self._asleep.remove(part)

    def submit(self, requests: Sequence[GenerationRequest]) -> None:
        self._require_weights()
        self._require_new(requests)
        checks.check_requests(requests, vocabulary=self._vocabulary, bounds=[self._bound])
        low, high = self._temperatures
        for request in requests:
            if request.temperature and not low <= request.temperature <= high:
                raise EngineError(
                    f"request {request.id!r}: vLLM samples at temperatures of 0 (greedy) and from"
                    f" {low:g} to {high:g}, got {request.temperature:g}"
                )
        self._waiting.update((request.id, request) for request in requests)

    @explain_out_of_memory(
        torch.OutOfMemoryError, "generation with vLLM", "lower rollout.vllm.cache_gib"
    )
    def poll(self) -> list[Generation]:
        """Run a step of vLLM, usually a token per running sequence; return finished responses.

        Raises EngineError if log-probabilities are not finite; then the engine can only be closed.
        """
        self._require_open()
        self._admit()
        if not self._running:
            return []
        finished = []
        # one output per request, its last
        for answer in self._engine.step():
            request = self._running.pop(answer.request_id)
            [output] = answer.outputs
            finish = _finish(request, output.finish_reason)
            finished.append(
                self._generation(request, output.token_ids, output.logprobs.logprobs, finish)
            )
        return finished

    def abort(self, request_ids: Sequence[str]) -> list[Generation]:
        names = self._require_in_flight(request_ids)
        running = [name for name in names if name in self._running]
        parts = {name: self._tokens_so_far(name) for name in running}
        self._engine.abort_request(running)
        stopped = []
        for name in names:
            token_ids, logprobs = parts.get(name, ((), ()))
            request = self._running.pop(name, None) or self._waiting.pop(name)
            stopped.append(self._generation(request, token_ids, logprobs, "aborted"))
        return stopped

    def _tokens_so_far(self, name: str) -> tuple[Sequence[int], Sequence[float]]:
        """Return tokens and log-probabilities that vLLM has of a request: it gives no output of one
        that is aborted.
        """
        processor = self._engine.output_processor
        [internal_name] = processor.external_req_ids[name]
        state = processor.request_states[internal_name]
        return state.detokenizer.output_token_ids, state.logprobs_processor.logprobs.logprobs

    def _generation(
        self,
        request: GenerationRequest,
        token_ids: Sequence[int],
        logprobs: Sequence[float],
        finish: Finish,
    ) -> Generation:
        version = self._require_weights()
        # the distribution of greedy sampling has one token
        values = array("f", [0.0]) * len(token_ids)
        if request.temperature > 0:
            values = float_array(logprobs)
        checks.require_finite(sum(values), version, "the dtype of model.dtype")
        return Generation(request.id, array("i", token_ids), values, finish, version)

    def close(self) -> None:
        if not self._is_closed:
            self._is_closed = True
            self._engine.abort_request(list(self._running))
            self._engine = None
            self._running.clear()
            self._waiting.clear()

    def _admit(self) -> None:
        """Pass requests to vLLM in order while it has room, so that none overtakes another."""
        while self._waiting and len(self._running) < self._max_sequences:
            request = self._waiting.pop(next(iter(self._waiting)))
            self._running[request.id] = request
            prompt = {"type": "token", "prompt_token_ids": list(request.prompt_ids)}
            self._engine.add_request(request.id, prompt, self._sampling_params(request))

    def _require_complete(self, layout: WeightLayout) -> None:
        """Check names and shapes: vLLM would silently keep the old values of missing weights."""
        expected = self._weight_shapes
        shapes = layout.shapes
        missing = [name for name in expected if name not in shapes]
        unexpected = [name for name in shapes if name not in expected]
        checks.require_all_weights(len(expected), missing=missing, unexpected=unexpected)
        for name, shape in shapes.items():
            checks.require_shape(name, shape, expected[name])


def _finish(request: GenerationRequest, reason: Any) -> Finish:
    finish: Finish = reason
    if finish in ("stop", "length"):
        return finish
    raise EngineError(
        f"vLLM ended request {request.id!r} by {reason!r}; expected 'stop' or 'length'"
    )
