"""The public surface of the library: its names, its examples, and the page that describes it."""

import doctest
import re
from pathlib import Path

import pytest

from dapo.libs import code_sandbox
from dapo.libs.code_sandbox import LocalSandbox, probe

README = Path(code_sandbox.__file__).with_name("README.md").read_text(encoding="utf-8")
needs_confinement = pytest.mark.skipif(
    probe(LocalSandbox(2**30)) != {}, reason="no program can be confined here"
)


@needs_confinement
@pytest.mark.parametrize(
    "module", [code_sandbox, code_sandbox.code_tests, code_sandbox.probing, code_sandbox.sandbox]
)
def test_the_examples_of_docstrings_give_what_they_show(module):
    result = doctest.testmod(module)
    assert result.attempted > 0
    assert result.failed == 0


@needs_confinement
def test_the_example_of_the_page_runs_and_its_comments_are_true():
    (code,) = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    names: dict[str, object] = {}
    shown = 0
    for line in code.splitlines():
        expression, mark, comment = line.partition("  # ")
        if not mark:
            exec(line, names)
            continue
        value = repr(eval(expression, names))
        assert comment == value or comment.startswith(f"{value}: "), expression
        shown += 1
    assert shown == 4


def test_every_public_name_has_a_docstring():
    assert len(code_sandbox.__all__) == 9
    assert all((getattr(code_sandbox, name).__doc__ or "").strip() for name in code_sandbox.__all__)
