"""The page of `dapo view`, and a report, in headless Chromium: real clicks, hostile texts, no
errors in the console.
"""

import json
import re
import shutil
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from statistics import stdev
from typing import Any

import pyarrow.parquet as pq
import pytest

from dapo.analysis.compare import compare_runs
from dapo.analysis.view.report import write_report
from dapo.config import RewardConfig, dump_config, load_config
from dapo.environments.starts import environment_seed
from dapo.evaluation.scores import Evaluation, EvaluationPlan, JudgedProblem, JudgedResponse
from dapo.runs.directory import RunDirectory
from dapo.runs.evaluations import load_evaluation, write_evaluation
from dapo.runs.metrics_file import read_metrics, truncate_after
from dapo.runs.rollout_table import write_rollouts
from dapo.runs.status import run_status
from dapo.types import Problem
from helpers.browser import MISSING, open_browser
from helpers.run_files import append_bytes, log_metrics, new_run
from helpers.tables import for_each_row
from helpers.view_runs import Client, close_with, copy_judged, make_run, serving, training

pytestmark = pytest.mark.skipif(MISSING is not None, reason=MISSING or "")

HOSTILE = "</script><script>window.hacked = 1</script><img src=x onerror='window.hacked = 2'>"

ALOUD = "reward.verifier=helpers.reward_functions:digits_aloud"
WAIT_S = 240  # ends a hang; on a busy machine a run may take long to start
LENGTH = "document.querySelector(\"[data-chart='Response length'] .plot\")?.chart?.traces[0]"
"""The first curve of the chart of lengths."""


class Page:
    """The open page, as someone who clicks on it."""

    def __init__(self, browser: Any, address: str) -> None:
        self.browser = browser
        self.address = address

    def open(self, fragment: str) -> None:
        self.browser.get("about:blank")
        self.browser.get(f"{self.address}#/{fragment}")
        self.wait("return document.querySelector('main').textContent.length > 20")

    def wait(self, script: str) -> Any:
        """What a script returns as soon as that is true."""
        from selenium.webdriver.support.ui import WebDriverWait

        return WebDriverWait(self.browser, WAIT_S, poll_frequency=0.05).until(
            lambda b: b.execute_script(script)
        )

    def click(self, selector: str, text: str = "") -> None:
        """Click on the first element that has this text, again if the page has just been drawn
        anew.
        """
        from selenium.common.exceptions import StaleElementReferenceException
        from selenium.webdriver.support.ui import WebDriverWait

        find = (
            f"return [...document.querySelectorAll({selector!r})].find((e) =>"
            f" e.textContent.includes({text!r}))"
        )

        def clicked(browser: Any) -> bool:
            if (element := browser.execute_script(find)) is None:
                return False
            browser.execute_script("arguments[0].scrollIntoView({block: 'center'})", element)
            element.click()
            return True

        ignored = [StaleElementReferenceException]
        WebDriverWait(self.browser, 60, poll_frequency=0.05, ignored_exceptions=ignored).until(
            clicked
        )

    def texts(self, selector: str) -> list[str]:
        script = "return [...document.querySelectorAll(arguments[0])].map((e) => e.textContent)"
        found: list[str] = self.browser.execute_script(script, selector)
        return found

    def titles(self, selector: str) -> list[str]:
        found: list[str] = self.browser.execute_script(
            "return [...document.querySelectorAll(arguments[0])].filter((e) => e.title).map((e) =>"
            " e.title)",
            selector,
        )
        return found

    def errors(self) -> list[str]:
        """What the browser has written into its console since the last call."""
        return [entry["message"] for entry in self.browser.get_log("browser")]


@contextmanager
def shown(browser: Any, *paths: Path) -> Iterator[Page]:
    """A page of a server for these runs, which is left before the server ends: it would ask it
    again.
    """
    with serving(*paths) as client:
        yield Page(browser, f"http://127.0.0.1:{client.port}/")
        browser.get("about:blank")


def rewrite(run: Path, step: int, change: Callable[[int, dict[str, Any]], dict[str, Any]]) -> None:
    """Store the responses of a step anew, each changed."""
    path = run / "rollouts" / f"step_{step:06d}.parquet"
    rows = pq.read_table(path).to_pylist()
    write_rollouts(path, [change(i, row) for i, row in enumerate(rows)])


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """A run whose verifier prints, one with other options whose texts are an attack, and a copy
    that is at step 2.
    """
    folder = tmp_path_factory.mktemp("browser")
    first = make_run(folder / "first", ALOUD)
    second = make_run(folder / "second", "optim.lr=0.004", "reward.timeout_s=9", ALOUD)
    for step in (1, 2, 3, 4):
        rewrite(
            second,
            step,
            lambda i, row: (
                row | {"response": f"{i} {HOSTILE}", "prompt": HOSTILE, "answer": HOSTILE}
            ),
        )
    table = (evaluation := load_evaluation(RunDirectory(second).eval(4))).pop("table")
    for row in table:
        row["question"] = HOSTILE
        row["responses"][0]["text"] = HOSTILE
    write_evaluation(RunDirectory(second), 4, evaluation, table)
    live = folder / "live"
    shutil.copytree(first, live, ignore=shutil.ignore_patterns("checkpoints"))
    (live / "summary.json").unlink()
    truncate_after(live / "metrics.jsonl", 2)
    return [first, second, live]


@pytest.fixture(scope="module")
def client(runs: list[Path]) -> Iterator[Client]:
    with serving(*runs) as found:
        yield found


QUICK = "const wait = setTimeout; window.setTimeout = (call, ms) => wait(call, (ms || 0) / 10)"
"""The page asks a server for news every 0.3 s instead of every 3 s."""


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with open_browser() as found:
        found.execute_cdp_cmd("Page.addScriptToEvaluateOnNewDocument", {"source": QUICK})
        yield found


@pytest.fixture
def page(browser: Any, client: Client) -> Iterator[Page]:
    found = Page(browser, f"http://127.0.0.1:{client.port}/")
    yield found
    assert found.errors() == []
    assert browser.execute_script("return window.hacked") is None


HOLD = """const ask = window.fetch;
window.held = [];
window.fetch = (...given) => new Promise((done) => held.push(() => done(ask(...given))));
window.release = () => { window.fetch = ask; held.forEach((answer) => answer()); };"""
"""Holds back the server's answers until `release()`."""
UNREAD = """const ask = window.fetch;
window.fetch = async (...given) => {
  const answer = await ask(...given);
  if (!/api\\/(problems|rollouts)/.test(given[0])) return answer;
  const value = await answer.json();
  const empty = { rows: [], total: 0, counts: {}, by_step: [], note: null };
  const index = { steps: 4, indexed: 0, responses: 0, problems: [] };
  return new Response(JSON.stringify({ ...value, ...empty, index }));
};"""
"""The server's answers while it has not read any table of responses."""


