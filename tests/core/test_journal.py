"""The journal: records survive, an incomplete line is removed, another journal or process is an
error.
"""

import pytest

from dapo.core.errors import DataError
from dapo.core.journal import open_journal


def test_a_journal_keeps_records_and_removes_an_incomplete_line(tmp_path):
    path = tmp_path / "j"
    with open_journal(path, {"a": 1}) as journal:
        journal.add({"id": "x", "n": 1})
        journal.add({"id": "y", "n": 2})
    path.write_bytes(path.read_bytes()[:-3])
    with open_journal(path, {"a": 1}) as journal:
        assert journal.records == {"x": {"id": "x", "n": 1}}
        journal.add({"id": "z"})
    with open_journal(path, {"a": 1}) as journal:
        assert list(journal.records) == ["x", "z"]


def test_a_journal_whose_first_line_is_incomplete_starts_again(tmp_path):
    (tmp_path / "j").write_text('{"settin')
    with open_journal(tmp_path / "j", {"a": 1}) as journal:
        journal.add({"id": "x"})
    assert (tmp_path / "j").read_text().splitlines() == ['{"settings": {"a": 1}}', '{"id": "x"}']


def test_a_journal_without_records_leaves_nothing_behind(tmp_path):
    with pytest.raises(ZeroDivisionError), open_journal(tmp_path / "j", {"a": 1}):
        1 / 0  # noqa: B018
    with open_journal(tmp_path / "j", {"a": 2}):
        pass
    assert list(tmp_path.iterdir()) == []


def test_a_journal_of_other_settings_other_content_or_another_process_is_refused(tmp_path):
    with open_journal(tmp_path / "j", {"a": 1, "b": 2}) as journal:
        journal.add({"id": "x"})
        with pytest.raises(DataError, match="in use by another process"):
            open_journal(tmp_path / "j", {}).__enter__()
    message = (
        r"other settings: a was 1 and is now 2; c was None and is now 3; use those settings, or"
        r" delete"
    )
    with (
        pytest.raises(DataError, match=message),
        open_journal(tmp_path / "j", {"a": 2, "b": 2, "c": 3}),
    ):
        pass
    (tmp_path / "k").write_text("notes\n")
    with pytest.raises(DataError, match="is not the journal"), open_journal(tmp_path / "k", {}):
        pass
    assert (tmp_path / "k").read_text() == "notes\n"


def test_settings_are_compared_as_json_reads_them(tmp_path):
    with open_journal(tmp_path / "j", {"ids": (1, 2)}) as journal:
        journal.add({"id": "x"})
    with open_journal(tmp_path / "j", {"ids": [1, 2]}) as journal:
        assert list(journal.records) == ["x"]
