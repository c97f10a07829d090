"""Makes all runs of the testbed, about three hours on two cores: `python -m evidence.testbed`.

Finished runs are skipped, so the command may be stopped and called again. `--minutes` ends it in time.
"""

import argparse
import os
import time

from evidence.testbed.plan import NAMES, jobs
from evidence.testbed.runs import log_line, missing, run_all


def main() -> None:
    """Make the missing runs of the chosen experiments."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("experiments", nargs="*", metavar="EXPERIMENT", help=f"by default all: {', '.join(NAMES)}")
    parser.add_argument("--arms", default="", help="only these arms, separated by commas")
    parser.add_argument("--seeds", default="", help="other seeds than the file's; from 100 on they are pilots")
    parser.add_argument("--base-models", default="", help="other base models, by the seeds of their recipes")
    parser.add_argument("--minutes", type=float, default=1e6, help="begin no run that would end later")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="runs at a time")
    parser.add_argument("--list", action="store_true", help="print the missing runs and make none")
    given = parser.parse_args()
    arms = tuple(filter(None, given.arms.split(",")))
    seeds, bases = (tuple(map(int, filter(None, text.split(",")))) for text in (given.seeds, given.base_models))
    names = given.experiments or NAMES
    wanted = [job for name in names for job in jobs(name, arms=arms, seeds=seeds, base_models=bases)]
    wanted.sort(key=lambda job: (not job.is_primary, job.seed))
    if given.list:
        for job in missing(wanted):
            print(job.kind, job.recipe.seed, job.seed)
        return
    deadline = time.monotonic() + 60 * given.minutes
    for stage in (True, False):  # the base models of other arms are made when the primary arms are complete
        chosen = [job for job in wanted if job.is_primary == stage]
        run_all(chosen, workers=given.jobs, seconds=deadline - time.monotonic(), log=log_line)
    log_line(f"{len(wanted) - len(missing(wanted))} of {len(wanted)} runs are stored")


if __name__ == "__main__":
    main()
