"""Workers of the launcher contract tests.

They import nothing heavy, so that their processes start fast.
"""

import os
import time
import zlib

from dapo.core.errors import ConfigError

VISIBLE = "CUDA_VISIBLE_DEVICES"


class CountingWorker:
    """Counts, fails in every way, and reads weights."""

    def __init__(self, start: int = 0) -> None:
        self.total = start

    def add(self, number: int) -> int:
        self.total += number
        return self.total

    def refuse(self) -> None:
        raise ConfigError("no such thing")

    def break_down(self) -> None:
        print("before the fall", flush=True)
        raise ZeroDivisionError("by zero")

    def end(self, code: int) -> None:
        print("last words", flush=True)
        os._exit(code)

    def sleep(self, seconds: float) -> None:
        time.sleep(seconds)

    def checksums(self, buffers) -> list[tuple[int, int]]:
        return [(part.nbytes, zlib.crc32(part)) for part in buffers.parts]

    def variable(self, name: str) -> str | None:
        return os.environ.get(name)

    def gpus(self) -> list[str]:
        """The GPUs that an actor of Ray computes on, with its node."""
        import ray

        return [
            f"{ray.get_runtime_context().get_node_id()}/{gpu}"
            for gpu in os.environ[VISIBLE].split(",")
        ]

    def unsendable(self) -> object:
        return (n for n in ())

    def read(self, handle, name: str) -> list[float]:
        with handle.open() as weights:
            return dict(weights.named_tensors())[name].tolist()

    def source(self, handle) -> str:
        with handle.open() as weights:
            return str(weights.path)


def failing(**_: object) -> None:
    raise ConfigError("cannot be made")


def slow() -> CountingWorker:
    time.sleep(60)
    return CountingWorker()
