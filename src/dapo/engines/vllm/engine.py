"""`rollout.engine: vllm`: samples with vLLM, a step at a time. How vLLM is started is in vllm_start.py."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from dapo.core.errors import EngineError
from dapo.engines.engine import WeightSource
from dapo.engines.request_checks import PositionBound, new_requests
from dapo.types import Finish, Generation, GenerationRequest

MIN_TEMPERATURE, MAX_TEMPERATURE = 0.01, 2.0
LOAD = "dapo_load_weights"
"""What each of vLLM's workers is taught: takes a WeightSource, returns the names of weights that got nothing."""
_NAMES_SHOWN = 5


@dataclass(eq=False)
class _RunningSequence:
    request: GenerationRequest
    output: Any = None
    """vLLM's last word on it, with all tokens so far: an aborted request gets no other."""

    def generation(self, finish: Finish, version: int) -> Generation:
        """What is answered. Raises EngineError for what cannot be a log-probability."""
        token_ids = tuple(self.output.token_ids) if self.output is not None else ()
        if self.request.temperature == 0:
            logprobs = (0.0,) * len(token_ids)  # the law that greedy sampling draws from has one token
        else:
            logprobs = tuple(self.output.logprobs.logprobs) if self.output is not None else ()
        if not math.isfinite(sum(logprobs)):
            raise EngineError(
                f"the model's logits are not finite (weights version {version}): the policy has diverged, or the dtype "
                "of model.dtype is too narrow for it"
            )
        return Generation(self.request.id, token_ids, logprobs, finish, version)


