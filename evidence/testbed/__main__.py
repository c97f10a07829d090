"""Makes all runs of the testbed, about three hours on two cores: `python -m evidence.testbed`.

Finished runs are skipped, so the command may be stopped and called again. `--minutes` ends it in
time.
"""

import argparse
import os
import time

from evidence.testbed.plan import NAMES, jobs, load
from evidence.testbed.runs import log_line, missing, run_all


def main() -> None:
    """Make the missing runs of the chosen experiments."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "experiments", nargs="*", metavar="EXPERIMENT", help=f"by default all: {', '.join(NAMES)}"
    )
    parser.add_argument(
        "--arm", action="append", default=[], metavar="ARM", help="only this arm; may be repeated"
    )
    parser.add_argument(
        "--seeds", type=_numbers, default=(), help="other seeds than the file's; from 100 on pilots"
    )
    parser.add_argument(
        "--base-models",
        type=_numbers,
        default=(),
        help="other base models, by their recipes' seeds",
    )
    parser.add_argument(
        "--minutes", type=float, default=1e6, help="begin no run that would end later"
    )
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="runs at a time")
    parser.add_argument("--list", action="store_true", help="print the missing runs and make none")
    given = parser.parse_args()
    if given.jobs < 1:
        parser.error(f"--jobs is a number of runs from 1 on, not {given.jobs}")
    if unknown := set(given.experiments) - set(NAMES):
        parser.error(f"no experiment {', '.join(sorted(unknown))}: there are {', '.join(NAMES)}")
    names = given.experiments or [
        name for name in NAMES if not given.arm or set(given.arm) & set(load(name)["arms"])
    ]
    known = dict.fromkeys(arm for name in given.experiments or NAMES for arm in load(name)["arms"])
    if unknown := set(given.arm) - set(known):
        parser.error(f"no arm {', '.join(sorted(unknown))}: there are {'; '.join(known)}")
    wanted = [
        job
        for name in names
        for arm in given.arm or load(name)["arms"]
        if arm in load(name)["arms"]
        for job in jobs(name, arms=(arm,), seeds=given.seeds, base_models=given.base_models)
    ]
    wanted.sort(key=lambda job: (not job.is_primary, job.seed))
    if given.list:
        for job in missing(wanted):
            print(job.kind, job.recipe.seed, job.seed)
        return
    deadline = time.monotonic() + 60 * given.minutes
    first, later = (
        [job for job in wanted if job.is_primary == primary] for primary in (True, False)
    )
    try:  # the base models of other arms are made when the primary arms are complete
        for chosen, after in ((first, later), (later, [])):
            run_all(
                chosen,
                workers=given.jobs,
                seconds=deadline - time.monotonic(),
                log=log_line,
                later=after,
            )
    except KeyboardInterrupt:
        log_line("interrupted; the same command continues")
    log_line(f"{len(wanted) - len(missing(wanted))} of {len(wanted)} runs are stored")


def _numbers(text: str) -> tuple[int, ...]:
    """Numbers separated by commas."""
    return tuple(map(int, text.split(",")))


if __name__ == "__main__":
    main()
