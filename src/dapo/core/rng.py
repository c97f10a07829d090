"""Counter-based randomness, like JAX's `fold_in`: each random choice is a function of its key,
without state.
"""

import hashlib
import json
import operator

import numpy as np
from numpy.typing import NDArray


def keyed_seed(*key: int | str) -> int:
    """Return a 63-bit seed for a key, such as (run seed, "token", step, position, sample)."""
    # numpy integers count as ints: a position gives the same seed after a round trip through JSON
    parts = [part if isinstance(part, str) else operator.index(part) for part in key]
    digest = hashlib.blake2b(json.dumps(parts).encode(), digest_size=8)
    return int.from_bytes(digest.digest(), "big") >> 1


def keyed_uniforms(seed: int, count: int) -> NDArray[np.float64]:
    """Return `[count]` uniform numbers in [0, 1); number t depends only on (seed, t)."""
    return np.random.Generator(np.random.Philox(key=seed)).random(count)


def keyed_permutation(size: int, *key: int | str) -> NDArray[np.int64]:
    """Return a permutation `[size]` of 0 .. size-1 that is a function of the key."""
    return np.random.Generator(np.random.Philox(key=keyed_seed(*key))).permutation(size)
