"""Data sets of the Hugging Face hub to rows, through the optional package `datasets`."""

from collections.abc import Iterator
from typing import Any

from dapo.config.data_spec import HubSource
from dapo.core.errors import DataError
from dapo.core.optional import require_package


def read_hub_rows(source: HubSource) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield (`hub:NAME:SPLIT, row 3`, row). Raises DataError without the package, or with the library's reason."""
    label = f"hub:{source.name}:{source.split}"
    require_package("datasets", extra="hub", purpose=label)
    import datasets

    try:
        table = datasets.load_dataset(source.name, source.config, split=source.split)
    except Exception as error:  # the library lets through whatever network, file system and scripts raise
        reason = " ".join(str(error).split()) or "no reason given"
        raise DataError(f"{label} cannot be loaded: {type(error).__name__}: {reason}") from None
    for number, row in enumerate(table, start=1):
        yield f"{label}, row {number}", dict(row)
