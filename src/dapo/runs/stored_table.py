"""Reads Parquet tables that somebody else may have written: kind, types and size are checked before
values are read.
"""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from dapo.core.errors import DataError
from dapo.core.files import damage_of, open_no_link

MAX_BYTES = 2**28
MAX_EXPANSION = 16
"""A table may unpack to MAX_BYTES, or to MAX_EXPANSION times its own bytes if that is more."""
_MAX_COLUMN_CHUNKS = 10**6
_VALUE_BYTES = (64, 8)  # a value becomes a Python object; a value in a list stays in an array


@contextmanager
def stored_table(path: str | Path, schema: pa.Schema | None = None) -> Iterator["StoredTable"]:
    """Open a table.

    Raises DataError for one that is missing, damaged or of another schema, also in the block.
    """
    with damage_of(path, pa.ArrowException, MemoryError), open_no_link(path, "rb") as source:
        metadata = pq.read_metadata(source)
        if metadata.num_columns * metadata.num_row_groups > _MAX_COLUMN_CHUNKS:
            raise ValueError(
                f"it has {metadata.num_row_groups:,} chunks of {metadata.num_columns:,} columns"
            )
        with pq.ParquetFile(
            source, metadata=metadata, read_dictionary=_dictionaries(metadata)
        ) as file:
            yield StoredTable(path, file, schema)


class StoredTable:
    """An open table, whose rows come in chunks."""

    def __init__(self, path: str | Path, file: pq.ParquetFile, schema: pa.Schema | None) -> None:
        self._path = path
        self._file = file
        self._metadata = file.metadata
        self._present: pa.Schema = file.metadata.schema.to_arrow_schema()
        self._schema = self._present if schema is None else schema
        self._leaves: dict[str, list[int]] = {}
        self._stored = 0
        self._unpacked = 0  # bytes of all reads
        for index in range(self._metadata.num_columns):
            name = self._metadata.schema.column(index).path.partition(".")[0]
            self._leaves.setdefault(name, []).append(index)
        self.names = [name for name in self._schema.names if name in self._leaves]
        """The columns of the schema that the table has."""
        for field in self._schema:
            if field.name in self._leaves or not field.nullable:
                self._require_type(field.name)
        self.chunk_rows = [
            self._metadata.row_group(i).num_rows for i in range(self._metadata.num_row_groups)
        ]
        """The number of rows of each chunk."""
        self.chunks = range(len(self.chunk_rows))

    def read(self, columns: Sequence[str], chunks: Sequence[int] | None = None) -> pa.Table:
        """Read columns of some chunks, or of all.

        Raises DataError for a column that the table does not have, ValueError for ill-typed or too
        large ones.
        """
        chunks = self.chunks if chunks is None else chunks
        for name in columns:
            if name not in self.names:
                raise DataError(
                    f"{self._path} has no column {name}; it has {', '.join(self.names)}"
                )
            self._require_type(name)
        column_chunks = [
            self._metadata.row_group(i).column(leaf)
            for i in chunks
            for c in columns
            for leaf in self._leaves[c]
        ]
        self._stored += sum(c.total_compressed_size for c in column_chunks)
        self._count(
            c.total_uncompressed_size + c.num_values * _VALUE_BYTES["." in c.path_in_schema]
            for c in column_chunks
        )
        table = self._file.read_row_groups(list(chunks), columns=list(columns), use_threads=False)
        self._count(map(_repeated_bytes, table.columns))
        fields = [self._schema.field(name) for name in columns]
        table = pa.Table.from_arrays(
            [table.column(field.name).cast(field.type) for field in fields],
            schema=pa.schema(fields),
        )
        table.validate(full=True)
        for column, field in zip(table.columns, fields, strict=True):
            if column.null_count and not field.nullable:
                raise ValueError(f"{column.null_count} rows have no {field.name}")
            if pa.types.is_list(field.type) and pc.list_flatten(column).null_count:
                raise ValueError(f"a list in {field.name} lacks a value")
        return table

    def _count(self, sizes: Iterable[int]) -> None:
        self._unpacked += sum(sizes)
        if self._unpacked > (most := max(MAX_BYTES, MAX_EXPANSION * self._stored)):
            raise ValueError(f"it unpacks to more than {most:,} bytes")

    def _require_type(self, name: str) -> None:
        if name not in self._leaves:
            raise ValueError(f"it has no column {name}")
        stored_type = self._present.field(name).type
        schema_type = self._schema.field(name).type
        if not stored_type.equals(schema_type):
            raise ValueError(f"its column {name} holds {stored_type} instead of {schema_type}")


def _dictionaries(metadata: pq.FileMetaData) -> list[str]:
    """Return the dictionary-encoded columns of texts, which may stand for gigabytes."""
    columns = set()
    for chunk in map(metadata.row_group, range(metadata.num_row_groups)):
        for column in map(chunk.column, range(metadata.num_columns)):
            if column.physical_type == "BYTE_ARRAY" and any(
                "DICTIONARY" in encoding for encoding in column.encodings
            ):
                columns.add(column.path_in_schema)
    return sorted(columns)


def _repeated_bytes(column: pa.ChunkedArray) -> int:
    """Return the bytes that the texts of a column with a dictionary take without one."""
    if not pa.types.is_dictionary(column.type):
        return 0
    return sum(
        pc.sum(pc.binary_length(c.dictionary).take(c.indices)).as_py() or 0 for c in column.chunks
    )
