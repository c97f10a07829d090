"""Optional packages: found before they are needed, or an error that says what to install."""

from importlib.util import find_spec

from dapo.core.errors import DataError


def require_package(package: str, *, extra: str, purpose: str) -> None:
    """Raise DataError with the command to type where `package` is not installed."""
    if find_spec(package) is None:
        raise DataError(
            f"{purpose} needs the package {package}, which is not installed: pip install 'dapo-rl[{extra}]'"
        )
