"""Documents on stored experiments: tables, pictures and numbers are those of the stored files."""

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from dapo.analysis.ablate.experiment import ACCURACY, load_experiment
from dapo.analysis.ablate.results import collect
from evidence import claims, measures, report
from evidence.claims import load_claims
from helpers.ablations import write_run
from helpers.paths import ROOT

PAGE = ROOT / "docs" / "lab" / "evidence.md"
CHOOSING = ROOT / "docs" / "losses.md"
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
DOCUMENTS = [
    page
    for page in PAGES
    if re.search("<!-- (claims|table|grid|picture|=)", page.read_text("utf-8"))
]
NAMES = (
    r"SmolLM2(-135M)?|GSM8K|k[123]\b|avg@2|Table 1|[Ff]igure \d|early\.yaml|p < 5 %|95 %"
    r" intervals?|80 % of the cases|"
    r"every 15 or 30 steps|every 3\b|away from 0|leaves? out 0|told from 0|since step 0|1 billion"
)
"""What has a digit in prose and is no result: names, levels of the statistics, settings."""
FRACTIONS = re.compile(
    r"\b(half|thirds?|quarters?|fifths?|sixths?|sevenths?|tenths?|twice|thrice|points?)\b"
)
SETTINGS = r"a quarter of an hour|(first|last) tenth of the steps|twice the base's learning rate"


def prose(text: str) -> Iterator[str]:
    """The sentences of a document, without generated blocks, code, links, and numbers that name
    their source.
    """
    text = re.sub(
        r"^<!-- (\w+: .+?) -->$.*?^<!-- \1 -->$", "", text, flags=re.MULTILINE | re.DOTALL
    )
    text = re.sub(r"^```.*?^```$", "", text, flags=re.MULTILINE | re.DOTALL)
    text = re.sub(r"\S+<!-- = \{.+?\} -->", "", text)
    text = re.sub(r"\]\([^)]*\)|`[^`]*`", "", text)
    yield from re.sub(f"{NAMES}|{SETTINGS}", "", " ".join(text.split())).split(". ")


def numbers_of(text: str) -> list[str]:
    """The sentences of a document that have a number, in digits or as a fraction, without a
    source.
    """
    return [
        sentence
        for sentence in prose(text)
        if re.search(r"\d", sentence) or FRACTIONS.search(sentence)
    ]


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.stem)
def test_a_documents_blocks_and_numbers_are_those_of_the_stored_results(
    document: Path, tmp_path: Path
):
    text = document.read_text(encoding="utf-8")
    assert report.fill(text, tmp_path / "evidence", with_pictures=False) == text
    for link in re.findall(r"\((evidence/[^)]+\.png)\)", text):
        assert (document.parent / link).is_file()


@pytest.mark.parametrize("page", [PAGE, CHOOSING], ids=lambda path: path.stem)
def test_no_number_of_the_prose_is_without_a_source(page: Path):
    text = page.read_text(encoding="utf-8")
    if page == CHOOSING:  # the section that draws the conclusions
        text = text.partition("\n## Which method to use\n")[2].partition("\n## ")[0]
        assert text
    assert not numbers_of(text)
    assert numbers_of(f"{text}\nIt is 3 ahead.\n")
    assert numbers_of(f"{text}\nA third of them is cut off.\n")


def test_every_picture_is_shown_on_the_page_and_every_claim_is_listed():
    text = PAGE.read_text(encoding="utf-8")
    shown = {Path(link).name for link in re.findall(r"\((evidence/[^)]+\.png)\)", text)}
    assert {path.name for path in (PAGE.parent / "evidence").glob("*.png")} == shown
    listed = {
        name for names in re.findall("<!-- claims: (.+?) -->", text) for name in names.split()
    }
    stored = {folder.name for folder in measures.STORED.glob("*")}
    assert listed - {"replicated"} == stored
    assert (
        text.index("![summary]")
        < text.index("<!-- claims: replicated -->")
        < text.index("<!-- claims: ladder")
    )


def test_a_picture_says_the_claim_and_marks_its_window():
    pictured = re.findall(
        r"^<!-- picture: (\w+) -->$", PAGE.read_text(encoding="utf-8"), flags=re.MULTILINE
    )
    for name in set(pictured) - {"summary"}:
        panels = load_experiment(ROOT / "evidence" / f"{name}.yaml").panels
        assert all(panel.title and "/" not in panel.title for panel in panels), name
        for claim in load_claims():
            found = claim.criteria[0].measure
            windows = [
                panel.windows
                for panel in panels
                if (panel.metric, panel.against) == (found.metric, "steps")
            ]
            if claim.experiment == name and isinstance(found.steps, tuple) and windows:
                assert any(found.steps in each for each in windows), claim


def test_every_stored_experiment_has_its_file_and_no_run_of_it_is_missing():
    for folder in sorted(measures.STORED.glob("*")):
        experiment = load_experiment(ROOT / "evidence" / f"{folder.name}.yaml")
        kept = measures.stored(folder.name).facts
        assert [each["name"] for each in kept["experiment"]["variants"]] == [
            v.name for v in experiment.variants
        ]
        # the files evaluate more often now, and threads may stand behind a file alone
        others = ("train.eval_every=", "train.threads=")
        options = [option for option in kept["experiment"]["set"] if not option.startswith(others)]
        assert options == list(experiment.shared)
        states = {run["state"] for run in kept["runs"]}
        assert states <= {"finished", "solved", "failed"}, folder.name


