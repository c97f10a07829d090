"""The page about Python and the examples in docstrings run as they stand, only smaller."""

import doctest
import re
from pathlib import Path
from types import ModuleType

import pytest

import dapo
import dapo.api.chat
import dapo.api.code_writer
import dapo.api.entry_points
import dapo.api.keywords
import dapo.api.run
from helpers.cells import run_cells
from helpers.paths import ROOT

SMALLER = {
    "smollm2-135m-instruct": "tiny-random",
    # the random model writes digits now and then, and numbers of two digits hardly ever
    "range(10)": "range(5)",
    "rows[20:]": "rows[5:]",
    "rows[:20]": "rows[:5]",
    "steps=18": "steps=1, threads=1, workers=1",
    "steps=20": "steps=2",
    "steps=21": "steps=3",
    "steps=2, clip": "steps=1, clip",
    "steps=[2]": "steps=[1]",
    "prompts_per_step=8": "prompts_per_step=2",
    "max_response_tokens=64": "max_response_tokens=12",
    "samples_per_problem=4": "samples_per_problem=2",
}
ROWS = [{"prompt": f"{a} + 1 =", "answer": str(a + 1)} for a in range(8)]


def test_the_blocks_of_the_page_run_one_after_the_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(tmp_path)
    blocks = re.findall(
        r"^```python\n(.*?)^```", (ROOT / "docs/python.md").read_text(), re.DOTALL | re.MULTILINE
    )
    assert len(blocks) == 10
    text = "\x00".join(blocks)
    for large, small in SMALLER.items():
        assert large in text
        text = text.replace(large, small)
    names = run_cells(*text.split("\x00"))
    assert names["run"].state.step == 3
    assert (tmp_path / "my-model/config.json").is_file()
    assert len(names["best"]) == 2  # before and after the only step
    assert len(list(tmp_path.glob("runs/*/tensorboard"))) == 1


@pytest.fixture(scope="module")
def example_run(tmp_path_factory: pytest.TempPathFactory) -> dapo.Run:
    options = {
        "prompts_per_step": 2,
        "group_size": 4,
        "max_response_tokens": 6,
        "threads": 1,
        "workers": 1,
    }
    path = tmp_path_factory.mktemp("example") / "run"
    return dapo.train(
        "tiny-random",
        data=ROWS,
        reward="dapo.rewards.examples:has_digit",
        run_dir=path,
        steps=1,
        **options,
    )


@pytest.mark.parametrize(
    "module",
    [
        dapo,
        dapo.api.chat,
        dapo.api.code_writer,
        dapo.api.keywords,
        dapo.api.run,
        dapo.api.entry_points,
    ],
)
def test_examples_in_docstrings_give_what_they_say(
    module: ModuleType, example_run: dapo.Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(tmp_path)
    names = {"dapo": dapo, "run": example_run, "__name__": "__main__"}
    options = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE
    runner = doctest.DocTestRunner(optionflags=options, verbose=False)
    report = []
    for each in doctest.DocTestFinder().find(module, extraglobs=names):
        runner.run(each, out=report.append)
    assert runner.failures == 0, "".join(report)
    assert runner.tries > 0
