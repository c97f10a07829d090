"""The page of `dapo view`, and a report, in headless Chromium: real clicks, hostile texts, no errors in the console."""

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import stdev
from typing import Any

import pyarrow.parquet as pq
import pytest

from dapo.analysis.view.report import write_report
from dapo.core.files import atomic_write_json, read_json
from dapo.runs.directory import RunDirectory
from dapo.runs.metrics_file import truncate_after
from dapo.runs.rollout_table import write_rollouts
from dapo.runs.run_reader import RunReader
from helpers.browser import MISSING, open_browser
from helpers.run_files import append_bytes, edit_options
from helpers.view_runs import Client, close_with, make_run, serving

pytestmark = pytest.mark.skipif(MISSING is not None, reason=MISSING or "")

HOSTILE = "</script><script>window.hacked = 1</script><img src=x onerror='window.hacked = 2'>"

LENGTH = "document.querySelector('.js-plotly-plot')?.data?.[0]"
"""The first curve of the first chart that is drawn."""


class Page:
    """The open page, as someone who clicks on it."""

    def __init__(self, browser: Any, address: str) -> None:
        self.browser, self.address = browser, address

    def open(self, fragment: str) -> None:
        self.browser.get("about:blank")
        self.browser.get(f"{self.address}#/{fragment}")
        self.wait("return document.querySelector('main').textContent.length > 20")

    def wait(self, script: str) -> Any:
        """What a script returns as soon as that is true."""
        from selenium.webdriver.support.ui import WebDriverWait

        return WebDriverWait(self.browser, 60, poll_frequency=0.05).until(lambda b: b.execute_script(script))

    def click(self, selector: str, text: str = "") -> None:
        """Click on the first element that has this text, again if the page has just been drawn anew."""
        from selenium.common.exceptions import StaleElementReferenceException
        from selenium.webdriver.support.ui import WebDriverWait

        find = f"return [...document.querySelectorAll({selector!r})].find((e) => e.textContent.includes({text!r}))"

        def clicked(browser: Any) -> bool:
            if (element := browser.execute_script(find)) is None:
                return False
            browser.execute_script("arguments[0].scrollIntoView({block: 'center'})", element)
            element.click()
            return True

        ignored = [StaleElementReferenceException]
        WebDriverWait(self.browser, 60, poll_frequency=0.05, ignored_exceptions=ignored).until(clicked)

    def texts(self, selector: str) -> list[str]:
        script = "return [...document.querySelectorAll(arguments[0])].map((e) => e.textContent)"
        found: list[str] = self.browser.execute_script(script, selector)
        return found

    def titles(self, selector: str) -> list[str]:
        found: list[str] = self.browser.execute_script(
            "return [...document.querySelectorAll(arguments[0])].filter((e) => e.title).map((e) => e.title)", selector
        )
        return found

    def errors(self) -> list[str]:
        return [entry["message"] for entry in self.browser.get_log("browser")]


def rewrite(run: Path, step: int, change: Callable[[int, dict[str, Any]], dict[str, Any]]) -> None:
    """Store the responses of a step anew, each changed."""
    path = run / "rollouts" / f"step_{step:06d}.parquet"
    rows = pq.read_table(path).to_pylist()
    write_rollouts(path, [change(i, row) for i, row in enumerate(rows)])


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """A run, a copy of it with other options whose texts are an attack, and a copy that has come to step 2."""
    folder = tmp_path_factory.mktemp("browser")
    first = make_run(folder / "first")
    second = folder / "second"
    shutil.copytree(first, second, ignore=shutil.ignore_patterns("checkpoints"))
    for step in (1, 2, 3, 4):
        rewrite(second, step, lambda i, row: row | {"response": f"{i} {HOSTILE}", "prompt": HOSTILE, "answer": HOSTILE})
    evaluation = read_json(second / "eval" / "step_000004.json")
    for row in evaluation["table"]:
        row["question"] = HOSTILE
        row["responses"][0]["text"] = HOSTILE
    atomic_write_json(second / "eval" / "step_000004.json", evaluation)
    edit_options(second, "lr: 0.003", "lr: 0.004")
    live = folder / "live"
    shutil.copytree(first, live, ignore=shutil.ignore_patterns("checkpoints"))
    (live / "summary.json").unlink()
    truncate_after(live / "metrics.jsonl", 2)
    return [first, second, live]


@pytest.fixture(scope="module")
def client(runs: list[Path]) -> Iterator[Client]:
    with serving(*runs) as found:
        yield found


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with open_browser() as found:
        yield found


@pytest.fixture
def page(browser: Any, client: Client) -> Iterator[Page]:
    found = Page(browser, f"http://127.0.0.1:{client.port}/")
    yield found
    assert found.errors() == []
    assert browser.execute_script("return window.hacked") is None


