"""The queries of the page: plain functions from a request's parameters to JSON values."""

import codecs
import re
import shlex
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from functools import cached_property
from math import exp
from pathlib import Path
from statistics import fmean
from typing import Any, TypeVar

from dapo.analysis.explain import explain_group
from dapo.core.errors import CheckpointError, DataError
from dapo.core.ranges import mask_of, select
from dapo.core.text import quoted
from dapo.data.byte_level import byte_alphabet
from dapo.evaluation.pairing import paired_evaluations
from dapo.runs.metric_table import METRICS
from dapo.runs.outcomes import OUTCOME_MEANINGS, OUTCOMES, VERDICT_WORDS
from dapo.runs.rollout_index import SORTS, Filter, RolloutIndex
from dapo.runs.run_reader import RunReader, find_runs, unique_name
from dapo.runs.stored_config import option_changes

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")
Value = TypeVar("Value")


def in_background(work: Callable[[], Value]) -> Future[Value]:
    """Call a function in a thread that ends with the process."""
    future: Future[Value] = Future()

    def run() -> None:
        try:
            future.set_result(work())
        except Exception as error:  # a damaged run must not end the page
            future.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    return future


class TokenTexts:
    """Loads a tokenizer in the background, without weights and code of the model."""

    def __init__(self, source: str) -> None:
        self._source = source
        self._tokenizer: Any = None

    @cached_property
    def _loading(self) -> Future[str]:
        return in_background(self._load)

    def state(self) -> str:
        """Return `ready`, `loading`, or the reason why there are no token texts.

        The first call starts loading.
        """
        return self.wait() if self._loading.done() else "loading"

    def wait(self) -> str:
        """Return the state after loading has ended."""
        # a damaged tokenizer costs the colours, not the page
        if (error := self._loading.exception()) is not None:
            return (
                f"The tokenizer of {self._source} cannot be loaded: {type(error).__name__}: {error}"
            )
        return self._loading.result()

    def texts(self, ids: Iterable[int]) -> list[str]:
        """Return the text of each token; joined, they are the whole text (U+FFFD if invalid).

        A character whose bytes are spread over several tokens belongs to the last of them.
        """
        alphabet = byte_alphabet()
        decoder = codecs.getincrementaldecoder("utf-8")("replace")
        tokens = self._tokenizer.convert_ids_to_tokens([int(token) for token in ids])
        is_byte_level = (
            type(getattr(self._tokenizer.backend_tokenizer, "decoder", None)).__name__
            == "ByteLevel"
        )
        pieces = [
            decoder.decode(_bytes_of(token, alphabet if is_byte_level else {})) for token in tokens
        ]
        if end := decoder.decode(b"", final=True):
            pieces[-1] += end
        return pieces

    def _load(self) -> str:
        from dapo.policy.model import load_local_tokenizer

        if (files := load_local_tokenizer(self._source)) is None:
            return (
                f"The tokenizer of {self._source} is not on this machine, or comes with its own"
                " code, which the page does not run."
            )
        if not hasattr(files[0], "backend_tokenizer"):
            return f"The tokenizer of {self._source} does not give the text of single tokens."
        self._tokenizer = files[0]
        return "ready"


def _bytes_of(token: str | None, alphabet: Mapping[str, int]) -> bytes:
    """Return the UTF-8 bytes of a vocabulary's token; none for an unknown id."""
    if token is None:
        return b""
    if alphabet:
        is_encoded = all(character in alphabet for character in token)
        return bytes(alphabet[character] for character in token) if is_encoded else token.encode()
    if match := _BYTE_TOKEN.fullmatch(token):
        return bytes([int(match[1], 16)])
    return token.replace("\u2581", " ").encode("utf-8", "replace")


PROBLEM_KINDS = ("all", "never", "sometimes", "always", "undecided")
MAX_PAGE = 200
MAX_TOKENS = 2000  # number of tokens shown with their probabilities, unless the request has `all`
MAX_TEXT_CHARS = 200

