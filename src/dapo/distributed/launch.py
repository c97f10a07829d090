"""The launcher that a configuration names, open for as long as its processes are needed."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

from dapo.config import Config
from dapo.distributed.local import LocalLauncher
from dapo.distributed.protocol import Launcher


@contextmanager
def open_launcher(config: Config, logs: Path | None = None) -> Iterator[Launcher | None]:
    """`launcher`, or None for a run of one process. What processes print goes to `logs`; without it to a folder that
    is removed at the end.
    """
    if not config.is_multiprocess:
        yield None
        return
    with ExitStack() as stack:
        if logs is None:
            logs = Path(stack.enter_context(TemporaryDirectory(prefix="dapo-logs-")))
        launcher = _make(config, logs)
        stack.callback(launcher.close)
        yield launcher


def _make(config: Config, logs: Path) -> Launcher:
    if config.uses_ray:
        from dapo.distributed.ray.launcher import RayLauncher

        return RayLauncher(logs, timeout_s=config.distributed.start_timeout_s, address=config.ray_address)
    return LocalLauncher(logs, timeout_s=config.distributed.start_timeout_s)
