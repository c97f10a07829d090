"""Joins a Ray cluster, or starts a private one here with loopback addresses and a secret."""

import logging
import os
import secrets
import shutil
import signal
import socket
import tempfile
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dapo.config import Config
from dapo.core.errors import LaunchError
from dapo.distributed.ray.actor import AUTHENTICATION

CONNECT_TIMEOUT_S = 10.0
PRESTART = ("RAY_prestart_worker_first_driver", "RAY_enable_worker_prestart")


def connect(address: str | None) -> "PrivateCluster | None":
    """Join the cluster at `address`, or start a private one and return it. Raises LaunchError."""
    private = PrivateCluster() if address is None else None
    handler = signal.getsignal(signal.SIGTERM)
    try:
        _init(address, private)
    except BaseException:
        if private is not None:
            private.close()
        raise
    finally:  # Ray installs a handler of its own
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, handler)
    return private


def import_ray() -> Any:
    """Return the module `ray`. Raises LaunchError if it is not installed."""
    try:
        import ray
    except ImportError as error:
        raise LaunchError(
            "launcher=ray needs Ray, which is not installed: pip install ray"
        ) from error
    return ray


def describe_exposure(config: Config, *, machines: int, has_token: bool) -> str | None:
    """Describe connections between a cluster's machines without a secret; None without any."""
    exposed = (
        [] if has_token else ["Ray, which runs code for whoever connects (set RAY_AUTH_MODE=token)"]
    )
    if config.distributed.trainer_ranks > 1:
        between_ranks = "gloo" if config.train.device == "cpu" else "gloo and NCCL"
        exposed.append(f"{between_ranks} between trainer ranks")
    if machines < 2 or not exposed:
        return None
    return (
        f"this run uses {machines} machines, and connections between them carry no secret:"
        f" {'; '.join(exposed)}. Use a private network, or a firewall that admits only these"
        " machines"
    )


class PrivateCluster:
    """The settings of a private cluster: loopback addresses, a secret, a folder for sockets.

    Ray reads them from the process; `close` restores the old ones, for a cluster that is joined
    later.
    """

    def __init__(self) -> None:
        from ray._private import ray_constants

        self._constants = ray_constants
        # not gettempdir(), which may be too long for a Unix socket
        self.folder = Path(
            tempfile.mkdtemp(prefix="dapo-ray-", dir="/tmp" if os.path.isdir("/tmp") else None)
        )
        # Ray opens it to all users; the folder around it is private
        self.ray_folder = self.folder / "ray"
        self.logs = self.ray_folder / "session_latest" / "logs"
        self.keeps_logs = False
        secret = self.folder / "token"
        secret.write_text(secrets.token_hex(32))
        self._variables = {name: os.environ.get(name) for name in AUTHENTICATION}
        self._set(dict(zip(AUTHENTICATION, ("token", str(secret), None), strict=True)))
        self._spans_machines = ray_constants.ENABLE_RAY_CLUSTER
        ray_constants.ENABLE_RAY_CLUSTER = False  # every service listens on 127.0.0.1, as on macOS

    def close(self) -> None:
        """Remove the folder unless its logs are needed, and restore the settings of the process."""
        self._set(self._variables)
        self._constants.ENABLE_RAY_CLUSTER = self._spans_machines
        if not self.keeps_logs:
            shutil.rmtree(self.folder, ignore_errors=True)

    def _set(self, variables: Mapping[str, str | None]) -> None:
        from ray import _raylet

        for name, value in variables.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
        raylet: Any = _raylet
        raylet.Config.initialize("")  # Ray has cached the old values
        raylet.AuthenticationTokenLoader.instance().reset_cache()


def _init(address: str | None, private: PrivateCluster | None) -> None:
    import ray
    from ray._private import worker as ray_driver
    from ray.job_config import JobConfig

    class PathlessJobConfig(JobConfig):
        """Keeps the current directory off the workers' import path: Ray adds it unless the job has
        one of its own.
        """

        def _runtime_env_has_working_dir(self) -> bool:
            return True

    if address is not None and "://" in address:
        raise LaunchError(
            f"launcher=ray:{address}: a run is a driver of the cluster, not a Ray client; start it"
            " on one of the cluster's nodes with launcher=ray:auto or ray:HOST:PORT of the head"
        )
    try:
        if address is None:
            # Ray would prestart a process per CPU, without the environment that workers need
            os.environ |= {name: "0" for name in PRESTART if name not in os.environ}
        else:
            _check_reachable(address)
        ray.init(
            address="local" if address is None else address,
            job_config=PathlessJobConfig(),
            include_dashboard=False,
            _temp_dir=None if private is None else str(private.ray_folder),
            log_to_driver=False,
            logging_level=logging.ERROR,
        )
        # it would print pages of a node's log for each lost worker; WorkerDied has the reason
        ray_driver._worker_logs_enabled = False
    except (ray.exceptions.RayError, ConnectionError, RuntimeError, ValueError, OSError) as error:
        if address is None:
            raise LaunchError(f"Ray could not be started on this machine: {error}") from error
        raise LaunchError(
            f"the Ray cluster of launcher=ray:{address} could not be joined; check that the"
            f" address and, with RAY_AUTH_MODE=token, the token are those of its head: {error}"
        ) from error


def _check_reachable(address: str) -> None:
    """Raise ConnectionError or OSError if nothing listens there: Ray itself would retry forever."""
    from ray._private.services import canonicalize_bootstrap_address

    location = canonicalize_bootstrap_address(address)  # `auto` is looked up
    if location is None:
        raise ConnectionError("no Ray is running on this machine")
    host, _, port = location.rpartition(":")
    socket.create_connection((host.strip("[]"), int(port)), timeout=CONNECT_TIMEOUT_S).close()