def test_a_tab_without_its_answer_only_says_that_it_reads(page):
    page.open("log?run=first")
    page.wait("return document.querySelector('main h1') !== null")
    for name in PAGES:
        page.browser.execute_script(HOLD)
        page.browser.execute_script(f"document.getElementById('tab-{name}').click()")
        page.wait(f"return held.length && location.hash.startsWith('#/{name}')")
        shown = page.texts("main")
        assert shown == ["Reading the run …"], name
        assert page.browser.execute_script("return document.querySelector('.loading')") is None
        page.browser.execute_script("release()")
        page.wait("return document.querySelector('main h1') !== null")


def test_tables_that_are_not_read_yet_give_no_number_and_no_diagnosis(page):
    script = page.browser.execute_cdp_cmd(
        "Page.addScriptToEvaluateOnNewDocument", {"source": UNREAD}
    )
    try:
        for fragment in ("problems?", "problems?kind=never&", "rollouts?", "rollouts?text=x&"):
            page.open(f"{fragment}run=first")
            page.wait("return document.querySelector('.reading') !== null")
            assert page.texts(".empty") == ["Reading the responses …"], fragment
            visible = page.browser.execute_script("return document.querySelector('main').innerText")
            assert re.findall(r"\d", visible) == [], fragment
            assert "verifier" not in visible
    finally:
        page.browser.execute_cdp_cmd("Page.removeScriptToEvaluateOnNewDocument", script)


def test_rollouts_begin_with_a_group_that_trained_on_right_and_wrong_responses(page, client):
    page.open("rollouts?run=first")
    page.wait("return document.querySelectorAll('tbody tr').length > 3")
    assert page.texts("td[data-name=outcome]")[:4] == ["trained"] * 4
    assert set(page.texts("td[data-name=verdict]")[:4]) == {"correct", "wrong"}
    page.browser.execute_script(
        "const f = document.querySelector('#f-sort'); f.value = 'newest';"
        " f.dispatchEvent(new Event('change'))"
    )
    page.wait("return document.querySelector('td[data-name=step]')?.textContent === '4'")


def test_intervals_are_a_band_from_15_evaluations_on_and_no_axis_passes_100_percent(
    browser, tmp_path
):
    for name, count in (("few", 14), ("many", 15)):
        run = new_run(tmp_path / name)
        ends = {"eval/sums/low": 0.7, "eval/sums/high": 1.0}
        rows = [{"step": i, "eval/sums/accuracy": 0.9, **ends} for i in range(count)]
        log_metrics(run.metrics, rows)
    with shown(browser, tmp_path) as page:
        for name, bars, bands in (("few", 14, 0), ("many", 0, 1)):
            for fragment in ("overview", "metrics"):
                page.open(f"{fragment}?run={name}&find=accuracy")
                page.wait("return document.querySelector('.chart .drag') !== null")
                assert len(page.texts(".chart .interval")) == bars, (name, fragment)
                assert len(page.texts(".chart .band")) == bands, (name, fragment)
                chart = "document.querySelector('.plot').chart"
                low, high = page.browser.execute_script(f"return {chart}.range.y")
                assert low < 70
                assert high == 100
    # these runs have curves, and no evaluation that the head could pair
    assert all("api/paired" in error for error in page.errors())


def test_metrics_are_in_sections_and_a_pinned_chart_stays_at_the_top(page):
    page.open("metrics?run=first")
    page.wait("return document.querySelector('.section') !== null")
    sections = "return [...document.querySelectorAll('.section')].map((e) => e.dataset.section)"
    before = page.browser.execute_script(sections)
    assert before == ["eval", "reward", "rollout", "loss", "optim", "time"]
    assert page.texts("[data-section=loss] [data-chart] .drag") == []  # nothing folded is drawn
    try:
        page.click("[data-section=loss] summary")
        page.wait("return document.querySelector('[data-section=loss] .chart .drag') !== null")
        page.click("[id='pin-loss/entropy']")
        page.wait("return document.querySelector('[data-section=pinned] .chart .drag') !== null")
        page.open("metrics?run=second")
        page.wait("return document.querySelector('.section') !== null")
        assert page.texts("[data-section=pinned] h2") == ["loss/entropy"]
        assert page.browser.execute_script(sections) == ["pinned", *before]
        page.click("[id='pin-loss/entropy']")
        page.wait("return document.querySelector('[data-section=pinned]') === null")
    finally:
        page.browser.execute_script("localStorage.clear()")


def test_the_overview_draws_every_chart_and_changes_its_axis(page):
    page.open("overview?run=first")
    names = page.browser.execute_script(
        "return [...document.querySelectorAll('[data-chart]')].map((c) => c.dataset.chart)"
    )
    assert len(names) == 10
    for name in names:  # a chart is drawn when it comes into the window
        card = f"document.querySelector(\"[data-chart='{name}']\")"
        page.browser.execute_script(f"{card}.scrollIntoView()")
        page.wait(f"return {card}.querySelector('.chart .drag, .plot-empty') !== null")
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
    # the tokenizer has been loaded
    page.wait("return document.querySelectorAll('.response .t').length > 8")
    shown = page.texts(".response .text-box")[0]
    key = {
        name: page.browser.execute_script(f"return View.state()['{name}']")
        for name in ("step", "group")
    }
    group = client.get("group", run="first", **key)
    assert shown.startswith("".join(group["responses"][0]["tokens"])[:4])
    assert all("advantage" in text for text in page.texts(".response .meta"))
    rewards = [response["reward"] for response in group["responses"]]
    # with n - 1, as in the advantages
    assert f"std {stdev(rewards):.3f}" in page.texts("dl.facts")[0]
    page.click("button", "by reward")
    page.wait("return location.hash.includes('by=advantage')")
    page.click("a", "to the table")
    page.wait(
        "return location.hash.includes('outcomes=trained') && document.querySelectorAll('tbody"
        " tr').length > 3"
    )


def test_a_filter_that_nothing_passes_says_so_and_can_be_cleared(page):
    page.open("rollouts?run=first&text=no+model+wrote+this")
    page.wait("return document.querySelector('.empty') !== null")
    assert "No response passes these filters" in page.texts(".empty")[0]
    page.click("#f-clear")
    page.wait("return document.querySelectorAll('tbody tr').length > 3")


def test_the_theme_can_be_switched_and_charts_follow(page):
    page.open("overview?run=first")
    page.wait("return document.querySelector('.chart .drag') !== null")
    colours = {}
    for theme in ("light", "dark"):
        while (
            page.browser.execute_script("return document.getElementById('theme').dataset.now")
            != theme
        ):
            page.click("#theme")
        background = "getComputedStyle(document.documentElement).backgroundColor"
        line = "getComputedStyle(document.querySelector('.chart .line')).stroke"
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
    page.wait(
        "return location.hash.includes('problem=') && document.querySelectorAll('tbody"
        " .badge').length > 1"
    )


