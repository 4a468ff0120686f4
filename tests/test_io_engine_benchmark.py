import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


@pytest.mark.slow
def test_without_fio_one_line_says_what_to_install() -> None:
    command = [sys.executable, "-m", "benchmarks.io_engine"]
    done = subprocess.run(
        command, env={**os.environ, "PATH": ""}, cwd=ROOT, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 1
    assert "Traceback" not in done.stderr
    assert "install it" in done.stderr.splitlines()[-1]