class VllmEngine:
    """A RolloutEngine on vLLM's synchronous engine. A request is a sequence of its own, with its own seed.

    A token is drawn by vLLM's generator for the request's seed: equal seeds give equal responses, up to the rounding
    that a batch's composition makes, but not the tokens that another engine would draw.
    """

    def __init__(
        self,
        llm_engine: Any,
        *,
        sampling_params: Callable[[GenerationRequest], Any],
        weight_shapes: Mapping[str, tuple[int, ...]],
        max_sequences: int,
    ) -> None:
        """Takes a `vllm.LLMEngine`, whose own weights are never sampled from, and what puts requests in its words."""
        self._engine: Any = llm_engine
        self._sampling_params = sampling_params
        self._weight_shapes = weight_shapes
        self._max_sequences = max_sequences
        config = llm_engine.model_config
        self._vocabulary: int = config.get_vocab_size()
        self._bound = PositionBound(
            config.max_model_len, "the length that this engine was started for", "raise data.max_prompt_tokens"
        )
        self._version: int | None = None
        self._waiting: dict[str, GenerationRequest] = {}
        self._running: dict[str, _RunningSequence] = {}

    def load_weights(self, weights: WeightSource, version: int) -> None:
        """Sample from these weights, all of them, from now on; what was computed with others is forgotten.

        Raises EngineError while requests are in flight and for an incomplete set, and changes nothing; and where vLLM
        fails or leaves a weight out: then the engine is closed.
        """
        engine = self._open()
        if in_flight := len(self._running) + len(self._waiting):
            raise EngineError(f"load_weights while {in_flight} requests are in flight")
        self._require_complete(weights)
        try:
            left_out = sorted({name for names in engine.collective_rpc(LOAD, args=(weights,)) for name in names})
            is_reset = engine.reset_prefix_cache()
        except Exception as error:  # vLLM fails in many ways; half of the weights may be old
            self.close()
            raise EngineError(f"vLLM failed to load the weights of version {version}: {error}") from error
        if left_out or not is_reset:
            self.close()
            old = f"the weights {_format_names(left_out)}" if left_out else "keys and values of its prefix cache"
            raise EngineError(f"vLLM kept something older than the weights of version {version}: {old}")
        engine.set_weight_version(str(version))
        self._version = version

    def submit(self, requests: Sequence[GenerationRequest]) -> None:
        """Queue requests; prompts that begin alike share keys and values. Raises EngineError, queueing none."""
        self._open()
        self._loaded_version()
        new = new_requests(requests, (self._waiting, self._running), vocabulary=self._vocabulary, bounds=[self._bound])
        for request in requests:
            if request.temperature and not MIN_TEMPERATURE <= request.temperature <= MAX_TEMPERATURE:
                raise EngineError(
                    f"request {request.id!r}: vLLM samples at temperatures of 0 (greedy) and from "
                    f"{MIN_TEMPERATURE:g} to {MAX_TEMPERATURE:g}, got {request.temperature:g}"
                )
        self._waiting.update(new)

    def poll(self) -> list[Generation]:
        """One of vLLM's steps: mostly a token for every live sequence. Returns what has finished.

        Raises EngineError if log-probabilities are not finite; then the engine can only be closed.
        """
        engine = self._open()
        self._admit(engine)
        if not self._running:
            return []
        finished = []
        for answer in engine.step():
            seq = self._running[answer.request_id]
            seq.output = answer.outputs[0]
            if answer.finished:
                del self._running[answer.request_id]
                finished.append(seq.generation(_finish(seq), self._loaded_version()))
        return finished

    def abort(self, request_ids: Sequence[str]) -> list[Generation]:
        """Stop these, and return what they have, in the order given. Raises EngineError for an id not in flight."""
        engine = self._open()
        if unknown := [name for name in request_ids if name not in self._running and name not in self._waiting]:
            raise EngineError(f"abort: request {unknown[0]!r} is not in flight ({len(unknown)} unknown in all)")
        names = list(dict.fromkeys(request_ids))
        engine.abort_request([name for name in names if name in self._running])
        stopped = [
            self._running.pop(name) if name in self._running else _RunningSequence(self._waiting.pop(name))
            for name in names
        ]
        return [seq.generation("aborted", self._loaded_version()) for seq in stopped]

    def close(self) -> None:
        """Stop everything and let go of vLLM. Afterwards every other call raises EngineError."""
        if self._engine is not None:
            self._engine.abort_request(list(self._running))
            self._engine = None
            self._running.clear()
            self._waiting.clear()

    def _admit(self, engine: Any) -> None:
        """Hand vLLM the head of the queue, as far as there is room: so nothing overtakes it."""
        while self._waiting and len(self._running) < self._max_sequences:
            request = self._waiting.pop(next(iter(self._waiting)))
            self._running[request.id] = _RunningSequence(request)
            prompt = {"type": "token", "prompt_token_ids": list(request.prompt_ids)}
            engine.add_request(request.id, prompt, self._sampling_params(request))

    def _require_complete(self, weights: WeightSource) -> None:
        """vLLM itself says nothing where weights are missing: the old ones would stay."""
        expected = self._weight_shapes
        given = {name: tuple(tensor.shape) for name, tensor in weights.named_tensors()}
        missing = [name for name in expected if name not in given]
        unexpected = [name for name in given if name not in expected]
        if missing or unexpected:
            raise EngineError(
                f"load_weights needs exactly the model's {len(expected)} parameters by name; "
                f"missing: {_format_names(missing)}; unexpected: {_format_names(unexpected)}"
            )
        for name, shape in given.items():
            if shape != expected[name]:
                raise EngineError(f"load_weights: {name} has shape {shape}, the engine's model needs {expected[name]}")

    def _open(self) -> Any:
        if self._engine is None:
            raise EngineError("the engine is closed")
        return self._engine

    def _loaded_version(self) -> int:
        if self._version is None:
            raise EngineError("the engine has no weights yet: call load_weights first")
        return self._version


def _finish(seq: _RunningSequence) -> Finish:
    """vLLM's reason, of those that a request of ours may end for."""
    reason = seq.output.finish_reason
    if reason == "stop":
        return "stop"
    if reason == "length":
        return "length"
    raise EngineError(f"vLLM ended request {seq.request.id!r} by {reason!r}; expected 'stop' or 'length'")


def _format_names(names: Sequence[str]) -> str:
    more = f" and {len(names) - _NAMES_SHOWN} more" if len(names) > _NAMES_SHOWN else ""
    return ", ".join(names[:_NAMES_SHOWN]) + more if names else "none"