def test_an_evaluation_is_paired_and_a_problem_opened(page, client):
    page.open("evaluation?run=first&a_step=4&b_step=4")
    page.wait(
        "return document.querySelector('#paired')?.textContent.includes('the same evaluation')"
    )
    page.open("evaluation?run=first")
    page.wait("return document.querySelector('#paired') !== null")
    found = client.get("paired", a_run="first", a_step=0, b_run="first", b_step=4)
    assert f"better on {found['better']}, worse on {found['worse']}" in page.texts("#paired")[0]
    order = "most worsened" if found["worse"] else "most improved"
    assert page.texts(".head-row [aria-pressed=true]") == [order]
    changed = [row for row in found["table"] if row["first"] != row["second"]]
    assert len(page.texts("td[data-name='B − A']")) == len(changed) > 0
    equal = len(found["table"]) - len(changed)
    assert equal > 0
    page.click("#equal", "show")
    page.wait("return document.querySelector('#equal')?.textContent === 'hide'")
    assert len(page.texts("td[data-name='B − A']")) == len(found["table"])
    page.click("tbody td a")
    page.wait("return document.querySelectorAll('#detail .text-box').length >= 3")


def test_runs_are_compared_with_the_difference_of_their_options(page):
    page.open("compare?run=first&runs=first,second")
    page.wait("return document.querySelector('.chart .drag') !== null")
    assert page.texts("#differing tbody tr") == ["reward.timeout_s109", "optim.lr0.0030.004"]


def points(value: float, unit: str = "") -> str:
    """A difference of accuracies as the page writes it."""
    return f"{100 * value:+.1f}{unit}".replace("-", "−")


def test_runs_are_compared_on_their_last_evaluations_paired_as_dapo_compare_pairs_them(
    browser, runs, tmp_path
):
    short = make_run(tmp_path / "short", "train.num_steps=1", "optim.lr=1e-9", ALOUD)
    with shown(browser, runs[0], short) as page:
        page.open("compare?run=first&runs=first,short")
        page.wait("return document.querySelectorAll('#held-out tbody tr').length === 1")
        expected = compare_runs(runs[0], short).held_out["final"]
        found = expected.difference
        assert found["difference"] < 0 < found["high"]
        assert page.texts("#held-out tbody td")[:4] == [
            "short",
            f"{expected.accuracy_a:.1%} → {expected.accuracy_b:.1%}".replace("%", " %"),
            points(found["difference"], " points"),
            f"{points(found['low'])} to {points(found['high'])}",
        ]
        count = f"{found['pairs']}: better on {expected.better}, worse on {expected.worse}"
        assert page.texts("#held-out tbody td")[5] == count
        page.click("#held-out a", "short")  # leads to the difference by problem
        page.wait("return document.querySelector('#paired') !== null")
        assert points(found["difference"], " points") in page.texts("#paired")[0]
        # colours are for differences whose interval excludes 0
        assert page.texts("#paired .neg, #paired .pos") == []
    assert page.errors() == []


def test_runs_that_must_not_be_paired_are_compared_without_a_difference(browser, runs, tmp_path):
    hotter = copy_judged(runs[0], tmp_path / "hotter", temperature=0.1)
    without = copy_judged(runs[0], tmp_path / "without")
    shutil.rmtree(without / "eval")
    quiet = copy_judged(runs[0], tmp_path / "quiet", verifier="dapo.rewards.examples:has_digit")
    with shown(browser, runs[0], hotter, without, quiet) as page:
        page.open("compare?run=first&runs=first,hotter,without,quiet")
        page.wait("return document.querySelectorAll('#held-out tbody tr').length === 3")
        assert page.texts("#held-out td[data-name=verdict]") == [
            "not paired: temperature is 1.0 in one and 0.1 in the other",
            "not paired: without has no evaluation",
            (
                "not paired: verifier is helpers.reward_functions:digits_aloud in one and "
                "dapo.rewards.examples:has_digit in the other"
            ),
        ]
        assert page.texts("#held-out td[data-name=difference]") == ["", "", ""]
    # the browser's own line about the refusal
    assert all("status of 404" in error for error in page.errors())


def test_the_open_run_is_compared_with_the_newest_ones(browser, runs, tmp_path):
    for i in range(6):
        shutil.copytree(runs[0], tmp_path / f"copy-{i}")
    with shown(browser, tmp_path) as page:
        for name in ("copy-0", "copy-5"):
            page.open(f"compare?run={name}")
            page.wait("return document.querySelector('.chart .drag') !== null")
            chosen = page.texts(".filters [aria-pressed=true]")
            assert name in chosen
            assert len(chosen) == 4


def test_a_run_that_begins_after_the_page_is_shown_live_until_it_stops(browser, tmp_path):
    with shown(browser, tmp_path) as page:
        page.open("")
        assert "There is no run here yet" in page.texts("main")[0]
        with training(
            tmp_path / "late", "train.num_steps=5000", "train.eval_every=5000", "optim.lr=1e-9"
        ) as process:
            page.wait(
                "return document.querySelector('#summary .badge.live')?.textContent === 'running'"
            )
            assert run_status(tmp_path / "late").process == process.pid
            page.wait(f"return {LENGTH}?.x.length > 1")
            before = len(page.browser.execute_script(f"return {LENGTH}.x"))
            page.wait(f"return {LENGTH}.x.length > {before}")
            page.wait("return document.querySelector('#summary').textContent.includes('left')")
            process.send_signal(signal.SIGINT)
            process.wait(60)
            page.wait("return document.querySelector('#summary .badge')?.textContent === 'stopped'")
    assert page.errors() == []


def test_evaluation_and_compare_follow_a_live_run(page, runs):
    live = RunDirectory(runs[2])
    with live.lock(4):
        live.eval(4).unlink()
        page.open("evaluation?run=live")
        page.wait("return document.querySelector('#paired') !== null")
        steps = (
            "[...document.querySelectorAll('td[data-name=step]')].map((e) => e.textContent).join()"
        )
        assert page.browser.execute_script(f"return {steps}") == "0,2"
        table = (evaluation := load_evaluation(RunDirectory(runs[0]).eval(4))).pop("table")
        write_evaluation(live, 4, evaluation, table)
        log_metrics(live.metrics, [{"step": 2, "time/step_s": 1.0}])
        page.wait(f"return {steps} === '0,2,4'")
        page.open("compare?run=first&runs=first,live")
        curve = (
            'document.querySelector(\'[data-chart="reward/mean"]'
            " .plot')?.chart?.traces[1]?.x.length"
        )
        page.wait(f"return {curve} === 2")
        whole = RunDirectory(runs[0]).metrics.read_bytes()
        append_bytes(
            live.metrics,
            next(line for line in whole.splitlines(True) if line.startswith(b'{"step": 3,')),
        )
        page.wait(f"return {curve} === 3")
        truncate_after(live.metrics, 2)


