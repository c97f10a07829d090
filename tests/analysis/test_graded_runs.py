"""The results of a verifier that gives scores are mean scores wherever a run is looked at: no word
says accuracy, and no score is a percentage, also where all scores are between 0 and 1.
"""

import re
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from types import SimpleNamespace

import pytest

import dapo
from dapo.analysis.ablate.experiment import load_experiment
from dapo.analysis.ablate.results import collect, write_results
from dapo.analysis.ablate.runner import RunProgress, run_experiment
from dapo.analysis.ablate.table import make_table
from dapo.analysis.view.report import write_report
from dapo.api.notebook import NotebookDisplay
from dapo.runs.console import step_line
from dapo.runs.directory import RunDirectory
from dapo.runs.evaluations import load_evaluation
from dapo.runs.metrics_file import read_metrics
from dapo.training.signals import StopRequest
from helpers.ablations import FakeCommand
from helpers.browser import MISSING, open_browser
from helpers.commands import run as run_command
from helpers.fork_server import ForkServer
from helpers.paths import TINY
from helpers.view_runs import serving

FILE = """
base: {base}
seeds: [0]
set:
  - reward.verifier=helpers.reward_functions:only_completions
  - "data.eval={{builtin: {{sums: {{}}}}, size: 10, seed: 2}}"  # no mean of tenths ends in a half
  - train.num_steps=2
  - train.eval_every=1
variants: {{small: [], large: [optim.lr=0.01]}}
"""


PARTS = ("overview", "evaluation", "compare", "problems")


class Messages:
    """A display that keeps what it is told."""

    def __init__(self) -> None:
        self.texts: list[str] = []

    def update(self, progress: RunProgress) -> None: ...

    def message(self, text: str) -> None:
        self.texts.append(text)


class Graded:
    """An experiment of two graded runs, and what was said while it ran."""

    def __init__(self, folder: Path, server: ForkServer) -> None:
        (folder / "graded.yaml").write_text(FILE.format(base=TINY))
        experiment = load_experiment(folder / "graded.yaml", ["train.threads=1"])
        self.log = folder / "log"

        def start(arguments: Sequence[str], log: Path) -> FakeCommand:
            return FakeCommand(
                arguments, polls=0, finish=lambda given: server.run(*given, output=self.log)[0]
            )

        display = Messages()
        failures = run_experiment(
            experiment, folder / "x", jobs=1, stop=StopRequest(), display=display, start=start
        )
        assert failures == {}, self.log.read_text()
        results = collect(experiment, folder / "x")
        self.stored = folder / "kept"
        write_results(results, make_table(results), self.stored)
        self.messages = display.texts
        self.small = folder / "x" / "runs" / "small-seed0"
        self.large = folder / "x" / "runs" / "large-seed0"

    def mean_score(self, run: Path) -> str:
        """The result of the last evaluation, by hand from the scores of its responses."""
        table = load_evaluation(RunDirectory(run).eval(2))["table"]
        scores = [response["score"] for row in table for response in row["responses"]]
        return f"{fmean(scores):.3f}"


@pytest.fixture(scope="module")
def graded(fork_server: ForkServer, tmp_path_factory: pytest.TempPathFactory) -> Graded:
    return Graded(tmp_path_factory.mktemp("graded"), fork_server)


def assert_scores(text: str) -> None:
    """Assert that a text speaks of scores alone."""
    assert "score" in text.lower()
    assert "accuracy" not in text.lower()
    assert not re.search(r"correct[^.]{0,20}%|score \d+(\.\d+)? ?%", text)


def test_scores_of_this_run_could_be_taken_for_fractions(graded: Graded):
    rows = [row for row in read_metrics(graded.small / "metrics.jsonl") if row["step"]]
    assert all(0 < row["reward/score_mean"] < 1 for row in rows)
    assert all(row.get("reward/accuracy") is None for row in rows)


def test_the_lines_of_training_and_the_report_at_its_end(graded: Graded):
    text = graded.log.read_text()
    said = "so that there is no accuracy"  # the sentence that says why
    assert said in text
    assert_scores(text.replace(said, ""))
    (row, *_) = [row for row in read_metrics(graded.small / "metrics.jsonl") if row["step"] == 1]
    assert re.search(rf"step 1/2  reward .*  score +{row['reward/score_mean']:.3f}  kept", text)
    assert f"mean score {graded.mean_score(graded.small)}" in text


def test_the_line_of_a_graded_step_is_as_wide_as_every_other(graded: Graded):
    rows = [row for row in read_metrics(graded.small / "metrics.jsonl") if row["step"]]
    assert len({len(step_line(row["step"], 9, row, None)) for row in rows}) == 1


