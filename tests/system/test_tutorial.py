"""docs/tutorial.md is carried out, from its first file to the exported model, with a tiny model in
place of its own.
"""

import io
import json
import re
import shlex
from pathlib import Path

import pytest
import yaml
from transformers import AutoConfig

from dapo.config.load import merge_options
from helpers.commands import run as run_command
from helpers.paths import ROOT

PAGE = (ROOT / "docs" / "tutorial.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"^```(\w*)\n(.*?)^```", PAGE, flags=re.DOTALL | re.MULTILINE)
MODEL = "smollm2-135m-instruct"
TINY = {
    "model": "tiny-random",
    "rollout": {"prompts_per_step": 2, "group_size": 4, "max_response_tokens": 8},
    "dynamic_sampling": {"enabled": False},  # a model of random weights answers nothing
    "overlong": {"buffer_tokens": 2},
    "reward": {"workers": 1},
    "train": {
        "num_steps": 2,
        "minibatch_groups": 2,
        "threads": 1,
        "eval_every": 2,
        "save_every": 2,
    },
}
TYPED = {MODEL: "tiny-random", "train.num_steps=24": "train.num_steps=3"}


SERVERS = ("view", "serve")
"""Commands that end with Ctrl-C, which other tests start."""
MESSAGE = "What is 7 times 8?\n"


def commands() -> list[list[str]]:
    """The words of each command, without those that send its output to a file."""
    lines = [line for language, text in BLOCKS if not language for line in text.splitlines()]
    typed = [line.partition(" > ")[0] for line in lines if not line.startswith("echo ")]
    return [[TYPED.get(word, word) for word in shlex.split(line)] for line in typed]


def write_files() -> None:
    """The files of the page, each under the name in its first line, with the sizes of TINY."""
    for language, text in BLOCKS:
        if language in ("python", "yaml"):
            name = re.match(r"# (\S+)\n", text)
            assert name is not None, text
            if language == "yaml":
                text = json.dumps(merge_options(yaml.safe_load(text), TINY))  # JSON is YAML
            Path(name[1]).write_text(text)


def test_every_command_of_the_tutorial_runs_in_its_order(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.chdir(tmp_path)
    write_files()
    Path("questions.txt").write_text(MESSAGE)
    printed = {}
    for words in commands():
        if words[0] == "python":
            exec(Path(words[1]).read_text(), {"__name__": "__main__"})
        elif words[1] not in SERVERS:
            assert words[0] == "dapo"
            monkeypatch.setattr("sys.stdin", io.StringIO(MESSAGE))  # of a pipe, which chat reads
            code, out, err = run_command(capsys, *words[1:])
            assert code == (1 if words[1] == "test" else 0), f"{words}: {out}{err}"
            printed[" ".join(words[1:3])] = out
    assert printed.keys() >= {
        "data stats",
        "check my.yaml",
        "train my.yaml",
        "doctor runs/first",
        "eval --compare",
    }
    wrongly = "12 of 132 responses are judged right though they are wrong\n"
    assert printed["test my_rewards:right_number"].startswith(wrongly)
    assert "step 0: responses before training" in printed["train my.yaml"]
    assert "paired over 60 problems" in printed["eval --compare"]
    assert printed["status runs/first"].startswith("finished, step 3/3, ")
    assert AutoConfig.from_pretrained(tmp_path / "my-model").model_type


def test_its_first_commands_and_files_are_those_of_the_text():
    assert [words[1] for words in commands() if words[0] == "dapo"] == [
        "data", "test", "check", "train", "doctor", "view", "explain", "eval", "chat",
        "generate", "generate", "serve", "resume", "status", "export",
    ]  # fmt: skip
    assert MODEL in PAGE
