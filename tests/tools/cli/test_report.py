"""`ssdtrain report` writes the page or the text file, whatever the journals hold and whatever lies in their directory."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from ssdtrain.tools.cli import main
from tests.support.journals import NAMES, write


def test_it_writes_the_page_beside_the_journals_or_where_it_is_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run, other = write(tmp_path / "run", loss=2.5), write(tmp_path / "other", loss=2.5)
    assert main(["report", str(run)]) == 0
    assert capsys.readouterr().out.strip() == str(run / "report.html")
    assert "<title>SSDTrain report: run</title>" in (run / "report.html").read_text()
    output = tmp_path / "page.html"
    assert main(["report", str(run), "--against", str(other), "-o", str(output)]) == 0
    assert "run against other" in output.read_text()
    told = capsys.readouterr().out
    assert "memory x1.00 (" in told and "time x1.00 (" in told and "bits equal in " in told


def test_prometheus_writes_that_file_alone(tmp_path: Path) -> None:
    run, file = write(tmp_path / "run"), tmp_path / "x.prom"
    assert main(["report", str(run), "--prometheus", str(file)]) == 0
    assert "ssdtrain_steps_total" in file.read_text()
    assert not (run / "report.html").exists()


def test_what_cannot_be_reported_is_one_line_and_status_1(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run, file = write(tmp_path / "run"), tmp_path / "file"
    file.touch()
    empty = tmp_path / "empty"
    empty.mkdir()
    missing = str(tmp_path / "missing")
    for arguments, why in (
        ([str(empty)], "no rank-N.jsonl with a complete line"),
        ([missing], f"{missing} does not exist: give the directory of report.path"),
        ([missing, "--trace"], f"{missing} does not exist"),
        ([str(file)], f"{file} is not a directory"),
        ([str(run), "--against", missing], f"{missing} does not exist"),
    ):
        assert main(["report", *arguments]) == 1
        error = capsys.readouterr().err
        assert why in error and error.count("\n") == 1


@pytest.mark.parametrize(
    ("words", "why"),
    [
        ("--prometheus x --trace", "not allowed with argument"),
        ("--trace -o x", "--output is the file of the page, which --trace does not write"),
        ("--prometheus x --against y", "--against is for the page, which --prometheus does not write"),
    ],
)
def test_options_that_would_have_no_effect_are_errors_of_usage(
    words: str, why: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["report", str(write(tmp_path / "run")), *words.split()])
    assert ended.value.code == 2
    assert why in capsys.readouterr().err


NUMBERS = {
    **{"big": 1e308, "small": -1e308, "bytes": 10**250, "tiny_seconds": 5e-324, "infinite": float("inf")},
    **{"loss": float("nan"), "saved_bytes": 10**300, "step_seconds": 1e308, "many": 10**4000},
}


@pytest.mark.parametrize("values", [NAMES, NUMBERS], ids=["names", "numbers"])
def test_whatever_a_script_calls_its_values_the_reports_are_written(
    values: dict[str, float], tmp_path: Path
) -> None:
    run = write(tmp_path / "run", **values)
    assert main(["report", str(run), "--against", str(run)]) == 0
    assert main(["report", str(run), "--prometheus", str(tmp_path / "x")]) == 0
    assert "<h2>Step time</h2>" in (run / "report.html").read_text()


@pytest.mark.parametrize(
    "text",
    [
        '{"loss": 1.0}',
        "no json",
        '{"step": ' + "[" * 100_000,
        '{"step": 1' + "0" * 5000 + "}",
        '{"step": 1e400}',
        '{"step": NaN}',
        '{"step": -1}',
        '{"step": 1, "load_waits": [{"module": "x", "seconds": 1' + "0" * 400 + "}]}",
        '{"step": 1, "load_waits": 7}',
        '{"step": 1, "modules": [3]}',
    ],
    ids=lambda text: text[:24],
)
def test_a_line_that_no_journal_has_is_one_line_and_status_1(
    text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "rank-0.jsonl").write_text(text + "\n")
    assert main(["report", str(tmp_path)]) == 1
    error = capsys.readouterr().err
    assert "rank-0.jsonl, line 1" in error and error.count("\n") == 1 and len(error) < 500


def test_a_fifo_in_place_of_a_journal_or_trace_does_not_block(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, arguments in (("rank-0.jsonl", []), ("trace-rank-0.json", ["--trace"])):
        os.mkfifo(tmp_path / name)
        assert main(["report", str(tmp_path), *arguments]) == 1
        assert "no regular file" in capsys.readouterr().err


def test_no_file_that_it_writes_goes_through_a_link_that_somebody_left(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run, victim = write(tmp_path / "run"), tmp_path / "victim"
    victim.write_text("precious")
    for name, arguments in (("report.html", []), ("x.prom", ["--prometheus", str(run / "x.prom")])):
        (run / name).symlink_to(victim)
        assert main(["report", str(run), *arguments]) == 1
        assert f"{name}" in capsys.readouterr().err and victim.read_text() == "precious"
        (run / name).unlink()
        assert main(["report", str(run), *arguments]) == 0


def test_the_page_is_for_this_user_alone_unless_it_was_shared(tmp_path: Path) -> None:
    run = write(tmp_path / "run")
    page, text = run / "report.html", run / "x.prom"
    main(["report", str(run)])
    assert page.stat().st_mode & 0o777 == 0o600
    page.chmod(0o640)
    main(["report", str(run)])
    assert page.stat().st_mode & 0o777 == 0o640
    main(["report", str(run), "--prometheus", str(text)])
    assert text.stat().st_mode & 0o400 and not text.stat().st_mode & 0o022