Parameters = Mapping[str, str]


class InvalidParameter(Exception):
    """A parameter of a request has no such value."""


class ViewedRun:
    """One run with its index and its tokenizer."""

    def __init__(self, files: RunReader) -> None:
        self.files = files
        self.name = files.name

    @cached_property
    def index(self) -> RolloutIndex:
        return RolloutIndex(self.files.directory.rollouts_folder)

    @cached_property
    def tokens(self) -> TokenTexts:
        """The token texts by the tokenizer stored in the run, or else by its model's."""
        folder = self.files.directory.tokenizer
        return TokenTexts(str(folder if folder.is_dir() else self.files.config().get("model.name")))

    def close(self) -> None:
        if "index" in self.__dict__:
            self.index.close()


class Runs:
    """The runs that a page shows, by name: those in `paths`, and those that begin there later."""

    def __init__(self, paths: Sequence[Path]) -> None:
        """Raises CheckpointError if a path is no run and no folder of runs."""
        self._paths = paths
        self._lock = threading.Lock()
        self.runs: dict[str, ViewedRun] = {}
        self._add(find_runs(paths))

    def refresh(self) -> list[ViewedRun]:
        """Search for new runs, and return all runs, the new ones first."""
        with suppress(CheckpointError):  # the folder was removed
            self._add(find_runs(self._paths))
        return list(self.runs.values())

    def _add(self, paths: Sequence[Path]) -> None:
        with self._lock:
            directories = {run.files.directory.path for run in self.runs.values()}
            added: dict[str, ViewedRun] = {}
            for path in (path for path in paths if path not in directories):
                name = unique_name(path, self.runs | added)
                added[name] = ViewedRun(RunReader(name, path))
            self.runs = added | self.runs

    def __getitem__(self, name: str) -> ViewedRun:
        """Return a run by name.

        Raises DataError for an unknown name, and CheckpointError for a damaged run.
        """
        if name not in self.runs:
            raise DataError(f"no run {quoted(name)} here; the runs are: {', '.join(self.runs)}")
        self.runs[name].files.require_run()
        return self.runs[name]

    def close(self) -> None:
        for run in self.runs.values():
            run.close()


def overview(runs: Iterable[ViewedRun]) -> dict[str, Any]:
    """Every run's summary, and the texts that the page shows: metrics and outcomes."""
    return {
        "runs": [run.files.summary() for run in runs],
        "outcomes": OUTCOME_MEANINGS,
        "metrics": [
            {"name": m.name, "unit": m.unit, "meaning": m.meaning, "paper": m.paper}
            for m in METRICS
        ],
    }


def metrics(run: ViewedRun, query: Parameters) -> dict[str, Any]:
    """Return the metrics, the summary and the changes of options on resume.

    Without metrics and changes if `version` is the newest.
    """
    version = run.files.metrics_version()
    summary = run.files.summary()
    if version == query.get("version"):
        return {"unchanged": True, "summary": summary}
    changes = option_changes(run.files.directory)
    return {**run.files.metrics(), "summary": summary, "changes": changes, "version": version}


def rollouts(run: ViewedRun, query: Parameters) -> dict[str, Any]:
    """Return a page of responses that pass a filter. Raises InvalidParameter."""
    (sort,) = _choose({"sort": query.get("sort") or "spread"}, "sort", tuple(SORTS))
    run.tokens.state()  # starts to load the tokenizer, for the group that may be opened next
    row_filter = Filter(
        first_step=_integer(query, "first_step"),
        last_step=_integer(query, "last_step"),
        outcomes=_choose(query, "outcomes", OUTCOMES),
        verdicts=_choose(query, "verdicts", tuple(VERDICT_WORDS)),
        min_tokens=_integer(query, "min_tokens"),
        max_tokens=_integer(query, "max_tokens"),
        problem=query.get("problem") or None,
        finish=query.get("finish") or None,
        text=query.get("text", "")[:MAX_TEXT_CHARS],
    )
    return {**run.index.page(row_filter, sort=sort, **_page(query)), "note": missing_rollouts(run)}