class TestBlocks:
    @pytest.fixture
    def made(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
        """An experiment of three rows in two conditions with its claims, as the report reads it."""
        (tmp_path / "mine.yaml").write_text(
            "base: tiny\nseeds: [0, 1]\nconditions: {clean: [], noisy:"
            " [optim.weight_decay=0.5]}\nvariants: {a: [], b: {set: [loss.clip_high=0.3]}, c:"
            " {inherits: b, set: [loss.clip_high=0.4]}}\nbaseline: a\nplots: [{metric: accuracy,"
            " against: [steps], title: b is ahead, windows: [[1, 4]]}]\nclaims:\n- {text: b leads,"
            " made: after, condition: clean, row: b, than: a, expected: more,\n   delivered:"
            " {metric: rollout/entropy_estimate, above: 2}}\n"
        )
        experiment = load_experiment(tmp_path / "mine.yaml")
        for run in experiment.runs():
            arguments = [
                "train",
                str(run.base),
                *run.overrides,
                "--run-dir",
                str(tmp_path / "runs" / run.name),
            ]
            accuracy = {"a": 0.4, "b": 0.5, "c": 0.3}[run.variant] + 0.1 * (
                run.condition == "noisy"
            )
            write_run(arguments, accuracy=accuracy)
        results = collect(experiment, tmp_path)
        monkeypatch.setattr(report, "stored", {"mine": results}.__getitem__)
        monkeypatch.setattr(report, "FOLDER", tmp_path)
        judged = claims.judge(claims.load_claims(tmp_path), {"mine": results})
        monkeypatch.setattr(claims, "judge_all", lambda: judged)
        return tmp_path

    def filled(self, block: str, folder: Path) -> list[str]:
        document = f"before\n<!-- {block} -->\n<!-- {block} -->\nafter\n"
        text = report.fill(document, folder / "evidence")
        assert report.fill(text, folder / "evidence") == text
        lines = text.splitlines()
        assert (lines[0], lines[-1]) == ("before", "after")
        return lines

    def test_a_grid_has_a_line_for_each_condition(self, made: Path):
        lines = self.filled("grid: mine", made)
        assert "|  | a, % | b vs a | c vs a |" in lines
        (clean,) = [line.split("|") for line in lines if line.startswith("| clean | 40.0")]
        (noisy,) = [line.split("|") for line in lines if line.startswith("| noisy | 50.0")]
        for cells in (clean, noisy):
            assert cells[3].startswith(" +10.0 (")
            assert cells[4].startswith(" -10.0 (")
        assert [
            len(line.split("|"))
            for line in lines
            if line.startswith(("| a / b / c |", "| noisy |"))
        ] == [6, 8, 8]

    def test_a_table_names_the_row_that_a_difference_is_to(self, made: Path):
        lines = self.filled("table: mine", made)
        assert any(
            line.startswith("|  | accuracy, % | difference to the row named | vs a |")
            for line in lines
        )
        row, _ = [line.split(" | ") for line in lines if line.startswith("| c ")]
        assert re.fullmatch(r"-20\.0 \(.+\)( \*)? to b", row[2])
        row, _ = [line.split(" | ") for line in lines if line.startswith("| b ")]
        assert row[2] == "", "the difference to a has a column of its own"

    def test_a_claim_shows_when_it_was_made_its_p_values_and_why_it_was_not_tested(
        self, made: Path
    ):
        (line,) = [
            line for line in self.filled("claims: mine", made) if line.startswith("| b leads")
        ]
        assert " †" in line
        assert "accuracy +10.0 points (" in line
        ((low, high, p),) = re.findall(
            r"\((\S+) to (\S+)\), 2 seeds \| (\.\d{3}) \(\.\d{3}\)", line
        )
        assert (float(low) < 0 < float(high)) == (float(p) > 0.05)
        assert line.endswith("| **not delivered**: `rollout/entropy_estimate` 0.52, not above 2 |")

    def test_a_picture_has_the_titles_and_windows_of_the_file(self, made: Path):
        assert "![mine](evidence/mine.png)" in self.filled("picture: mine", made)
        assert "![differences mine](evidence/mine-differences.png)" in self.filled(
            "picture: differences mine", made
        )
        assert {path.name for path in (made / "evidence").iterdir()} == {
            "mine.png",
            "mine-differences.png",
        }

    def test_a_number_of_the_prose_is_computed_from_its_source(self, made: Path):
        (made / "base.yaml").write_text("preset: grpo\n")
        text = (
            "b: 1<!-- = {experiment: mine, row: b, condition: clean} --> %, (1<!-- = {experiment:"
            " mine, row: b, than: a, condition: noisy, show: +.0f} -->); 1<!-- = {verdict: not"
            " delivered} --> untested, 1<!-- = {experiment: mine, row: a, table: steps} --> steps"
        )
        found = re.sub("<!-- = .*? -->", "", report.fill(text, made))
        assert found == "b: 50.0 %, (+10); 1 untested, 4 steps"


def test_a_metric_of_a_claim_is_stored_or_shown_as_missing():
    missing = {each.text for each, judged in claims.judge_all().items() if judged.acted is None}
    assert missing == {"A KL term costs DAPO accuracy"}
    assert all(judged.effects for judged in claims.judge_all().values())
    assert ACCURACY in {each.criteria[0].measure.metric for each in load_claims()}
