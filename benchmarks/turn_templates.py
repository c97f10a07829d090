"""Episodes on ten chat templates: are the ids that train the sampled ones, in dapo and in TRL?

Both systems play the same scripted episode with the same environment: two turns with a call, and
one without. The ids of a turn are those of its single characters, so that encoding its text again
gives different ids. The second call spells the token that ends a turn, and its answer repeats that
text. Parsers are no part of the comparison: TRL's is replaced by one that knows the script, also
where TRL has none for the template.

Usage: `python -m benchmarks.turn_templates [--into docs/lab/performance.md]`
"""

import argparse
import copy
import sys
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.machine import describe_machine
from benchmarks.protocol import Worker
from benchmarks.report import markdown_rows, replace_between_markers
from benchmarks.scripted_engine import ScriptedEngine
from benchmarks.worker_session import (
    INSTALL,
    ROOT,
    Settings,
    is_installed,
    python_of,
    worker_environment,
)
from dapo.config import DataConfig, load_config
from dapo.config.environment import EnvironmentConfig
from dapo.core.errors import DataError
from dapo.core.terminal import print_text
from dapo.data.prompts import find_turn_end
from dapo.engines.checked import CheckedEngine
from dapo.environments.engine import EpisodeEngine
from dapo.environments.pool import EnvironmentPool
from dapo.environments.rendering import TurnRenderer
from dapo.environments.starts import EpisodeStarts
from dapo.policy.packing import pack
from dapo.sampling.samples import with_advantages
from dapo.types import Generation, GenerationRequest, Group, Problem, Verdict

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

MARKER = "<!-- turn templates -->"
TIMEOUT_S = 300.0
SPELLED = "an end of turn in an observation is"
PROBLEM = Problem("1", "Write two notes.", "")
ENVIRONMENT = EnvironmentConfig(name="benchmarks.notes:EchoedNotes", workers=1)
CALLS = {
    "hermes": '<tool_call>\n{"name": "note", "arguments": {"text": "%s"}}\n</tool_call>',
    "llama": '{"name": "note", "parameters": {"text": "%s"}}',
}


@dataclass(frozen=True)
class Family:
    """A chat template by its name in tests/helpers/chat_templates.py."""

    name: str
    eos_token: str
    """The `eos_token` of the public tokenizer."""
    in_trl: str | None = None
    """TRL's copy of the public text, which both systems then get."""


FAMILIES = (
    Family("smollm2", "<|im_end|>"),
    Family("smollm3", "<|im_end|>"),
    Family("qwen 2.5", "<|im_end|>", "qwen2_5"),
    Family("qwen 3", "<|im_end|>", "qwen3"),
    Family("qwen 3 thinking", "<|im_end|>"),
    Family("llama 3.1", "<|eot_id|>", "llama3_1"),
    Family("gemma", "<eos>", "gemma"),
    Family("mistral 3", "</s>"),
    Family("deepseek r1", "<｜end▁of▁sentence｜>", "deepseek_r1_distill"),
    Family("gpt-oss", "<|return|>", "gptoss"),
)


@dataclass(frozen=True)
class Script:
    """The turns of an episode."""

    notes: list[str]
    """The texts of the calls."""
    turns: list[list[int]]
    """The ids of each turn."""

    @classmethod
    def of(cls, tokenizer: "PreTrainedTokenizerBase", form: str) -> "Script":
        """The script with calls in this form, and with the template's own end of a turn."""
        end = find_turn_end(tokenizer).token_id
        end = tokenizer.eos_token_id if end is None else end
        notes = ["use an apple", f"then use {tokenizer.convert_ids_to_tokens(end)}"]
        texts = [*(CALLS[form] % note for note in notes), "an apple, in use"]
        spelled = [
            [i for c in text for i in tokenizer(c, add_special_tokens=False)["input_ids"]]
            for text in texts
        ]
        return cls(notes, [[*ids, end] for ids in spelled])