def group(run: ViewedRun, query: Parameters, *, max_tokens: int = MAX_TOKENS) -> dict[str, Any]:
    """Return `explain_group` with texts and probabilities of tokens, if the tokenizer is loaded."""
    step, group_id = _integers(query, "step", "group")
    path = run.files.directory.path
    explained = explain_group(path, step, group_id)
    state = run.tokens.state()
    tokens = run.tokens if state == "ready" else None
    limit = None if query.get("all") else max_tokens
    seed = explained["environment_seed"]
    return {
        **explained,
        # as text: it has more digits than a number of JavaScript
        "environment_seed": None if seed is None else str(seed),
        "responses": [_response(tokens, response, limit) for response in explained["responses"]],
        "tokens": state,
        "command": f"dapo explain {shlex.quote(str(path))} --step {step} --group {group_id}",
    }


def _response(
    tokens: TokenTexts | None, response: Mapping[str, Any], limit: int | None
) -> dict[str, Any]:
    """Return a response with the texts and probabilities of its first tokens."""
    num_tokens = len(response["response_ids"])
    ids = response["response_ids"][:limit]
    logprobs = response["engine_logprobs"]
    ranges = response["sampled"]
    result = {
        name: value
        for name, value in response.items()
        if name not in ("response_ids", "engine_logprobs")
    }
    result["tokens"] = None if tokens is None else tokens.texts(ids)
    result["tokens_left"] = num_tokens - len(ids)
    if response["calls"] is not None:
        return result | _calls(tokens, response["calls"], limit)
    result["sampled"] = None if ranges is None else list(mask_of(ranges, num_tokens))[: len(ids)]
    result["probabilities"] = None
    result["mean_probability"] = None
    if logprobs is not None:
        probabilities = [exp(min(0.0, logprob)) for logprob in logprobs]
        result["probabilities"] = [
            round(probability, 4) for probability in probabilities[: len(ids)]
        ]
        sampled = select(probabilities, ranges)
        result["mean_probability"] = round(fmean(sampled), 4) if sampled else None
    return result


def _calls(
    tokens: TokenTexts | None, calls: Sequence[Mapping[str, Any]], limit: int | None
) -> dict[str, Any]:
    """Return an agent's calls with the texts and probabilities of their first tokens in all."""
    shown_calls = []
    room = sum(len(call["token_ids"]) for call in calls) if limit is None else limit
    all_probabilities: list[float] = []
    num_left = 0
    for call in calls:
        ids = call["token_ids"][:room]
        num_left += len(call["token_ids"]) - len(ids)
        room -= len(ids)
        shown = {
            name: value
            for name, value in call.items()
            if name not in ("token_ids", "context_ids", "logprobs")
        }
        is_whole = len(ids) == len(call["token_ids"])
        shown["tokens"] = tokens.texts(ids) if tokens is not None and is_whole else None
        shown["context"] = None
        if tokens is not None and is_whole:
            shown["context"] = tokens.texts(call["context_ids"])
        shown["probabilities"] = None
        if call["logprobs"] is not None:
            probabilities = [exp(min(0.0, logprob)) for logprob in call["logprobs"]]
            shown["probabilities"] = [round(value, 4) for value in probabilities[: len(ids)]]
            all_probabilities += probabilities
        shown_calls.append(shown)
    mean = round(fmean(all_probabilities), 4) if all_probabilities else None
    return {
        "calls": shown_calls,
        "tokens": None,
        "tokens_left": num_left,
        "sampled": None,
        "probabilities": None,
        "mean_probability": mean,
    }


