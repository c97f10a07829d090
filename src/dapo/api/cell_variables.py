"""In a notebook, keeps the run of a failed call in the variable that the call was to set.

`run = dapo.train(...)` sets no variable if it raises, and the next cell would read the run before
it under that name, with other curves and another model. Only a cell's own statement is completed,
never one within a function.
"""

import ast
import linecache
import sys
from types import FrameType

from dapo.core.errors import DapoError


def keep_run(caller: FrameType, error: BaseException) -> None:
    """Assign `error.run` in a cell whose statement `NAME = dapo.train(...)` the error has ended."""
    run = getattr(error, "run", None)
    if run is None or caller.f_globals is not _cell_variables():
        return
    name = _assigned_name(caller)
    if name is None:
        return
    is_kept = getattr(caller.f_globals.get(name), "path", None) == run.path
    caller.f_globals[name] = run
    name_variable = getattr(error, "name_variable", None)
    if name_variable is not None:
        name_variable(name)
    elif isinstance(error, DapoError) and not is_kept:
        error.args = (f"{error}; {name} is the run that has ended",)


def _cell_variables() -> dict[str, object] | None:
    """Return the variables of IPython's cells; None outside of IPython."""
    ipython = sys.modules.get("IPython")
    shell = None if ipython is None else ipython.get_ipython()
    return getattr(shell, "user_ns", None)


def _assigned_name(frame: FrameType) -> str | None:
    """Return the variable of a cell that the call in progress is to set; None if there is none."""
    # in a function a name is a local variable
    if frame.f_code.co_name != "<module>":
        return None
    positions = list(frame.f_code.co_positions())[frame.f_lasti // 2]
    source = "".join(linecache.getlines(frame.f_code.co_filename))
    try:
        tree = ast.parse(source)
    except SyntaxError:
        return None
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign | ast.AnnAssign) and node.value is not None:
            call = node.value
            target = node.targets[0] if isinstance(node, ast.Assign) else node.target
            span = (call.lineno, call.end_lineno, call.col_offset, call.end_col_offset)
            if span == positions and isinstance(target, ast.Name):
                return target.id
    return None
