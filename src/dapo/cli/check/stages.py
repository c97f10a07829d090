"""`dapo check` of a configuration with stages."""

from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from dapo.cli.check.command import check_config
from dapo.cli.train import check_stages, errors_of_stage
from dapo.config.stages import Stage
from dapo.core.errors import DapoError
from dapo.core.terminal import print_text


def check_each(stages: Mapping[str, Stage], *, path: Path, verbose: bool) -> bool:
    """Describe each stage, its verdict first, then what they do to each other's evaluations.

    Returns True if all can run. Raises DapoError, which names the stage.
    """
    all_fit = True
    for name, stage in stages.items():
        with errors_of_stage(name):
            fits = check_config(
                stage.config,
                path=path,
                probe=False,
                problems=None,
                samples=None,
                against=None,
                verbose=verbose,
                as_json=False,
                stage=name,
                is_later_stage=stage.takes_model_from is not None,
            )
        all_fit = all_fit and fits
    with suppress(DapoError):  # of data that is on another machine
        for note in check_stages(stages, starts=False):
            print_text(note)
    return all_fit