def problems(run: ViewedRun, query: Parameters) -> dict[str, Any]:
    """Return a page of the problems that the run has visited. Raises InvalidParameter."""
    (kind,) = _choose({"kind": query.get("kind") or "all"}, "kind", PROBLEM_KINDS)
    (sort,) = _choose({"sort": query.get("sort") or "visits"}, "sort", ("visits", "rate", "recent"))
    return {
        **run.index.problems(kind=kind, sort=sort, **_page(query)),
        "note": missing_rollouts(run),
    }


def evaluation(run: ViewedRun, query: Parameters) -> dict[str, Any]:
    """Return the summary of an evaluation with a row per problem, or with one `problem`."""
    (step,) = _integers(query, "step")
    content = run.files.evaluation(step)
    if problem := query.get("problem"):
        row = next((row for row in content["table"] if row["id"] == problem), None)
        if row is None:
            raise DataError(f"the evaluation of step {step} has no problem {quoted(problem)}")
        return dict(row)
    return content | {"table": [_without_responses(row) for row in content["table"]]}


def paired(runs: Runs, query: Parameters) -> dict[str, Any]:
    """Return the paired difference of two evaluations, of one run or of two."""
    steps = _integers(query, "a_step", "b_step")
    pair = [runs[query.get(f"{which}_run", "")] for which in ("a", "b")]
    return paired_evaluations(
        *(run.files.evaluation(step) for run, step in zip(pair, steps, strict=True))
    )


def _without_responses(row: Mapping[str, Any]) -> dict[str, Any]:
    responses = row["responses"]
    return {
        **{name: value for name, value in row.items() if name != "responses"},
        "correct": sum(1 for response in responses if response["correct"]),
        "judged": sum(1 for response in responses if response["error"] is None),
        "samples": len(responses),
    }


def missing_rollouts(run: ViewedRun) -> str | None:
    """Return why tables of responses are missing; None if every step has one."""
    config = run.files.config()
    if config.get("schedule") == "supervised":
        return "This run samples no responses: it imitates demonstrations (schedule=supervised)."
    setting = str(config.get("log.rollouts", "all"))
    if setting == "none":
        return (
            "This run keeps no responses: log.rollouts is none. Set log.rollouts=all to see them in"
            " the next run."
        )
    if not run.files.directory.rollout_tables():
        return "No responses yet: rollouts/ gets a table when the first step has been judged."
    if setting.startswith("last:"):
        return (
            f"This run keeps the responses of its last {setting.removeprefix('last:')} steps only"
            f" (log.rollouts={setting})."
        )
    return None


def _page(query: Parameters) -> dict[str, int]:
    offset = _integer(query, "offset") or 0
    limit = _integer(query, "limit") or 50
    if offset < 0 or not 1 <= limit <= MAX_PAGE:
        raise InvalidParameter(f"offset must be at least 0 and limit from 1 to {MAX_PAGE}")
    return {"offset": offset, "limit": limit}


def _choose(query: Mapping[str, str], name: str, choices: Sequence[str]) -> tuple[str, ...]:
    """Return the values of a comma-separated parameter. Raises InvalidParameter."""
    values = tuple(value for value in query.get(name, "").split(",") if value)
    if odd := [value for value in values if value not in choices]:
        raise InvalidParameter(f"{name} must be some of {', '.join(choices)}, got {quoted(odd[0])}")
    return values


def _integers(query: Parameters, *names: str) -> list[int]:
    """Required integer parameters. Raises InvalidParameter for one that is missing."""
    values = []
    for name in names:
        if (value := _integer(query, name)) is None:
            raise InvalidParameter(f"the parameter {name}, an integer, is missing")
        values.append(value)
    return values


def _integer(query: Parameters, name: str) -> int | None:
    text = query.get(name, "")
    if not text:
        return None
    try:
        value = int(text)
    except ValueError:
        raise InvalidParameter(f"{name} must be an integer, got {quoted(text)}") from None
    if abs(value) >= 2**31:
        raise InvalidParameter(f"{name} is out of range")
    return value