def test_a_zoom_survives_the_next_step_of_a_live_run(page, runs):
    from selenium.webdriver.common.action_chains import ActionChains

    live = RunDirectory(runs[2])
    whole = RunDirectory(runs[0]).metrics.read_bytes()
    with live.lock(4):
        page.open("overview?run=live")
        page.wait(f"return {LENGTH}?.x.length === 2")
        area = page.browser.execute_script(
            "return document.querySelector(\"[data-chart='Response length'] .drag\")"
        )
        drag = ActionChains(page.browser).move_to_element_with_offset(area, -60, 0)
        drag.click_and_hold().move_by_offset(60, 0).move_by_offset(60, 0).release().perform()
        axis = "document.querySelector(\"[data-chart='Response length'] .plot\").chart.range.x"
        page.wait(f"return {axis}[0] > 0.1")
        zoomed = page.browser.execute_script(f"return {axis}")
        append_bytes(
            live.metrics,
            next(line for line in whole.splitlines(True) if line.startswith(b'{"step": 3,')),
        )
        page.wait(f"return {LENGTH}?.x.length === 3")
        assert page.browser.execute_script(f"return {axis}") == zoomed
        truncate_after(live.metrics, 2)


def test_a_chart_tells_its_values_hides_a_curve_and_shows_all_again(page, client):
    from selenium.webdriver.common.action_chains import ActionChains

    columns = client.get("metrics", run="first")["columns"]
    card = "document.querySelector(\"[data-chart='Reward']\")"
    page.open("overview?run=first")
    page.browser.execute_script(f"{card}.scrollIntoView({{block: 'center'}})")
    area = page.wait(f"return {card}.querySelector('.drag')")
    ActionChains(page.browser).move_to_element_with_offset(area, 0, 0).perform()
    # the middle of 0 to 4
    page.wait(f"return {card}.querySelector('.tip').textContent.includes('step 2')")
    told = page.texts("[data-chart='Reward'] .told b")
    at = client.get("metrics", run="first")["steps"].index(2)
    expected = [columns[name][at] for name in ("reward/mean", "reward/trained_mean")]
    assert [float(text.replace("−", "-")) for text in told] == pytest.approx(expected, abs=1e-3)
    before = page.browser.execute_script(f"return {card}.querySelectorAll('.line').length")
    page.click("[data-chart='Reward'] .entry", "all judged responses")
    assert (
        page.browser.execute_script(f"return {card}.querySelectorAll('.line').length") == before - 1
    )
    assert page.texts("[data-chart='Reward'] .entry.off") == ["all judged responses"]
    page.click("[data-chart='Reward'] .entry", "all judged responses")
    assert page.browser.execute_script(f"return {card}.querySelectorAll('.line').length") == before
    chart = f"{card}.querySelector('.plot').chart"
    whole = page.browser.execute_script(f"return {chart}.range")
    page.browser.execute_script(f"{chart}.zoom([1, 2], [0, 1])")
    assert page.browser.execute_script(f"return {chart}.range") == {"x": [1, 2], "y": [0, 1]}
    area = page.browser.execute_script(f"return {card}.querySelector('.drag')")
    ActionChains(page.browser).double_click(area).perform()
    assert page.browser.execute_script(f"return {chart}.range") == whole


def test_ticks_are_round_numbers_that_differ(page):
    page.open("overview?run=first")
    page.wait("return document.querySelector('.chart .drag') !== null")
    texts = "return tickTexts(ticksOf(arguments[0], arguments[1], 5, arguments[2]))"
    for given, expected in (
        ((0, 1, False), "0 0.2 0.4 0.6 0.8 1.0"),
        ((0, 4, True), "0 1 2 3 4"),
        ((0.2, 1.1, True), "1"),
        ((-1, 0.2, False), "−1.0 −0.5 0"),
        ((0, 24_000, False), "0 5k 10k 15k 20k"),
        ((0, 2.4e6, False), "0 0.5M 1.0M 1.5M 2.0M"),
        ((0, 3e-6, False), "0 1e−6 2e−6 3e−6"),
        ((83.2, 84.1, False), "83.2 83.4 83.6 83.8 84.0"),
    ):
        assert " ".join(page.browser.execute_script(texts, *given)) == expected


def test_a_half_written_line_of_the_metrics_waits_for_its_end(page, runs):
    live = runs[2]
    lines = (runs[0] / "metrics.jsonl").read_bytes().splitlines(keepends=True)
    with RunDirectory(live).lock(4):
        page.open("overview?run=live")
        page.wait(f"return {LENGTH}?.x.length === 2")
        # as while it is written
        append_bytes(live / "metrics.jsonl", b"".join(lines[3:-1]) + lines[-1][:40])
        page.wait(f"return {LENGTH}?.x.length === 3")
        append_bytes(live / "metrics.jsonl", lines[-1][40:])
        page.wait(f"return {LENGTH}?.x.length === 4")


def test_the_head_names_accuracy_before_and_after_and_the_first_chart_shows_it(page, client):
    first, *_, last = client.get("evaluations", run="first")["evaluations"]
    page.open("overview?run=first")
    page.wait("return document.querySelector('.headline') !== null")
    change = f"{first['accuracy']:.1%} → {last['accuracy']:.1%}".replace("%", " %")
    assert page.texts(".headline") == [
        f"held out {change} ({100 * last['low']:.1f} to {100 * last['high']:.1f})"
    ]
    change = client.get(
        "paired", a_run="first", a_step=first["step"], b_run="first", b_step=last["step"]
    )
    page.wait("return document.querySelector('.change') !== null")
    interval = f"({points(change['low'])} to {points(change['high'])})"
    assert page.texts(".headline + .change") == [
        f"paired {points(change['difference'], ' points')} {interval}"
    ]
    assert page.texts("[data-chart] h2")[0] == "Held-out accuracy"
    page.wait("return document.querySelector('[data-chart] .chart .point') !== null")
    clipped = (
        "return !document.querySelector('[data-chart] .chart"
        " .point').closest('svg').matches('.chart')"
    )
    # the smaller svg within the chart ends at the axes
    assert not page.browser.execute_script(clipped)


CHARTED = ("overview", "metrics", "evaluation", "compare")


@pytest.mark.parametrize("axis", ["steps", "tokens"])
def test_the_marker_of_step_0_has_room_on_both_sides(page, axis):
    for fragment in CHARTED:
        page.open(f"{fragment}?run=first&x={axis}&find=eval&runs=first,second")
        page.wait("return document.querySelector('.chart .point') !== null")
        charts = "[...document.querySelectorAll('.plot')].map((e) => e.chart).filter((c) => c?.toX)"
        room = f"return {charts}.map((c) => c.toX(0) - c.left)"
        # the marker's radius, and that of its interval
        assert min(page.browser.execute_script(room)) >= 6, fragment


def test_the_axis_of_steps_counts_whole_steps(browser, tmp_path):
    make_run(tmp_path / "a", "train.num_steps=1", "train.eval_every=1")
    shutil.copytree(tmp_path / "a", tmp_path / "b")
    with shown(browser, tmp_path) as page:
        for fragment in (*CHARTED, "problems"):
            page.open(f"{fragment}?run=a&runs=a,b&find=eval")
            page.wait("return document.querySelector('.chart .xtick') !== null")
            assert {text for text in page.texts(".xtick text") if not text.isdecimal()} == set(), (
                fragment
            )
        page.open("overview?run=a")
        page.wait(f"return {LENGTH}?.x.length === 1")
        chart = "document.querySelector('[data-chart] .plot')"
        page.browser.execute_script(f"{chart}.chart.zoom([0.2, 1.1], null)")
        page.wait(
            f"return [...{chart}.querySelectorAll('.xtick text')].map((e) => e.textContent).join()"
            " === '1'"
        )
    assert page.errors() == []


