"""docs/doctor.md, By symptom: each command runs on a run as a user has it, and prints the words
that the page names.
"""

import re
import shlex
from pathlib import Path

import pytest

from helpers.commands import run as run_command
from helpers.paths import ROOT

pytestmark = pytest.mark.usefixtures("forked_workers")

PAGE = (ROOT / "docs" / "doctor.md").read_text(encoding="utf-8").partition("\n## By symptom\n")[2]
SECTIONS = re.findall(
    r"^### (.+)\n\n```\n(dapo .+)\n```\n\nLook for (.+?)[:.;]", PAGE, flags=re.MULTILINE
)
CONFIG = """
model: tiny-random
data: {train: "builtin:sums", eval: {builtin: sums, size: 4}}
rollout: {prompts_per_step: 2, group_size: 4, max_response_tokens: 8}
reward: {verifier: "dapo.rewards.examples:has_digit", workers: 1}
overlong: {buffer_tokens: 4}
optim: {lr: 0.001, warmup_steps: 0}
train: {num_steps: 2, minibatch_groups: 1, threads: 1}
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with `my.yaml`, its run `runs/first`, and another run."""
    from dapo.cli.train import start_run
    from dapo.config import load_config

    path = tmp_path_factory.mktemp("user")
    (path / "my.yaml").write_text(CONFIG)
    for name, options in {"first": [], "other": ["optim.lr=0.002"]}.items():
        start_run(
            load_config(path / "my.yaml", options), run_dir=path / "runs" / name, config_name="my"
        )
    return path


def test_every_section_has_a_command_and_words_of_its_output():
    assert [title for title, _, _ in SECTIONS] == re.findall(
        r"^### (.+)$", PAGE, flags=re.MULTILINE
    )
    assert len(SECTIONS) >= 12


@pytest.mark.parametrize(("title", "command", "words"), SECTIONS)
def test_the_command_of_a_symptom_shows_what_the_page_says(
    title: str,
    command: str,
    words: str,
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
):
    monkeypatch.chdir(folder)
    names = {"RUN": "runs/first", "OTHER": "runs/other"}
    arguments = [names.get(word, word) for word in shlex.split(command)[1:]]
    code, out, err = run_command(capsys, *arguments)
    assert code == 0, err
    named = re.findall(r"`([^`]+)`", words)
    assert named, title
    assert [word for word in named if word not in out] == []
