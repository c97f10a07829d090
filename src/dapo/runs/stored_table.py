"""Reads Parquet tables that somebody else may have written: kind, types and size are checked before
values are read.
"""

from collections.abc import Iterator, Sequence
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
_OBJECT_BYTES = 64  # a value becomes a Python object
_ELEMENT_BYTES = 8  # a value in a list stays in an array


@contextmanager
def stored_table(path: str | Path, schema: pa.Schema | None = None) -> Iterator["StoredTable"]:
    """Open a table.

    Args:
        path: the file; a link is refused.
        schema: the columns and types that the table must have; None: those that it has.

    Raises:
        DataError: the table is missing, damaged or of another schema; reads in the block raise it
            too.
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
        # the footer tells the sizes before anything is unpacked
        self._count_chunks(columns, chunks)
        table = self._file.read_row_groups(list(chunks), columns=list(columns), use_threads=False)
        # but not what dictionaries stand for
        for column in table.columns:
            self._count(_repeated_bytes(column))
        fields = [self._schema.field(name) for name in columns]
        arrays = [table.column(field.name).cast(field.type) for field in fields]
        table = pa.Table.from_arrays(arrays, schema=pa.schema(fields))
        # offsets and UTF-8 of a damaged file are not checked by reading it
        table.validate(full=True)
        for column, field in zip(table.columns, fields, strict=True):
            if column.null_count and not field.nullable:
                raise ValueError(f"{column.null_count} rows have no {field.name}")
            if pa.types.is_list(field.type) and pc.list_flatten(column).null_count:
                raise ValueError(f"a list in {field.name} lacks a value")
        return table

    def _count_chunks(self, columns: Sequence[str], chunks: Sequence[int]) -> None:
        """Add the sizes of chunks of columns as the file's footer tells them."""
        column_chunks = [
            self._metadata.row_group(index).column(leaf)
            for index in chunks
            for name in columns
            for leaf in self._leaves[name]
        ]
        # what is stored first: the bound on what it unpacks to grows with it
        self._stored += sum(chunk.total_compressed_size for chunk in column_chunks)
        for chunk in column_chunks:
            is_in_list = "." in chunk.path_in_schema
            value_bytes = _ELEMENT_BYTES if is_in_list else _OBJECT_BYTES
            self._count(chunk.total_uncompressed_size + chunk.num_values * value_bytes)

    def _count(self, size: int) -> None:
        """Add bytes of a read. Raises ValueError if all reads together unpack to too many."""
        self._unpacked += size
        bound = max(MAX_BYTES, MAX_EXPANSION * self._stored)
        if self._unpacked > bound:
            raise ValueError(f"it unpacks to more than {bound:,} bytes")

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
    for i in range(metadata.num_row_groups):
        chunk = metadata.row_group(i)
        for j in range(metadata.num_columns):
            column = chunk.column(j)
            has_dictionary = any("DICTIONARY" in encoding for encoding in column.encodings)
            if column.physical_type == "BYTE_ARRAY" and has_dictionary:
                columns.add(column.path_in_schema)
    return sorted(columns)


def _repeated_bytes(column: pa.ChunkedArray) -> int:
    """Return the bytes that the texts of a column with a dictionary take without one."""
    if not pa.types.is_dictionary(column.type):
        return 0
    total = 0
    for chunk in column.chunks:
        lengths = pc.binary_length(chunk.dictionary).take(chunk.indices)
        total += pc.sum(lengths).as_py() or 0  # the sum of no value is null
    return total
