"""Checksums of files: counted by reading, or noted by the one who wrote and counted along."""

import zlib
from pathlib import Path

CHUNK_BYTES = 2**25
"""Large, because between two chunks a writer of low priority holds the interpreter, and training waits for it."""
_NOTE = ".crc32"


def crc32_of(path: Path) -> str:
    """Against accidents, which is what there is to guard against; 2.8 GiB/s where SHA-256 makes 0.3."""
    crc, chunk = 0, memoryview(bytearray(min(CHUNK_BYTES, path.stat().st_size + 1)))
    with open(path, "rb", buffering=0) as file:
        while size := file.readinto(chunk):
            crc = zlib.crc32(chunk[:size], crc)
    return f"{crc:08x}"


def note_checksum(path: Path, crc: int) -> None:
    """Leave the checksum of a file that is whole and on the disk beside it, for whoever seals the checkpoint."""
    _note(path).write_text(f"{crc:08x}", encoding="ascii")


def take_noted(path: Path) -> str | None:
    """The checksum that was noted for a file, if one was; the note is removed."""
    note = _note(path)
    if not note.exists():
        return None
    crc = note.read_text(encoding="ascii")
    note.unlink()
    return crc


def is_note(path: Path) -> bool:
    """Is this a note and no file of its own?"""
    return path.suffix == _NOTE


def _note(path: Path) -> Path:
    return path.with_name(path.name + _NOTE)
