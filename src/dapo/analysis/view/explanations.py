"""Ratios, clipping and sampler gap of a group's tokens: `explain_group`, computed on request."""

import threading
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from dapo.core.errors import DapoError
from dapo.runs.run_reader import RunReader

MAX_KEPT = 16

Key = tuple[str, int, int, bool]


@dataclass
class _Job:
    """One explanation, finished or in progress."""

    log: list[str] = field(default_factory=list)
    value: dict[str, Any] | None = None
    problem: str | None = None


class Explanations:
    """Computes explanations in the background, one at a time, and keeps the newest ones."""

    def __init__(self) -> None:
        self._jobs: dict[Key, _Job] = {}
        self._lock, self._one_at_a_time = threading.Lock(), threading.Lock()

    def request(self, files: RunReader, step: int, group: int, *, replay: bool) -> dict[str, Any]:
        """The state of an explanation; the first call starts it. With `replay` it may train the step again in memory.

        Returns:
            `state`: `working` or `failed` with `message`, or `done` with `ratios` (whether they are known, and why) and
            `responses`: by sample the `ratios`, `clipped` and `gaps` of its tokens, None if they are not known.
        """
        if files.config().get("model.trust_remote_code"):
            message = "The model comes with its own code (model.trust_remote_code), which the page does not run."
            return {"state": "failed", "message": message}
        key = (files.name, step, group, replay)
        with self._lock:
            job = self._jobs.get(key)
            if job is None:
                job = self._jobs[key] = _Job()
                while len(self._jobs) > MAX_KEPT:
                    self._jobs.pop(next(iter(self._jobs)))
                threading.Thread(target=self._compute, args=(job, files, step, group, replay), daemon=True).start()
        if job.problem is not None:
            return {"state": "failed", "message": job.problem}
        if job.value is None:
            return {"state": "working", "message": job.log[-1] if job.log else "waiting"}
        return {"state": "done", **job.value}

    def _compute(self, job: _Job, files: RunReader, step: int, group: int, replay: bool) -> None:
        with self._one_at_a_time:  # each may load a model
            try:
                job.log.append("reading the step")
                from dapo.analysis.explain import explain_group

                found = explain_group(files.directory.path, step, group, recompute=replay, log=job.log.append)
                job.value = _for_tokens(found)
            except DapoError as error:
                job.problem = str(error)
            except Exception as error:  # a damaged run must not end the page
                job.problem = f"{type(error).__name__}: {error}"


def _for_tokens(explained: Mapping[str, Any]) -> dict[str, Any]:
    update = explained["eq8"]
    ratios = (
        {"known": False, "source": "none", "why": "the group did not train"} if update is None else update["ratios"]
    )
    return {
        "ratios": ratios,
        "clip": None if update is None else update["clip"],
        "update": None if update is None else {"number": update["update"], "of": update["updates"]},
        "share": None if update is None else update["gradient_share_of_group"],
        "responses": {str(each["sample"]): _of_response(each) for each in explained["responses"]},
    }


def _of_response(response: Mapping[str, Any]) -> dict[str, Any]:
    tokens = response.get("token_values") or {}
    old, engine = tokens.get("old_logprobs"), tokens.get("engine_logprobs")
    return {
        "ratios": _rounded(tokens.get("ratios")),
        "clipped": tokens.get("clipped"),
        "gaps": _rounded([a - b for a, b in zip(old, engine, strict=True)]) if old and engine else None,
        "share": response.get("gradient_share"),
    }


def _rounded(values: list[float] | None) -> list[float] | None:
    return None if values is None else [round(value, 5) for value in values]
