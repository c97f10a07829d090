"""A file with one JSON line per finished item, from which an interrupted command resumes."""

import fcntl
import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

from dapo.core.errors import DataError
from dapo.core.files import open_no_link


class Journal:
    """Records by `id`, kept in memory and in the file."""

    def __init__(self, file: IO[bytes], records: dict[str, dict[str, Any]]) -> None:
        self._file = file
        self.records = records

    def add(self, record: Mapping[str, Any]) -> None:
        self._file.write(_line(record))
        self.records[record["id"]] = dict(record)


@contextmanager
def open_journal(path: Path, settings: Mapping[str, Any]) -> Iterator[Journal]:
    """Open and lock the journal at `path`; a new one starts with a line of the `settings`.

    Removes an incomplete last line; deletes a journal without records at the end.

    Raises:
        DataError: another process uses the journal, the file is not a journal, or it has different
            settings.
    """
    settings = json.loads(json.dumps(settings))  # tuples become lists, as in the file
    # unbuffered, so that add() passes a record to the kernel
    with open_no_link(path, "a+b", buffering=0) as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise DataError(
                f"{path} is in use by another process; wait until that ends, or stop it"
            ) from None
        file.seek(0)
        whole_lines, newline, torn = file.read().rpartition(b"\n")
        if torn:
            # what a killed process had not written whole
            file.truncate(len(whole_lines) + len(newline))
        lines = _read(whole_lines, path)
        if not lines:
            file.truncate(0)
            file.write(_line({"settings": settings}))
        else:
            stored_settings = lines[0]["settings"]
            changes = []
            for key in sorted({*stored_settings, *settings}):
                before = stored_settings.get(key)
                now = settings.get(key)
                if before != now:
                    changes.append(f"{key} was {before!r} and is now {now!r}")
            if changes:
                raise DataError(
                    f"{path} holds results of other settings: {'; '.join(changes)}; use those"
                    " settings, or delete the file"
                )
        journal = Journal(file, {line["id"]: line for line in lines[1:]})
        try:
            yield journal
        finally:
            if not journal.records:
                path.unlink()


def _line(value: Mapping[str, Any]) -> bytes:
    return (json.dumps(value) + "\n").encode()


def _read(content: bytes, path: Path) -> list[dict[str, Any]]:
    """Return the lines of a journal, the settings first. Raises DataError."""
    try:
        lines = [json.loads(line) for line in content.split(b"\n") if line]
        has_settings = not lines or "settings" in lines[0]
        if has_settings and all("id" in line for line in lines[1:]):
            return lines
    except (ValueError, TypeError):
        pass
    raise DataError(
        f"{path} is not the journal of an interrupted command; move it away or delete it"
    )