def test_a_step_without_a_value_is_a_gap_and_an_evaluation_without_a_verdict_says_so(
    browser, tmp_path
):
    length = "rollout/response_tokens_mean"
    tokens = "rollout/tokens_trained"
    rows = [
        {"step": step, length: float(step), tokens: 9, "rollout/tokens_generated": 9}
        for step in range(1, 21)
    ]
    rows[4] = {"step": 5, length: float("nan")}
    del rows[6][length], rows[8]  # step 7 lacks a metric, and step 9 all of them
    run = new_run(tmp_path / "a")
    response = JudgedResponse("", None, 0.0, "timed out", None, 3, "stop")
    for step, correct in ((0, False), (8, None), (20, True)):
        judged = response if correct is None else replace(response, correct=correct, error=None)
        plan = EvaluationPlan("sums", 2, 1.0, 1.0, 8, (), 0, RewardConfig(verifier="exact").judging)
        found = Evaluation(plan, (JudgedProblem(Problem("p", "?", "!"), (judged, judged)),))
        write_evaluation(run, step, found.summary(), found.table())
        rows.append({"step": step, **found.metrics()})
    log_metrics(run.metrics, sorted(rows, key=lambda row: row["step"]))
    with shown(browser, tmp_path) as page:
        page.open("overview?run=a")
        data = "(document.querySelector(\"[data-chart='{}'] .plot\")?.chart?.traces || [])"
        for title in ("Response length", "Token breakdown", "Held-out accuracy"):
            page.browser.execute_script(
                f"document.querySelector(\"[data-chart='{title}']\").scrollIntoView()"
            )
            page.wait(f"return {data.format(title)}.length > 0")
        for trace in page.browser.execute_script(f"return {data.format('Response length')}"):
            assert [y is None for y in trace["y"]].count(True) == 3
            assert [x for x, y in zip(trace["x"], trace["y"], strict=True) if y is None] == [
                6,
                8,
                10,
            ]
            marked = [x for x, size in zip(trace["x"], trace["sizes"], strict=True) if size]
            assert marked == [6, 8]  # between two gaps
        areas = page.browser.execute_script(f"return {data.format('Token breakdown')}")
        assert [each["x"] for each in areas] == [[1, 2, 3, 4], [6, 7, 8], list(range(10, 21))]
        assert [each["inLegend"] for each in areas] == [True, False, False]
        (trace,) = page.browser.execute_script(f"return {data.format('Held-out accuracy')}")
        assert trace["y"] == [0, None, 100]
        page.open("evaluation?run=a")
        page.wait("return document.querySelectorAll('td[data-name=accuracy]').length === 3")
        assert page.texts("td[data-name=accuracy]") == ["0.0 %", "nothing judged", "100.0 %"]
        assert "nothing judged: no response has a verdict" in page.texts(
            "td[data-name='95 % interval']"
        )
        assert set(page.texts("td[data-name='judged by']")) == {"exact"}
        page.open("log?run=a")
        page.wait("return document.querySelector('main').textContent.includes('No log')")
    assert page.errors() == []


def test_the_head_shows_the_newest_data_that_was_evaluated(browser, tmp_path):
    """A fork with another data.eval has the metrics of its parent."""
    run = new_run(tmp_path / "a")
    rows = []
    for step, name, accuracy in (
        (0, "old", 0.1),
        (3, "old", 0.2),
        (6, "new", 0.8),
        (9, "new", 0.9),
    ):
        values = {"accuracy": accuracy, "avg@4": accuracy, "truncated_fraction": 0.0}
        rows.append({"step": step, **{f"eval/{name}/{key}": values[key] for key in values}})
    log_metrics(run.metrics, rows)
    with shown(browser, tmp_path) as page:
        page.open("overview?run=a")
        page.wait("return document.querySelector('.headline') !== null")
        assert page.texts(".headline") == ["held out 80.0 % → 90.0 %"]
        # the evaluations have no files that can be paired
        assert all("/api/paired?" in error for error in page.errors())


def test_a_problem_without_a_verdict_has_no_score(browser, tmp_path):
    run = new_run(tmp_path / "a")
    failed = {"correct": None, "score": None, "reward": None, "advantage": None}
    text = {"source": "s", "prompt": "?", "response": "text", "answer": "1", "finish": "stop"}
    tokens = {"prompt_tokens": 1, "response_tokens": 1, "response_ids": [1], "version": 0}
    unused = dict.fromkeys(("fields", "components", "engine_logprobs"))
    row = {"step": 1, "group_id": 0, "problem_id": "bad", "outcome": "invalid", "error": "failed"}
    run.rollouts_folder.mkdir(exist_ok=True)
    rows = [row | failed | text | tokens | unused | {"sample": sample} for sample in range(2)]
    write_rollouts(run.rollouts(1), rows)
    with shown(browser, tmp_path) as page:
        page.open("problems?run=a")
        page.wait("return document.querySelector('a.cell') !== null")
        assert page.titles("a.cell") == ["step 1: no verdict, invalid"]
        assert "neither right nor wrong" in page.texts(".cards .soft")
        page.open("group?run=a&step=1&group=0")
        page.wait("return document.querySelector('dl.facts') !== null")
        assert "no verdict" in page.texts("dl.facts dd")
    assert page.errors() == []


def test_the_focus_stays_where_a_key_was_pressed(page):
    from selenium.webdriver.common.keys import Keys

    for fragment, pressed, effect in (
        ("overview", "Over-tokens", "location.hash.includes('x=tokens')"),
        ("problems", "Order-rate", "location.hash.includes('order=rate')"),
        ("overview", "tab-options", "document.querySelector('main h1')?.textContent === 'Options'"),
    ):
        page.open(f"{fragment}?run=first")
        page.wait(f"return document.getElementById({pressed!r}) !== null")
        page.browser.execute_script(f"document.getElementById({pressed!r}).focus()")
        page.browser.switch_to.active_element.send_keys(Keys.ENTER)
        page.wait(f"return {effect} && !document.querySelector('main.loading')")
        assert page.browser.execute_script("return document.activeElement.id") == pressed


def test_a_run_without_curves_says_why(browser, runs, tmp_path):
    for name in ("failed", "infinite", "damaged"):
        shutil.copytree(runs[0], tmp_path / name, ignore=shutil.ignore_patterns("checkpoints"))
    truncate_after(tmp_path / "failed" / "metrics.jsonl", 0)
    close_with(tmp_path / "failed", "VerifierFailed: no verdict")
    lengths = tmp_path / "infinite" / "metrics.jsonl"
    records = read_metrics(lengths)
    truncate_after(lengths, 0)
    log_metrics(
        lengths, [record | {"rollout/response_tokens_mean": float("nan")} for record in records]
    )
    append_bytes(tmp_path / "damaged" / "metrics.jsonl", b"nonsense\n")
    expected = {
        "failed": "This run ended before its first step.",
        "infinite": "No value of rollout/response_tokens_mean is finite.",
        "damaged": "The metrics of this run cannot be read.",
    }
    with shown(browser, tmp_path) as page:
        for name, reason in expected.items():
            page.open(f"overview?run={name}")
            page.wait("return document.querySelector('.plot-empty') !== null")
            assert page.texts("[data-chart='Response length'] .plot-empty") == [reason]
    assert page.errors() == []


