"""Writing files: whole, with the usual permissions, never through a link, whatever the text
holds.
"""

import json
import os
import stat
from pathlib import Path

import pytest

from dapo.core.files import atomic_file, atomic_write_json, atomic_write_text, open_no_link, remove


def mode_of(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_a_file_replaces_a_link_and_is_not_written_through_it(tmp_path: Path):
    victim = tmp_path / "victim"
    path = tmp_path / "metrics.jsonl"
    victim.write_text("mine")
    path.symlink_to(victim)
    (tmp_path / ".metrics.jsonl.tmp").symlink_to(victim)
    atomic_write_text(path, "theirs")
    assert victim.read_text() == "mine"
    assert path.read_text() == "theirs"
    assert not path.is_symlink()


def test_two_writers_of_one_file_do_not_share_a_temporary_file(tmp_path: Path):
    path = tmp_path / "file"
    with atomic_file(path) as first, atomic_file(path) as second:
        assert first != second
        first.write_text("first")
        second.write_text("second")
    assert path.read_text() == "first"
    assert [entry.name for entry in tmp_path.iterdir()] == ["file"]


def test_a_failed_write_leaves_the_old_file_and_no_temporary_one(tmp_path: Path):
    path = tmp_path / "file"
    path.write_text("old")
    with pytest.raises(FileNotFoundError), atomic_file(path) as temporary:
        temporary.rename(tmp_path / "moved away")
    (tmp_path / "moved away").unlink()
    with pytest.raises(ZeroDivisionError), atomic_file(path) as temporary:
        temporary.write_text(str(1 // (len("new") - 3)))
    assert [(entry.name, entry.read_text()) for entry in tmp_path.iterdir()] == [("file", "old")]


def test_files_have_the_permissions_that_the_umask_leaves(tmp_path: Path):
    before = os.umask(0o022)
    try:
        atomic_write_text(tmp_path / "whole", "x")
        open_no_link(tmp_path / "appended", "a").close()
    finally:
        os.umask(before)
    assert mode_of(tmp_path / "whole") == mode_of(tmp_path / "appended") == 0o644


@pytest.mark.parametrize("mode", ["a", "ab", "a+b", "w", "r+"])
def test_a_link_is_not_opened_for_writing(tmp_path: Path, mode: str):
    victim = tmp_path / "victim"
    link = tmp_path / "link"
    victim.write_text("mine")
    link.symlink_to(victim)
    with pytest.raises(OSError, match="it is a link, and dapo does not follow links here"):
        open_no_link(link, mode)
    link.unlink()
    link.symlink_to(tmp_path / "new")
    with pytest.raises(OSError, match="it is a link"):
        open_no_link(link, mode)
    assert victim.read_text() == "mine"
    assert not (tmp_path / "new").exists()


def test_what_a_link_points_to_survives_its_removal(tmp_path: Path):
    folder = tmp_path / "folder"
    file = tmp_path / "file"
    folder.mkdir()
    (folder / "content").write_text("mine")
    file.write_text("mine")
    for target in (folder, file):
        link = tmp_path / "link"
        link.symlink_to(target)
        remove(link)
        assert not link.is_symlink()
    assert (folder / "content").read_text() == file.read_text() == "mine"
    remove(folder)
    remove(file)
    remove(tmp_path / "not there")
    assert list(tmp_path.iterdir()) == []


def test_half_of_a_surrogate_pair_is_written_and_read_back(tmp_path: Path):
    atomic_write_json(tmp_path / "file", {"answer": "a\ud800b", "whole": "\U0001f600é"})
    assert json.loads((tmp_path / "file").read_bytes()) == {
        "answer": "a\ud800b",
        "whole": "\U0001f600é",
    }
    atomic_write_text(tmp_path / "file", "a\udfffb")
    assert (tmp_path / "file").read_text() == "a\\udfffb"
