"""`dapo view` and `dapo report`: the page of runs, served on this machine or written as one file."""

import webbrowser
from collections.abc import Sequence
from pathlib import Path

from dapo.analysis.view.queries import Runs
from dapo.analysis.view.report import write_report
from dapo.analysis.view.server import serve
from dapo.cli.formatting import plural, size
from dapo.core.errors import ConfigError
from dapo.core.terminal import print_json, print_text
from dapo.runs.run_reader import RunReader, find_runs


def view_runs(paths: Sequence[Path], *, port: int | None, open_browser: bool, as_json: bool) -> None:
    """Serve the page of runs until Ctrl-C; with `as_json`, print its address and the runs as one JSON object."""
    runs = Runs(find_runs(paths))

    def on_ready(url: str) -> None:
        if as_json:
            found = [{"name": name, "path": str(run.files.directory.path)} for name, run in runs.runs.items()]
            print_json({"url": url, "runs": found})
            return
        print_text(f"{plural(len(runs.runs), 'run')} at {url} (this machine only); Ctrl-C ends")
        if open_browser:
            webbrowser.open(url)

    serve(runs, port=port, on_ready=on_ready)
    if not as_json:
        print_text("ended; nothing was written into the runs")


def report_run(path: Path, output: Path | None, *, as_json: bool) -> None:
    """Write the report of a run, to `NAME.html` in the current folder if no other file is named."""
    files = RunReader(path.resolve().name, path)
    target = output or Path(f"{files.name}.html")
    if target.suffix.lower() != ".html":
        raise ConfigError(f"--output {target} must end in .html")
    if target.resolve().is_relative_to(path.resolve()):
        raise ConfigError(f"{target} is inside the run, which is never changed; choose another --output")
    if not target.parent.is_dir():
        raise ConfigError(f"there is no folder {target.parent} for the report")
    found = write_report(files, target)
    if as_json:
        print_json(found)
        return
    shown = "all" if found["groups"] == found["of_groups"] else f"{found['groups']:,} of {found['of_groups']:,}"
    print_text(f"{target}: {size(found['bytes'])}, with {shown} groups of responses; it opens without a network")
