"""Few files see the whole configuration during a run: what is built from it takes the section that it needs."""

import json
import subprocess
import sys
from pathlib import Path

from helpers.paths import TINY

MAX_FILES = 20
PROGRAM = """
import json, sys, threading
from pathlib import Path
import dapo
from dapo.config.options import Config

ROOT = str(Path(dapo.__file__).parent)
found = {}

def note(frame, event, argument):
    code = frame.f_code
    if event != "call" or not code.co_filename.startswith(ROOT):
        return
    for name in code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]:
        if isinstance(frame.f_locals.get(name), Config):
            found.setdefault(code.co_filename[len(ROOT) + 1 :], set()).add(code.co_name)

from dapo.cli.main import main
threading.setprofile(note)
sys.setprofile(note)
try:
    main(sys.argv[2:])
except SystemExit as ended:
    assert not ended.code, ended.code
finally:
    sys.setprofile(None)
Path(sys.argv[1]).write_text(json.dumps({name: sorted(functions) for name, functions in found.items()}))
"""


def test_a_run_hands_its_whole_configuration_to_few_files(tmp_path: Path):
    run = ["train", str(TINY), "train.num_steps=1", "--run-dir", str(tmp_path / "run")]
    command = [sys.executable, "-c", PROGRAM, str(tmp_path / "found.json"), *run]
    ended = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=300, check=False)
    assert ended.returncode == 0, ended.stderr
    found = json.loads((tmp_path / "found.json").read_text())
    assert "start_run" in found["cli/train.py"]  # the profile sees calls
    assert "build_run" in found["training/assemble/build.py"]
    assert len(found) <= MAX_FILES, found
