"""`dapo show`: a name is found by itself, and one that several things have is not guessed."""

import json

import pytest

from dapo.config.load import shipped
from dapo.config.option_entries import option_entries
from helpers.commands import run


def test_without_a_name_everything_that_can_be_shown_is_listed(capsys: pytest.CaptureFixture[str]):
    code, out, _ = run(capsys, "show")
    words = out.replace(",", " ").split()
    assert code == 0
    assert {"options", "configs", "docs", "schema"} <= set(words)
    assert {*shipped("configs"), *shipped("docs")} <= set(words)
    assert {entry.section for entry in option_entries() if entry.section} <= set(words)


def test_the_names_are_one_object(capsys: pytest.CaptureFixture[str]):
    names = json.loads(run(capsys, "show", "--json")[1])
    assert (names["configs"], names["docs"]) == (list(shipped("configs")), list(shipped("docs")))
    assert {"model", "loss"} <= set(names["options"])


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("quickstart", ("configs", "quickstart")),
        ("configs/tiny.yaml", ("configs", "tiny")),
        ("loss.clip_high", ("options", "loss.clip_high")),
        ("rollout.native", ("options", "rollout.native")),
        ("model", ("options", "model")),
        ("tutorial", ("docs", "tutorial")),
        ("docs/losses.md", ("docs", "losses")),
    ],
)
def test_a_name_alone_shows_what_its_kind_and_the_name_show(
    capsys: pytest.CaptureFixture[str], name: str, words: tuple[str, str]
):
    for flags in ((), ("--json",)):
        code, out, err = run(capsys, "show", name, *flags)
        assert (code, err) == (0, "")
        assert out == run(capsys, "show", *words, *flags)[1]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("data", "data is the name of several things: dapo show options data or dapo show docs"),
        ("quikstart", "is named quikstart; did you mean quickstart?"),
        ("beta", "is named beta; TRL's beta is loss.kl_coef here"),
        ("quickstart tiny", "expected one name, or a name after one of options, configs, docs"),
        ("configs tinny", "no configuration tinny; expected one of calculator"),
        ("schema loss", "the schema is one file and has no part loss"),
    ],
)
def test_a_name_that_names_nothing_or_several_things_is_refused(
    capsys: pytest.CaptureFixture[str], words: str, message: str
):
    code, out, err = run(capsys, "show", *words.split())
    assert (code, out) == (2, "")
    assert message in err