def test_many_runs_with_long_names_leave_room_for_the_charts(browser, runs, tmp_path):
    for i in range(50):
        copied = (
            tmp_path / f"a-name-that-somebody-made-of-the-options-of-a-sweep-lr-0.003-number-{i:02}"
        )
        shutil.copytree(runs[0], copied, ignore=shutil.ignore_patterns("checkpoints", "rollouts"))
    with shown(browser, tmp_path) as page:
        page.open(f"compare?run={copied.name}")
        page.wait("return document.querySelector('.chart .drag') !== null")
        top = "return document.querySelector('[data-chart]').getBoundingClientRect().top"
        assert page.browser.execute_script(top) < 650
        assert page.titles("#head, .filters button")[0] == copied.name  # the chosen runs come first
        names = page.texts("[data-chart] .legendtext")[:4]
        assert len(set(names)) == 4  # cut in the middle, so that they differ
        assert max(map(len, names)) <= 36
        plot = "return document.querySelector('[data-chart] .plot').chart.innerHeight"
        assert page.browser.execute_script(plot) > 100
    assert page.errors() == []


def test_each_response_is_shown_with_its_question(page, client):
    page.open("rollouts?run=first")
    page.wait("return document.querySelectorAll('tbody tr').length > 3")
    rows = client.get("rollouts", run="first")["rows"]
    assert page.texts("td[data-name=question]") == [row["question"] for row in rows]
    assert page.texts("td[data-name=reference]") == [row["answer"] for row in rows]
    assert "system" not in "".join(row["question"] for row in rows)


def test_every_metric_of_a_run_is_found_by_its_name(page, client):
    columns = client.get("metrics", run="first")["columns"]
    page.open("metrics?run=first")
    page.wait("return document.querySelector('#f-find') !== null")
    # the ends of an interval are in the chart of its metric
    charts = [name for name in columns if not name.endswith(("/low", "/high"))]
    assert sorted(page.texts("[data-chart] h2")) == sorted(charts)
    assert len(charts) == len(columns) - 2
    page.browser.execute_script(
        "const f = document.querySelector('#f-find'); f.value = 'loss RATIO'; f.dispatchEvent(new"
        " Event('input'))"
    )
    shown = [name for name in sorted(columns) if "loss" in name and "ratio" in name]
    assert page.texts("[data-chart]:not([hidden]) h2") == shown
    assert page.texts(".filters [role=status]") == [f"{len(shown)} of {len(charts)} charts"]
    page.wait("return document.querySelector('[data-chart]:not([hidden]) .chart .drag') !== null")
    page.open("metrics?run=first&find=optim/lr")
    page.wait("return document.querySelector('[data-chart]:not([hidden]) .chart .drag') !== null")
    assert page.texts("[data-chart]:not([hidden]) .ytitle") == []  # a number without a unit


def test_options_findings_and_the_log_have_pages(page, client):
    page.open("options?run=first")
    page.wait("return document.querySelectorAll('tbody tr').length > 3")
    rows = client.get("options", run="first")["rows"]
    written = [row["name"] for row in rows if row["written"]]
    assert page.texts(".table-wrap:not(details *) td:first-child code") == written
    assert {"model.name", "optim.lr", "data.train.size"} <= set(written)
    assert not {"loss.clip_high", "optim.betas", "distributed.launcher"} & set(written)
    folded = [row for row in rows if not row["written"]]
    # those that dapo set to fit come before the defaults
    folded.sort(key=lambda row: row["value"] == row["default"])
    assert page.texts("details td:first-child code") == [row["name"] for row in folded]
    assert not page.browser.execute_script("return document.querySelector('main details').open")
    page.open("findings?run=first")
    found = client.get("findings", run="first")["findings"]
    assert [text.split(" ", 1)[1] for text in page.texts(".finding h2")] == [
        f["name"].replace("_", " ") for f in found
    ]
    assert all(any(f["cause"] in text for text in page.texts(".finding")) for f in found)
    page.open("log?run=first")
    page.wait("return document.querySelector('.log') !== null")
    assert page.texts(".log") == [client.get("log", run="first")["text"]]
    assert "step 4/4  reward" in page.texts(".log")[0]
    page.click("button", "verifier.log")
    page.wait("return document.querySelector('.log').textContent.startsWith('judged')")


def test_an_option_that_a_resume_changed_is_shown_with_its_steps(browser, runs, tmp_path):
    run = shutil.copytree(runs[0], tmp_path / "changed")
    directory = RunDirectory(run)
    resumed = load_config(directory.config, ["optim.lr=0.002"])
    directory.replace_config(dump_config(resumed), after=1)
    with shown(browser, run) as page:
        page.open("options?run=changed&find=optim.lr")
        page.wait("return document.querySelector('tbody tr') !== null")
        assert page.texts("tbody tr:first-child code")[:2] == ["optim.lr", "0.002"]
        written = ".table-wrap:not(details *) tr:first-child td[data-name='before a resume']"
        assert page.texts(written) == ["0.003 up to step 1"]
    assert page.errors() == []


def test_every_curve_over_steps_has_a_mark_where_a_resume_changed_an_option(
    browser, runs, tmp_path
):
    from selenium.webdriver.common.action_chains import ActionChains

    run = shutil.copytree(runs[0], tmp_path / "changed")
    directory = RunDirectory(run)
    changes = ["optim.lr=0.002", "data.system=Be brief"]
    directory.replace_config(dump_config(load_config(directory.config, changes)), after=1)
    text = "resumed after step 1 with data.system none → Be brief, optim.lr 0.003 → 0.002"
    with shown(browser, run, runs[1]) as page:
        for tab, title in {
            "overview": "Reward",
            "metrics": "reward/mean",
            "evaluation": "Held-out accuracy",
            "problems": "Groups by pass rate",
            "compare": "reward/mean",
        }.items():
            page.open(f"{tab}?run=changed")
            card = f"document.querySelector(\"[data-chart='{title}']\")"
            page.wait(f"return {card} !== null")
            page.browser.execute_script(f"{card}.scrollIntoView({{block: 'center'}})")
            mark = page.wait(f"return {card}.querySelector('line.mark')")
            titles = page.browser.execute_script(
                f"return [...{card}.querySelectorAll('line.mark title')].map((e) => e.textContent)"
            )
            assert titles == [f"changed: {text}" if tab == "compare" else text], tab
            chart = f"{card}.querySelector('.plot').chart"
            place = page.browser.execute_script(f"return {chart}.toX(1.5)")
            assert float(mark.get_attribute("x1")) == pytest.approx(place), tab
            # the axis of tokens has it between the sums of the same steps
            if tab == "overview":
                page.click("button", "tokens")
                page.wait(f"return {chart}?.layout.x.title === 'generated tokens'")
                marks = page.browser.execute_script(f"return {chart}.layout.marks")
                xs = page.browser.execute_script(f"return {chart}.traces[0].x")
                assert xs[0] < marks[0]["x"] < xs[1]
        page.open("metrics?run=changed")
        card = "document.querySelector(\"[data-chart='reward/mean']\")"
        area = page.wait(f"return {card}?.querySelector('.drag')")
        page.browser.execute_script(f"{card}.scrollIntoView({{block: 'center'}})")
        chart = f"{card}.querySelector('.plot').chart"
        offset = page.browser.execute_script(
            f"return {chart}.toX(1.5) - {chart}.left - {chart}.innerWidth / 2"
        )
        ActionChains(page.browser).move_to_element_with_offset(area, int(offset), 0).perform()
        page.wait(f"return !{card}.querySelector('.tip').hidden")
        assert page.texts(".tip:not([hidden]) .mark-text") == [text]
        page.open(f"overview?run={runs[1].name}")
        page.wait("return document.querySelector(\"[data-chart='Reward'] .line\") !== null")
        assert page.texts("line.mark") == []
    assert page.errors() == []


