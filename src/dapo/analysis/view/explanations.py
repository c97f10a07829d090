"""Ratios, clipping and sampler gap of a group's tokens: `explain_group`, computed on request."""

import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

from dapo.core.errors import DapoError
from dapo.runs.run_reader import RunReader

MAX_KEPT = 16

Key = tuple[str, int, int, bool]
Value = TypeVar("Value")


def in_background(work: Callable[[], Value]) -> Future[Value]:
    """Call a function in a thread that ends with the process."""
    found: Future[Value] = Future()

    def run() -> None:
        try:
            found.set_result(work())
        except Exception as error:  # a damaged run must not end the page
            found.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    return found


class Explanations:
    """Computes explanations in the background, one at a time, and keeps the newest ones."""

    def __init__(self) -> None:
        self._jobs: dict[Key, tuple[Future[dict[str, Any]], list[str]]] = {}
        self._lock = threading.Lock()
        self._one_at_a_time = threading.Lock()

    def request(self, files: RunReader, step: int, group: int, *, replay: bool) -> dict[str, Any]:
        """The state of an explanation; the first call starts it.

        With `replay` it may train the step again in memory.

        Returns `state`: `working` or `failed` with `message`, or `done` with `update` (None for a
        group that did not train) and `responses`, which are `eq8` and `responses` of
        `explain_group`.
        """
        if files.config().get("model.trust_remote_code"):
            message = (
                "The model comes with its own code (model.trust_remote_code), which the page does"
                " not run."
            )
            return {"state": "failed", "message": message}
        key = (files.name, step, group, replay)
        log = ["waiting"]
        with self._lock:
            if key not in self._jobs:
                self._jobs[key] = in_background(lambda: self._explain(files, key, log)), log
                while len(self._jobs) > MAX_KEPT:
                    self._jobs.pop(next(iter(self._jobs)))
            job, log = self._jobs[key]
        if not job.done():
            return {"state": "working", "message": log[-1]}
        if (error := job.exception()) is not None:
            kind = "" if isinstance(error, DapoError) else f"{type(error).__name__}: "
            return {"state": "failed", "message": f"{kind}{error}"}
        return {
            "state": "done",
            "update": job.result()["eq8"],
            "responses": job.result()["responses"],
        }

    def _explain(self, files: RunReader, key: Key, log: list[str]) -> dict[str, Any]:
        with self._one_at_a_time:  # each may load a model
            log.append("reading the step")
            from dapo.analysis.explain import explain_group

            _, step, group, replay = key
            return explain_group(
                files.directory.path, step, group, recompute=replay, log=log.append
            )
