"""The text format: totals for counters, the last value for gauges, labels that are escaped, a file that is never half."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from ssdtrain.tools.report.exports import prometheus, write_prometheus
from ssdtrain.tools.report.run import JournaledRun
from tests.support.journals import NAMES, MiB, write

SAMPLE = re.compile(r'[a-zA-Z_:][a-zA-Z0-9_:]*\{([a-z]+="(?:[^"\\\n]|\\.)*",?)+\} [0-9.e+-]+')


def test_counters_are_totals_and_gauges_the_last_value(tmp_path: Path) -> None:
    lines = prometheus(JournaledRun.read(write(tmp_path / "run", steps=5))).splitlines()
    label = 'run="run",rank="1",engine="0"'
    assert f"ssdtrain_ssd_bytes_written_total{{{label}}} {5 * 90 * MiB}" in lines
    assert f"ssdtrain_activation_peak_bytes{{{label}}} {31 * MiB}" in lines
    assert f'ssdtrain_comm_wire_bytes_total{{{label},dimension="dp"}} {5 * 10 * MiB}' in lines
    assert f"ssdtrain_steps_total{{{label}}} 5" in lines
    assert lines.count("# TYPE ssdtrain_comm_wire_bytes_total counter") == 1


def test_every_line_is_a_sample_or_a_type_and_types_stand_together(tmp_path: Path) -> None:
    name = 'a "run"\\'
    text = prometheus(
        JournaledRun.read(write(tmp_path / name, **{"comm/tp/raw_bytes": 1, "odd name/x": 2, **NAMES}))
    )
    families, samples = [], []
    for line in text.splitlines():
        if line.startswith("# TYPE "):
            families.append(line.split()[2])
        else:
            assert SAMPLE.fullmatch(line), line
            assert line.startswith(families[-1] + "{")
            samples.append(line.rpartition(" ")[0])
    assert len(families) == len(set(families)) and len(samples) == len(set(samples))


def test_values_of_a_script_are_told_apart_by_the_name_that_it_gave(tmp_path: Path) -> None:
    lines = prometheus(JournaledRun.read(write(tmp_path / "run", ranks=1, **NAMES))).splitlines()
    label = 'run="run",rank="0",engine="0",name='
    for name, value in NAMES.items():
        written = name.encode(errors="backslashreplace").decode().replace("\\", "\\\\")
        written = written.replace('"', '\\"').replace("\n", "\\n")
        assert f'ssdtrain_logged{{{label}"{written}"}} {value}' in lines


def test_the_file_is_replaced_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run, file = JournaledRun.read(write(tmp_path / "run")), tmp_path / "out" / "ssdtrain.prom"
    file.parent.mkdir()
    write_prometheus(run, file)
    assert file.read_text() == prometheus(run)
    monkeypatch.setattr("os.replace", lambda *_: (_ for _ in ()).throw(OSError("full")))
    with pytest.raises(OSError, match="full"):
        write_prometheus(run, file)
    assert list(file.parent.iterdir()) == [file]