@for_each_row(
    ["fragment", "message"],
    [
        ("overview?run=nobody", "There is no run nobody here"),
        ("nothing?run=first", "There is no page nothing"),
        ("group?run=first&step=99&group=0", "has no judged responses of step 99"),
        ("evaluation?run=first&a_step=3&b_step=4", "first has no evaluation of step 3"),
        ("rollouts?run=first&first_step=x", "first_step must be an integer"),
        ("rollouts?run=first&sort=upwards", "sort must be some of"),
        ("compare?run=first&runs=first,nobody", "There is no run nobody here"),
    ],
)
def test_a_wrong_address_says_so(browser, client, fragment, message):
    page = Page(browser, f"http://127.0.0.1:{client.port}/")
    page.open("overview?run=first")
    page.wait("return document.querySelector('.headline') !== null")
    page.browser.execute_script(f"location.hash = '#/{fragment}'")
    page.wait(f"return document.querySelector('main').textContent.includes({message!r})")
    if "run=nobody" in fragment:
        assert page.texts("#summary") == [""]
    # the browser's own line about the answer
    assert all("status of 40" in error for error in page.errors())


def test_a_sheet_has_every_chart_as_wide_as_itself_and_nothing_to_press(page):
    never_idle = {"source": "window.requestIdleCallback = () => 1"}
    script = page.browser.execute_cdp_cmd("Page.addScriptToEvaluateOnNewDocument", never_idle)
    try:
        page.open("overview?run=first")
        page.wait("return document.querySelector('.chart .drag') !== null")
        has_charts = (
            "return [...document.querySelectorAll('[data-chart]')].map((c) =>"
            " c.querySelector('.chart .drag') !== null)"
        )
        assert not all(page.browser.execute_script(has_charts))
        page.browser.execute_cdp_cmd("Page.printToPDF", {})
        assert all(page.browser.execute_script(has_charts))
        page.browser.execute_script("dispatchEvent(new Event('beforeprint'))")
        head = page.texts("#print-head")[0]
        assert all(
            text in head
            for text in ("first, finished", *page.texts(".headline"), *page.texts(".change"))
        )
        page.browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"media": "print"})
        shown = (
            "return [...document.querySelectorAll('header, button, input')].filter((e) =>"
            " e.checkVisibility()).length"
        )
        assert page.browser.execute_script(shown) == 0
        widths = """return [...document.querySelectorAll('[data-chart] .chart')].map((e) =>
            e.getBoundingClientRect().width / document.documentElement.clientWidth)"""
        assert min(page.browser.execute_script(widths)) > 0.9
        cut = (
            "return [...document.querySelectorAll('.card')].every((e) =>"
            " getComputedStyle(e).breakInside === 'avoid')"
        )
        assert page.browser.execute_script(cut)
    finally:
        page.browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"media": ""})
        page.browser.execute_cdp_cmd("Page.removeScriptToEvaluateOnNewDocument", script)


def test_without_printing_every_chart_appears_when_nothing_else_is_to_do(page):
    page.open("overview?run=first")
    page.wait(
        "return [...document.querySelectorAll('[data-chart]')].every((c) => c.querySelector('.chart"
        " .drag'))"
    )


def luminance(colour: str) -> float:
    """The relative luminance of `rgb(r, g, b)`, by WCAG 2."""
    parts = [int(part) / 255 for part in re.findall(r"\d+", colour)[:3]]
    linear = [
        part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts
    ]
    return sum(weight * part for weight, part in zip((0.2126, 0.7152, 0.0722), linear, strict=True))


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_the_chosen_button_is_legible_also_under_the_pointer(page, theme):
    from selenium.webdriver.common.action_chains import ActionChains

    page.open("overview?run=first")
    page.browser.execute_script(f"document.documentElement.dataset.theme = {theme!r}")
    button = page.wait("return document.querySelector('main button[aria-pressed=true]')")
    for is_under_pointer in (False, True):
        if is_under_pointer:
            ActionChains(page.browser).move_to_element(button).perform()
            assert page.browser.execute_script("return arguments[0].matches(':hover')", button)
        style = "const s = getComputedStyle(arguments[0]); return [s.color, s.backgroundColor]"
        ink, ground = sorted(map(luminance, page.browser.execute_script(style, button)))
        assert (ground + 0.05) / (ink + 0.05) >= 4.5


PAGES = (
    "overview",
    "metrics",
    "rollouts",
    "problems",
    "evaluation",
    "compare",
    "findings",
    "options",
    "log",
)


def test_on_a_narrow_window_nothing_is_wider_and_every_tab_is_reached(page):
    def narrow(width: int) -> None:
        size = {"width": width, "height": 800, "deviceScaleFactor": 1, "mobile": False}
        page.browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)

    try:
        for fragment in PAGES:
            narrow(400)
            page.open(f"{fragment}?run=first")
            page.wait("return document.querySelectorAll('main .card, main table').length > 0")
            for width in (400, 800):
                narrow(width)
                scroll, client_width, height, tabs, position = page.browser.execute_script(
                    """const root = document.documentElement, nav = document.querySelector('nav');
                    const tabs = [...nav.querySelectorAll('a')].map((tab) => {
                      tab.scrollIntoView({ inline: 'nearest' });
                      const box = tab.getBoundingClientRect();
                      return [box.left, box.right, box.top];
                    });
                    return [root.scrollWidth, root.clientWidth, root.scrollHeight, tabs,
                      getComputedStyle(document.querySelector('header')).position]"""
                )
                assert scroll <= client_width <= width, fragment
                # one row that scrolls by itself
                assert len({top for _, _, top in tabs}) == 1
                assert all(0 <= left < right <= client_width for left, right, _ in tabs), fragment
                assert position == ("static" if width == 400 else "sticky")
                assert width > 400 or height < 5000, fragment
        narrow(400)
        page.open("rollouts?run=first")
        page.wait("return document.querySelectorAll('tbody tr').length > 3")
        step, response = page.browser.execute_script(
            """const box = (name) => document.querySelector(`tbody td[data-name=${name}]`).getBoundingClientRect();
            return [box('step'), box('response')].map((b) => [b.left, b.right, b.top, b.bottom])"""
        )
        assert response[1] <= 400
        assert response[2] >= step[3]  # the text is below the numbers
        assert len(page.texts("tbody tr")) == 15  # a long list has pages
        # facts are folded until they are asked for
        visible = "return document.querySelector('#summary .fact').checkVisibility()"
        assert not page.browser.execute_script(visible)
        page.click("#more-facts")
        assert page.browser.execute_script(visible)
    finally:
        page.browser.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})


