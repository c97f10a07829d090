"""Rows of numbers of a few bytes each that read like tuples: a step of the paper's size holds 150 million of them."""

import math
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, TypeVar, overload

if TYPE_CHECKING:  # verifier processes import the types, and never pack anything
    from numpy.typing import DTypeLike, NDArray

T = TypeVar("T", bound=float)


class CompactArray(Sequence[T]):
    """An immutable row of numbers of one type; equal to the tuple of the same Python numbers, and hashed like it.

    In a tuple a number takes 32 bytes and more and crosses to another process one by one; here it takes four, or one.
    """

    __slots__ = ("_array", "_sum")

    def __init__(self, array: "NDArray[Any]") -> None:
        """`array` `[n]` of truth values, integers or floats; from now on nobody may write to it."""
        if array.ndim != 1 or array.dtype.kind not in "bif":
            raise ValueError(f"expected [n] numbers, got {array.dtype} {list(array.shape)}")
        if array.flags.writeable:
            array = array.view()
            array.flags.writeable = False
        self._array = array
        self._sum: float | None = None

    @property
    def array(self) -> "NDArray[Any]":
        """`[n]`, read-only."""
        return self._array

    @property
    def sum(self) -> float:
        """In float64; added up once, however often it is asked for."""
        import numpy as np

        if self._sum is None:
            self._sum = float(self._array.sum(dtype=np.float64))
        return self._sum

    def __len__(self) -> int:
        return len(self._array)

    @overload
    def __getitem__(self, index: int) -> T: ...

    @overload
    def __getitem__(self, index: slice) -> "CompactArray[T]": ...

    def __getitem__(self, index: int | slice) -> "T | CompactArray[T]":
        found = self._array[index]
        return CompactArray(found) if isinstance(index, slice) else found.item()

    def __iter__(self) -> Iterator[T]:
        return iter(self._array.tolist())

    def __contains__(self, value: object) -> bool:
        return isinstance(value, int | float) and bool((self._array == value).any())

    def __add__(self, other: "tuple[T, ...] | CompactArray[T]") -> tuple[T, ...]:
        return tuple(self) + tuple(other)

    def __radd__(self, other: "tuple[T, ...] | list[T]") -> "tuple[T, ...] | list[T]":
        return type(other)((*other, *self))

    def __eq__(self, other: object) -> bool:
        if isinstance(other, CompactArray):
            import numpy as np

            return np.array_equal(self._array, other._array)
        return tuple(self) == other if isinstance(other, tuple) else NotImplemented

    def __hash__(self) -> int:
        return hash(tuple(self))

    def __repr__(self) -> str:
        return repr(tuple(self))

    def __array__(self, dtype: "DTypeLike | None" = None, copy: bool | None = None) -> "NDArray[Any]":
        import numpy as np

        return np.array(self._array, dtype=dtype, copy=copy)

    def __reduce__(self) -> tuple[Any, ...]:
        return _unpickled, (self._array.dtype.str, self._array.tobytes())


def _unpickled(kind: str, data: bytes) -> "CompactArray[Any]":
    """Plain bytes: numpy's own pickles take several times as long for a row."""
    import numpy as np

    return CompactArray(np.frombuffer(data, kind))


def compact(values: Sequence[T]) -> Sequence[T]:
    """The same numbers packed, each exactly as it was; values that are not all of one type of Python's stay as is."""
    import numpy as np

    if isinstance(values, CompactArray) or set(map(type, values)) not in ({int}, {float}, {bool}):
        return values
    try:
        array = np.array(values)
    except OverflowError:
        return values
    if array.dtype.kind not in "bif":  # integers beyond 64 bits
        return values
    narrow = {"i": np.int32, "f": np.float32, "b": np.bool_}[array.dtype.kind]
    with np.errstate(over="ignore"):
        narrowed: NDArray[Any] = array.astype(narrow)
    return CompactArray(narrowed if (narrowed == array).all() else array)


def array_of(values: Sequence[float], dtype: "DTypeLike | None" = None) -> "NDArray[Any]":
    """`[n]` the numbers as an array, without a copy where they are packed and of that type already."""
    import numpy as np

    if isinstance(values, CompactArray):
        return values.array if dtype is None else values.array.astype(dtype, copy=False)
    return np.array(values, dtype=dtype)


def sum_of(values: Sequence[float]) -> float:
    """In float64."""
    return values.sum if isinstance(values, CompactArray) else math.fsum(values)