@dataclass(frozen=True)
class Played:
    """An episode as a system sampled and trains it."""

    trained: Sequence[int]
    """The ids that the loss trains."""
    whole: Sequence[int]
    """The sequence that the loss reads: prompt, turns, and what is between them."""
    contexts: Sequence[Sequence[int]]
    """The ids behind which each turn was sampled."""

    def outcome(self, turns: Sequence[Sequence[int]]) -> str:
        """`equal` if exactly the sampled ids train, each behind the ids behind which it was
        sampled; else `drifted`.
        """
        sampled = [[*context, *turn] for context, turn in zip(self.contexts, turns, strict=True)]
        behind = all(list(self.whole[: len(ids)]) == ids for ids in sampled)
        return (
            "equal"
            if behind and list(self.trained) == [i for turn in turns for i in turn]
            else "drifted"
        )

    def forges(self, turns: Sequence[Sequence[int]]) -> bool:
        """Whether the second observation, which spells the end of a turn, has more such tokens than
        the first.
        """
        starts = [len(context) for context in self.contexts]
        gaps = [
            list(self.whole[start + len(turn) : following])
            for (start, following), turn in zip(pairwise(starts), turns[:-1], strict=True)
        ]
        return gaps[1].count(turns[0][-1]) > gaps[0].count(turns[0][-1])


def written_families() -> Mapping[str, Any]:
    """The chat templates of the tests, by the names of their families."""
    sys.path.insert(0, str(ROOT / "tests"))
    from helpers.chat_templates import FAMILIES as WRITTEN

    return WRITTEN


def play_ours(
    tokenizer: "PreTrainedTokenizerBase", pool: EnvironmentPool, script: Script
) -> tuple[str, Played | None]:
    """The renderer's judgement (`exact`, `append` or the reason of its refusal), and the episode
    unless refused.
    """
    judgement = "exact"
    data = DataConfig(train="builtin:sums")
    try:
        renderer = TurnRenderer(tokenizer, data, tools=pool.tools, roles=["tool"])
    except DataError as refusal:
        if "environment.history=append" not in str(refusal):
            return str(refusal), None
        judgement = "append"
        renderer = TurnRenderer(tokenizer, data, tools=pool.tools, roles=["tool"], history="append")
    assert renderer.calls is not None
    pool.call_form = renderer.calls.form
    sampling = ScriptedEngine(
        lambda request: (script.turns[int(request.id.rpartition("/")[2])], "stop")
    )
    checked = CheckedEngine(sampling, vocabulary=len(tokenizer))
    engine = EpisodeEngine(checked, pool, renderer, ENVIRONMENT, starts=EpisodeStarts(pool, seed=0))
    prompt = renderer.prompts.encode(PROBLEM)
    stop_ids = (script.turns[0][-1],)
    engine.submit(
        [
            GenerationRequest(str(i), prompt, 4096, 1.0, 1.0, i, stop_ids, problem=PROBLEM)
            for i in range(2)
        ]
    )
    ended: list[Generation] = []
    while len(ended) < 2:
        ended += engine.poll()
    group = Group(
        PROBLEM,
        prompt,
        tuple(ended),
        (Verdict(True, 1.0), Verdict(False, -1.0)),
        rewards=(1.0, -1.0),
    )
    sample = with_advantages([group], load_config(ROOT / "configs" / "tiny.yaml"))[0]
    (microbatch,) = pack([sample], max_tokens=2**16)
    targets = microbatch.targets.tolist()
    trained = [target for target, trains in zip(targets, sample.mask, strict=True) if trains]
    contexts = [request.prompt_ids for request in sampling.submitted if request.id.startswith("0/")]
    return judgement, Played(trained, [*prompt, *targets], contexts)


def result_of_ours(judgement: str, played: Played | None, script: Script) -> str:
    """The cell of the table for dapo."""
    if played is None:
        return "refused: its form of calls" if "calls are read as" in judgement else "refused"
    return f"{played.outcome(script.turns)} ({judgement})"