def test_hostile_texts_are_shown_and_do_not_run(page):
    for fragment in (
        "rollouts?run=second",
        "problems?run=second",
        "evaluation?run=second&a_step=4&b_step=0",
    ):
        page.open(fragment)
        page.wait("return document.body.textContent.includes('</script>')")
    page.open("rollouts?run=second")
    page.click("tbody td:nth-child(2) a")
    page.wait("return document.querySelectorAll('.response').length === 4")
    assert HOSTILE in page.texts(".text-box")[0]
    assert (
        page.browser.execute_script(
            "return document.querySelectorAll('main script, main img').length"
        )
        == 0
    )


def attacked(i: int, row: dict[str, Any]) -> dict[str, Any]:
    """A response whose observations, with their roles and characters that turn text around, are an
    attack.
    """
    episode = json.loads(row["episode"])
    observed = {"role": HOSTILE, "content": f"\u202e\x07 {i} {HOSTILE}"}
    messages = [each if each["role"] == "assistant" else observed for each in episode["messages"]]
    said = {"ending": f"\u202e {HOSTILE}", "tool_calls": 3, "tool_errors": 1}
    return row | {"episode": json.dumps(episode | {"messages": messages} | said)}


def test_episodes_are_conversations_whose_observations_are_no_more_than_text(
    browser, episode_run, tmp_path
):
    run = shutil.copytree(episode_run, tmp_path / "episodes")
    rewrite(run, 1, attacked)
    stored = pq.read_table(run / "rollouts" / "step_000001.parquet").to_pylist()
    row = next(row for row in stored if len(row["sampled"] or ()) >= 4)
    name = row["group_id"]
    stored_problem = Problem(row["problem_id"], "", "")
    rows = [row for row in stored if row["group_id"] == name]
    messages = [each for row in rows for each in json.loads(row["episode"])["messages"]]
    turns = [each for each in messages if each["role"] == "assistant"]
    write_report(run, tmp_path / "report.html")
    with shown(browser, run) as served:
        for address in (served.address, (tmp_path / "report.html").as_uri()):
            page = Page(browser, address)
            page.open("rollouts?run=episodes")
            page.wait("return document.querySelectorAll('td[data-name=turns]').length > 3")
            page.open(f"group?run=episodes&step=1&group={name}")
            page.wait("return document.querySelectorAll('.message .t').length > 8")
            assert len(page.texts(".message:not(.observed, .ending)")) == len(turns)
            assert page.texts(".message.ending .content") == [f"\u202e {HOSTILE}"] * len(rows)
            seed = environment_seed(load_config(run / "config.yaml").train.seed, stored_problem)
            assert page.texts("dl.facts code")[-1:] == [str(seed)]
            observed = [each["content"] for each in messages if each["role"] != "assistant"]
            assert page.texts(".message.observed .content") == observed
            assert page.texts(".message.observed .role") == [HOSTILE] * len(observed)
            rewards = [reward for row in rows for reward in json.loads(row["episode"])["rewards"]]
            assert page.texts(".message .role b") == [
                f"{reward:+.2f}".replace("-", "−") for reward in rewards
            ]
            assert all("3 tool calls, 1 failed" in text for text in page.texts(".response .meta"))
            page.click("button", "tokens")
            page.wait("return document.querySelector('.text-box .t.observed') !== null")
            assert len(page.texts(".t.observed")) == sum(
                len(r["response_ids"]) - r["response_tokens"] for r in rows
            )
            page.open("overview?run=episodes")
            page.wait("return document.querySelectorAll('[data-chart]').length === 12")
            assert page.errors() == []
            assert browser.execute_script("return window.hacked") is None


def test_a_report_is_one_file_that_works_without_a_server(browser, runs, tmp_path):
    found = write_report(runs[1], tmp_path / "report.html")
    assert found["groups"] == found["of_groups"] > 0
    assert found["bytes"] < 1_000_000
    page = Page(browser, (tmp_path / "report.html").as_uri())
    page.open("overview?run=second")
    page.wait("return document.querySelector('.chart .drag') !== null")
    page.click("nav a", "Rollouts")
    page.wait("return document.querySelectorAll('tbody tr').length > 3")
    page.click("button", "wrong")
    page.wait(
        "return [...document.querySelectorAll('tbody td:nth-child(4)')].every((e) => e.textContent"
        " === 'wrong')"
    )
    page.click("tbody td:nth-child(2) a")
    page.wait("return document.querySelectorAll('.response').length === 4")
    assert HOSTILE in page.texts(".text-box")[0]
    page.open("evaluation?run=second")
    page.wait("return document.querySelector('#paired') !== null")
    page.click("tbody td a")
    page.wait("return document.querySelectorAll('#detail .text-box').length >= 3")
    page.open("problems?run=second")
    page.wait("return document.querySelectorAll('tbody tr').length > 2")
    page.open("options?run=second")
    page.wait("return document.querySelector('main').textContent.includes('optim.lr')")
    page.open("findings?run=second")
    page.wait("return document.querySelector('main h1').textContent === 'Findings'")
    assert "Compare" not in page.texts("nav")[0]
    page.wait("return document.querySelector('.change') !== null")
    page.click("nav a", "Log")
    page.wait("return document.querySelector('main h1').textContent === 'Log'")
    assert page.texts(".log") == [RunDirectory(runs[1]).console_log.read_text()]
    assert page.errors() == []
    assert browser.execute_script("return window.hacked") is None


def test_a_report_has_the_logs_of_console_and_verifier_as_text(browser, runs, tmp_path):
    run = tmp_path / "run"
    shutil.copytree(runs[0], run)
    logs = (RunDirectory(run).console_log, RunDirectory(run).verifier_log)
    for log in logs:
        append_bytes(log, f"warning: {HOSTILE}\n".encode())
    (RunDirectory(run).logs / "another.log").write_text("not of the verifier")
    write_report(run, tmp_path / "report.html")
    page = Page(browser, (tmp_path / "report.html").as_uri())
    for log in logs:
        page.open(f"log?run=run&file={log.name}")
        page.wait("return document.querySelector('.log') !== null")
        assert page.texts(".log") == [log.read_text()]
        assert page.texts(".log .warned") == [f"warning: {HOSTILE}\n"]
        assert page.texts("main button") == [log.name for log in logs]
    assert page.errors() == []
    assert browser.execute_script("return window.hacked") is None