def test_status(graded: Graded, capsys: pytest.CaptureFixture[str]):
    for paths in ([graded.small], [graded.small, graded.large]):
        code, out, _ = run_command(capsys, "status", *map(str, paths))
        assert code == 0
        assert_scores(out)
        assert f"mean score {graded.mean_score(graded.small)}" in out


def test_compare(graded: Graded, capsys: pytest.CaptureFixture[str]):
    runs = [str(graded.small), str(graded.large)]
    for arguments in (runs, [*runs, "--by-step"], [*runs, runs[1]]):
        code, out, _ = run_command(capsys, "compare", *arguments)
        assert code == 0
        assert_scores(out)
        assert graded.mean_score(graded.large) in out


def test_ablate(graded: Graded, capsys: pytest.CaptureFixture[str]):
    small, large = graded.messages
    assert f"small, seed 0: mean score {graded.mean_score(graded.small)}" in small
    assert f"large, seed 0: mean score {graded.mean_score(graded.large)}" in large
    assert_scores(small)
    code, out, _ = run_command(capsys, "ablate", "--report", str(graded.stored))
    assert code == 0
    assert_scores(out)
    assert graded.mean_score(graded.large) in out


def test_the_values_and_the_display_of_a_notebook(graded: Graded):
    run = dapo.load(graded.small)
    for text in (repr(run), run._repr_html_(), repr(run.evaluation()), str(run.evaluation())):
        assert_scores(text)
        assert graded.mean_score(graded.small) in text
    shown: list[str] = []

    def show(data: dict[str, str], **options: object) -> SimpleNamespace:
        shown.append(data["text/html"])
        return SimpleNamespace(update=show)

    display = NotebookDisplay(2, first_step=1, show=show)
    for row in read_metrics(graded.small / "metrics.jsonl"):
        display.log(int(row["step"]), {k: v for k, v in row.items() if v is not None})
    display.close()
    assert_scores(re.sub(r"<[^<>]*>", " ", shown[-1]))


def test_the_data_of_the_page(graded: Graded):
    with serving(graded.small, graded.large) as client:
        evaluations = client.get("evaluations", run=graded.small.name)["evaluations"]
        columns = client.get("metrics", run=graded.small.name)["columns"]
    assert [row["binary"] for row in evaluations] == [False] * 3
    assert columns["eval/sums/score_mean"] == columns["eval/sums/accuracy"]
    assert "reward/accuracy" not in columns


@pytest.fixture(scope="module")
def words(graded: Graded, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """All words and titles of the page, by its part, and of a report."""
    if MISSING is not None:
        pytest.skip(MISSING)
    from selenium.webdriver.support.ui import WebDriverWait

    script = (
        "return document.body.innerText + [...document.querySelectorAll('[title], [aria-label]')]"
        ".map((e) => ' ' + e.title + ' ' + e.getAttribute('aria-label')).join()"
    )
    run = graded.small.name
    report = write_report(graded.small, tmp_path_factory.mktemp("report") / "report.html")["output"]
    texts = {}
    with open_browser() as browser, serving(graded.small, graded.large) as client:
        page = f"http://127.0.0.1:{client.port}/#"
        addresses = {part: f"{page}/{part}?run={run}" for part in PARTS}
        addresses["report"] = Path(report).as_uri()
        for part, address in addresses.items():
            browser.get("about:blank")
            browser.get(address)
            ready = "return document.querySelector('main').textContent.length > 200"
            WebDriverWait(browser, 60).until(lambda b: b.execute_script(ready))  # noqa: B023
            texts[part] = browser.execute_script(script)
        browser.get("about:blank")
    return texts


def test_the_axes_of_evaluated_scores_are_not_in_percent(graded: Graded):
    if MISSING is not None:
        pytest.skip(MISSING)
    from selenium.webdriver.support.ui import WebDriverWait

    script = (
        "return [...document.querySelectorAll('[data-chart^=eval] .ytitle')].map((e) =>"
        " [e.closest('[data-chart]').dataset.chart.split('/').pop(), e.textContent])"
        ".filter(([name]) => name === 'accuracy' || name.startsWith('avg@'))"
    )
    run = graded.small.name
    with open_browser() as browser, serving(graded.small, graded.large) as client:
        browser.get(f"http://127.0.0.1:{client.port}/#/metrics?run={run}&find=eval")
        wait = WebDriverWait(browser, 60)
        titles = wait.until(lambda b: b.execute_script(script))
    assert {title for _, title in titles} == {"mean score"}


@pytest.mark.parametrize("part", [*PARTS, "report"])
def test_the_words_of_the_page(words: dict[str, str], part: str):
    # names of metrics stand where one chooses or reads them by name
    text = re.sub(r"\b(eval|reward|audit)/\S+", "", words[part])
    assert_scores(text)