def result_of_trl(answer: dict[str, Any], script: Script) -> str:
    """The cell of the table for TRL: its own words for a refusal."""
    if "trained" not in answer:
        return f"refused: {_first_sentence(answer['refused_by_hand'].partition(': ')[2])}"
    by_hand = " (parser of calls set by hand)" if answer["refused"] else ""
    return f"{_played(answer).outcome(script.turns)}{by_hand}"


def _played(answer: dict[str, Any]) -> Played:
    return Played(answer["trained"], answer["whole"], answer["contexts"])


def _first_sentence(text: str) -> str:
    return text.partition(". ")[0].partition(" (")[0]


def table_rows(
    folder: Path, pool: EnvironmentPool, trl: Worker | None
) -> tuple[list[list[str]], str]:
    """A row for each template, and TRL's version."""
    all_written = written_families()
    from helpers.chat_templates import tokenizer as make_tokenizer

    names = {family.name: family.in_trl for family in FAMILIES if family.in_trl}
    shipped = (
        trl.ask("shipped_texts", timeout_s=TIMEOUT_S, names=names)
        if trl
        else {"texts": {}, "version": ""}
    )
    rows = []
    for family in FAMILIES:
        written = all_written[family.name]
        tokenizer = copy.deepcopy(make_tokenizer(family.name))
        tokenizer.add_special_tokens({"eos_token": family.eos_token, "pad_token": "<|endoftext|>"})
        tokenizer.chat_template = shipped["texts"].get(family.name, written.template)
        script = Script.of(tokenizer, "llama" if written.calls == "llama" else "hermes")
        judgement, played = play_ours(tokenizer, pool, script)
        cells = [
            result_of_ours(judgement, played, script),
            "" if played is None else _spelled(played, script),
        ]
        if trl is not None:
            directory = str(folder / family.name)
            tokenizer.save_pretrained(directory)
            arguments = {"prompt": PROBLEM.prompt, "turns": script.turns, "calls": script.notes}
            answer = trl.ask("play", timeout_s=TIMEOUT_S, directory=directory, **arguments)
            cells.append(result_of_trl(answer, script))
            cells.append(_spelled(_played(answer), script) if "trained" in answer else "")
        rows.append(
            [family.name + (" (public)" if family.name in shipped["texts"] else ""), *cells]
        )
    return rows, shipped["version"]


def _spelled(played: Played, script: Script) -> str:
    return "the token" if played.forges(script.turns) else "text"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--into", type=Path, help="a Markdown file whose table to replace; none: print"
    )
    arguments = parser.parse_args()
    trl = None
    if is_installed("trl"):
        command = [str(python_of("trl")), "-m", "benchmarks.workers.trl_turns"]
        log = ROOT / "benchmarks" / "logs" / "trl_turns.log"
        trl = Worker("trl", command, env=worker_environment(Settings(), "trl"), log=log, cwd=ROOT)
    else:
        print(f"TRL is not installed; `{INSTALL}` installs it", file=sys.stderr)
    with (
        tempfile.TemporaryDirectory() as folder,
        closing(EnvironmentPool(ENVIRONMENT, memory_gib=4)) as pool,
    ):
        try:
            rows, version = table_rows(Path(folder), pool, trl)
        finally:
            if trl is not None:
                trl.close()
    header = ["chat template", "dapo", SPELLED]
    header += [f"TRL {version}", SPELLED] if trl is not None else []
    machine = describe_machine()
    table = "\n".join(
        [*markdown_rows(header, rows), "", f"{machine['cpu']}, {machine['cores']} cores."]
    )
    if arguments.into is None:
        print_text(table)
    else:
        text = arguments.into.read_text(encoding="utf-8")
        arguments.into.write_text(
            replace_between_markers(text, table, marker=MARKER), encoding="utf-8"
        )


if __name__ == "__main__":
    main()
