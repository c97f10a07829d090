"""Files of a run that somebody else wrote: a manifest that names impossible folders, a table whose
footer lies.
"""

import json
import struct
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from dapo.config import load_config
from dapo.core.errors import DataError
from dapo.data.sources.readers import read_rows
from dapo.runs.directory import RunDirectory
from dapo.runs.run_reader import find_runs
from dapo.runs.stored_config import changed_config, load_run_config, trust_module_folders
from dapo.runs.stored_table import stored_table

ROWS = 777


def test_a_folder_with_nul_in_the_manifest_is_no_folder(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    (tmp_path / "config.yaml").write_text("model: tiny-random\ndata: {train: 'builtin:sums'}\n")
    entries = {"folder": "a\0b", "module_folders": ["c\0d", str(tmp_path)], "run_dir": "e\0f"}
    (tmp_path / "manifest.json").write_text(json.dumps(entries))
    assert load_run_config(RunDirectory(tmp_path)) == load_config(tmp_path / "config.yaml")
    trust_module_folders(tmp_path)
    assert f"modules are imported also from {tmp_path}" in capsys.readouterr().out


def test_relative_folders_of_model_and_teacher_are_those_where_the_run_was_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    started_in = tmp_path / "there"
    for name in ("models/own", "models/teacher"):
        (started_in / name).mkdir(parents=True)
    options = (
        "model: models/own\n"
        "data: {train: 'builtin:sums'}\n"
        "loss: {kl_coef: 1.0, reference: {model: models/teacher}}\n"
    )
    run = RunDirectory.create(tmp_path / "run", options, {"folder": str(started_in)})
    monkeypatch.chdir(tmp_path)
    config = load_run_config(run)
    assert config.model.name == str(started_in / "models/own")
    assert config.loss.teacher == str(started_in / "models/teacher")
    moving = load_run_config(run, ["loss.reference={every: 5}"])
    assert (moving.loss.teacher, moving.loss.reference_steps) == (None, 5)


def test_a_new_folder_of_a_model_or_teacher_is_stored_from_the_root(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    options = "model: models/own\ndata: {train: 'builtin:sums'}\nloss: {kl_coef: 1.0}\n"
    file = RunDirectory.create(tmp_path / "run", options, {}).config
    here = tmp_path / "here"
    (here / "moved").mkdir(parents=True)
    monkeypatch.chdir(here)
    changed = changed_config(file, ["model=moved", "loss.reference.model=moved"])
    assert (changed.model.name, changed.loss.teacher) == (str(here / "moved"), str(here / "moved"))
    # what is no folder here stays as it is: an alias, an id of the hub, the stored folder
    assert changed_config(file, ["optim.lr=0.5"]).model.name == "models/own"
    assert changed_config(file, ["model=owner/name"]).model.name == "owner/name"
    (here / "tiny-random").mkdir()
    assert changed_config(file, ["model=tiny-random"]).model.name == "tiny-random"


@pytest.mark.parametrize("content", ["{", '{"stages": {"a": {"options": {"no": 1}}}}'])
def test_among_others_the_runs_of_damaged_stages_are_found(tmp_path: Path, content: str):
    runs = {tmp_path / "one", tmp_path / "staged/a", tmp_path / "staged/b"}
    for run in runs:
        RunDirectory.create(run, "", {})
    (tmp_path / "staged/stages.json").write_text(content)
    assert set(find_runs([tmp_path])) == runs


def _varint(number: int) -> bytes:
    return bytes([number & 127 | 128]) + _varint(number >> 7) if number > 127 else bytes([number])


def _with_footer(path: Path, claimed: int) -> None:
    """Claim another number of rows and of values in the footer of a Parquet file (Thrift's compact
    protocol).
    """
    data = path.read_bytes()
    (size,) = struct.unpack("<I", data[-8:-4])
    footer = data[-8 - size : -8].replace(_varint(2 * ROWS), _varint(2 * claimed))
    path.write_bytes(data[: -8 - size] + footer + struct.pack("<I", len(footer)) + b"PAR1")


def _memory_runs_out(*_: object, **__: object) -> None:
    raise MemoryError


@pytest.mark.parametrize("claimed", [10**6, 2**40, 2**62])
def test_a_footer_that_claims_more_than_the_file_holds_is_damage_or_without_effect(
    tmp_path: Path, claimed: int
):
    path = tmp_path / "rows.parquet"
    pq.write_table(
        pa.table({"prompt": ["a"] * ROWS, "ids": [[1]] * ROWS}), path, compression="zstd"
    )
    _with_footer(path, claimed)
    assert len(list(read_rows(path))) == ROWS  # pyarrow counts the values in the pages
    if claimed > 10**6:
        with (
            pytest.raises(DataError, match=r"rows\.parquet is damaged"),
            stored_table(path) as table,
        ):
            table.read(table.names)


def test_a_column_that_a_table_lacks_is_named_and_is_no_damage(tmp_path: Path):
    path = tmp_path / "rows.parquet"
    pq.write_table(pa.table({"prompt": ["a"], "ids": [[1]]}), path)
    named = pytest.raises(
        DataError, match=r"rows\.parquet has no column answer; it has prompt, ids$"
    )
    with stored_table(path) as table, named:
        table.read(["answer"])


def test_a_file_that_takes_more_memory_than_there_is_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    path = tmp_path / "rows.parquet"
    pq.write_table(pa.table({"prompt": ["a"]}), path)
    monkeypatch.setattr(pq.ParquetFile, "iter_batches", _memory_runs_out)
    with pytest.raises(DataError, match=r"rows\.parquet: not readable as Parquet"):
        list(read_rows(path))
    with (
        pytest.raises(DataError, match=r"rows\.parquet is damaged: MemoryError"),
        stored_table(path),
    ):
        raise MemoryError