def test_the_overview_draws_every_chart_and_changes_its_axis(page):
    page.open("overview?run=first")
    names = page.browser.execute_script(
        "return [...document.querySelectorAll('[data-chart]')].map((c) => c.dataset.chart)"
    )
    assert len(names) == 10
    for name in names:  # a chart is drawn when it comes into the window
        card = f"document.querySelector(\"[data-chart='{name}']\")"
        page.browser.execute_script(f"{card}.scrollIntoView()")
        page.wait(f"return {card}.querySelector('.js-plotly-plot .main-svg, .plot-empty') !== null")
    assert page.texts(".plot-empty") == []
    assert "finished" in page.texts("#summary")[0]
    assert "step 4 of 4" in page.texts("#summary")[0]
    assert page.browser.execute_script(f"return {LENGTH}.x") == [1, 2, 3, 4]
    page.click("button", "tokens")
    page.wait("return location.hash.includes('x=tokens')")
    page.wait(f"return {LENGTH}?.x[0] > 4")
    page.browser.back()
    page.wait(f"return {LENGTH}?.x[3] === 4")


def test_responses_are_filtered_and_a_group_opened_by_clicks(page, client):
    page.open("rollouts?run=first")
    before = client.get("rollouts", run="first")["total"]
    page.wait("return document.querySelectorAll('tbody tr').length > 3")
    page.click("button", "trained")
    trained = client.get("rollouts", run="first", outcomes="trained")["total"]
    assert 0 < trained < before
    page.wait(f"return document.querySelector('.pager')?.textContent.includes('of {trained}')")
    assert set(page.texts("tbody td:nth-child(3)")) == {"trained"}
    page.click("tbody td:nth-child(2) a")
    page.wait("return document.querySelectorAll('.response').length === 4")
    page.wait("return document.querySelectorAll('.response .t').length > 8")  # the tokenizer has been loaded
    shown = page.texts(".response .text-box")[0]
    key = {name: page.browser.execute_script(f"return View.state()['{name}']") for name in ("step", "group")}
    group = client.get("group", run="first", **key)
    assert shown.startswith("".join(group["responses"][0]["tokens"])[:4])
    assert all("advantage" in text for text in page.texts(".response .meta"))
    rewards = [response["reward"] for response in group["responses"]]
    assert f"std {stdev(rewards):.3f}" in page.texts("dl.facts")[0]  # with n - 1, as in the advantages
    page.click("button", "by reward")
    page.wait("return location.hash.includes('by=advantage')")
    page.click("a", "to the table")
    page.wait("return location.hash.includes('outcomes=trained') && document.querySelectorAll('tbody tr').length > 3")


def test_tokens_are_coloured_by_ratios_that_a_replay_of_the_step_gives(page, client):
    trained = client.get("rollouts", run="first", outcomes="trained", first_step=4, limit=200)["rows"]
    groups = {row["group_id"]: {"state": "working"} for row in trained}
    for group in groups:
        while groups[group]["state"] == "working":
            groups[group] = client.get("explain", run="first", step=4, group=group)
    (second,) = (group for group, found in groups.items() if found["update"]["number"] == 2)
    page.open(f"group?run=first&step=4&group={second}")
    page.click("button", "ratio")
    page.wait("return document.querySelector('#why')?.textContent.includes('Update 2 of 2')")
    assert "Not known" in page.texts("#why")[0]
    page.click("#replay")
    page.wait("return document.querySelectorAll('.t[title^=ratio]').length > 8")
    assert "trained again in memory" in page.texts("#why")[0]
    ratios = [float(title.split()[1]) for title in page.titles(".t")]
    known = client.get("explain", run="first", step=4, group=second, replay=1)["responses"]
    assert ratios == pytest.approx([r for sample in sorted(known) for r in known[sample]["ratios"]], abs=1e-4)
    page.click("button", "sampler gap")
    page.wait("return document.querySelectorAll('.t[title^=trainer]').length > 8")


def test_a_filter_that_nothing_passes_says_so_and_can_be_cleared(page):
    page.open("rollouts?run=first&text=no+model+wrote+this")
    page.wait("return document.querySelector('.empty') !== null")
    assert "No response passes these filters" in page.texts(".empty")[0]
    page.click("#f-clear")
    page.wait("return document.querySelectorAll('tbody tr').length > 3")


def test_the_theme_can_be_switched_and_charts_follow(page):
    page.open("overview?run=first")
    page.wait("return document.querySelectorAll('.js-plotly-plot .main-svg').length > 0")
    colours = {}
    for theme in ("light", "dark"):
        while page.browser.execute_script("return document.getElementById('theme').dataset.now") != theme:
            page.click("#theme")
        background = "getComputedStyle(document.documentElement).backgroundColor"
        line = f"{LENGTH}.line.color"
        colours[theme] = page.browser.execute_script(f"return [{background}, {line}]")
    assert colours["light"][0] != colours["dark"][0]
    assert colours["light"][1] != colours["dark"][1]
    page.browser.refresh()
    page.wait("return document.documentElement.dataset.theme === 'dark'")


def test_problems_lead_to_their_responses(page, client):
    page.open("problems?run=first")
    page.wait("return document.querySelectorAll('tbody tr').length > 2")
    counts = client.get("problems", run="first")["counts"]
    assert page.texts(".cards .number")[0] == str(sum(counts.values()))
    page.click("tbody tr td:nth-child(6)")
    page.wait("return location.hash.includes('problem=') && document.querySelectorAll('tbody .badge').length > 1")


def test_an_evaluation_is_paired_and_a_problem_opened(page, client):
    page.open("evaluation?run=first")
    page.wait("return document.querySelector('#paired') !== null")
    found = client.get("paired", a_run="first", a_step=0, b_run="first", b_step=4)
    assert f"better on {found['better']}, worse on {found['worse']}" in page.texts("#paired")[0]
    page.click("tbody td a")
    page.wait("return document.querySelectorAll('#detail .text-box').length >= 3")


def test_runs_are_compared_with_the_difference_of_their_options(page):
    page.open("compare?run=first&runs=first,second")
    page.wait("return document.querySelectorAll('.js-plotly-plot .main-svg').length > 0")
    assert page.texts("tbody tr") == ["optim.lr0.0030.004"]


def test_a_live_run_is_followed(page, runs):
    live = runs[2]
    lines = (runs[0] / "metrics.jsonl").read_bytes().splitlines(keepends=True)
    with RunDirectory(live).lock(4):
        page.open("overview?run=live")
        page.wait(f"return {LENGTH}?.x.length === 2")
        assert "running" in page.texts("#summary")[0]
        append_bytes(live / "metrics.jsonl", b"".join(lines[3:-1]) + lines[-1][:40])  # the last line is half written
        page.wait(f"return {LENGTH}?.x.length === 3")
        append_bytes(live / "metrics.jsonl", lines[-1][40:])
        close_with(live, "finished")
    page.wait(f"return {LENGTH}?.x.length === 4 && document.querySelector('#summary').textContent.includes('finished')")


def test_hostile_texts_are_shown_and_do_not_run(page):
    for fragment in ("rollouts?run=second", "problems?run=second", "evaluation?run=second&a_step=4&b_step=0"):
        page.open(fragment)
        page.wait("return document.body.textContent.includes('</script>')")
    page.open("rollouts?run=second")
    page.click("tbody td:nth-child(2) a")
    page.wait("return document.querySelectorAll('.response').length === 4")
    assert HOSTILE in page.texts(".text-box")[0]
    assert page.browser.execute_script("return document.querySelectorAll('main script, main img').length") == 0


def test_at_800_pixels_nothing_is_wider_than_the_window(page):
    page.browser.set_window_size(800, 900)
    try:
        for fragment in ("overview", "rollouts", "problems", "evaluation", "compare"):
            page.open(f"{fragment}?run=first")
            page.wait("return document.querySelectorAll('main .card, main table').length > 0")
            width = "[document.documentElement.scrollWidth, document.documentElement.clientWidth]"
            scroll, client_width = page.browser.execute_script(f"return {width}")
            assert scroll <= client_width, fragment
    finally:
        page.browser.set_window_size(1280, 900)


def test_a_report_is_one_file_that_works_without_a_server(browser, runs, tmp_path):
    found = write_report(RunReader("second", runs[1]), tmp_path / "report.html")
    assert found["groups"] == found["of_groups"] > 0
    assert found["bytes"] < 6_000_000
    page = Page(browser, (tmp_path / "report.html").as_uri())
    page.open("overview?run=second")
    page.wait("return document.querySelectorAll('.js-plotly-plot .main-svg').length > 0")
    page.click("nav a", "Rollouts")
    page.wait("return document.querySelectorAll('tbody tr').length > 3")
    page.click("button", "wrong")
    page.wait("return [...document.querySelectorAll('tbody td:nth-child(4)')].every((e) => e.textContent === 'wrong')")
    page.click("tbody td:nth-child(2) a")
    page.wait("return document.querySelectorAll('.response').length === 4")
    assert HOSTILE in page.texts(".text-box")[0]
    page.open("evaluation?run=second")
    page.wait("return document.querySelector('#paired') !== null")
    page.click("tbody td a")
    page.wait("return document.querySelectorAll('#detail .text-box').length >= 3")
    page.open("problems?run=second")
    page.wait("return document.querySelectorAll('tbody tr').length > 2")
    assert page.errors() == []
    assert browser.execute_script("return window.hacked") is None
