"""`ssdtrain report` writes the page, the text file, or serves both on loopback."""

from __future__ import annotations

import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from ssdtrain.cli import main
from ssdtrain.report.serve import Server
from tests.support.journals import write


def test_it_writes_the_page_beside_the_journals_or_where_it_is_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run, other = write(tmp_path / "run"), write(tmp_path / "other")
    assert main(["report", str(run)]) == 0
    assert capsys.readouterr().out.strip() == str(run / "report.html")
    assert "<title>SSDTrain report: run</title>" in (run / "report.html").read_text()
    output = tmp_path / "page.html"
    assert main(["report", str(run), "--against", str(other), "-o", str(output)]) == 0
    assert "run against other" in output.read_text()


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


@contextmanager
def serving(directory: Path) -> Iterator[str]:
    with Server(directory, None) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.05,))
        thread.start()
        try:
            yield server.address
        finally:
            server.shutdown()
            thread.join()


def get(address: str) -> tuple[str, str]:
    with urllib.request.urlopen(address, timeout=20) as answer:
        return answer.headers["Content-Type"], answer.read().decode()


def test_it_serves_the_run_as_it_is_now_on_loopback(tmp_path: Path) -> None:
    with serving(tmp_path) as address:
        assert address.startswith("http://127.0.0.1:")
        kind, text = get(address)  # nothing yet
        assert kind.startswith("text/html") and "first step" in text and "refresh" in text
        assert get(address + "metrics")[1] == ""
        write(tmp_path, steps=2)
        assert "steps 1 to 2" in get(address)[1]
        write(tmp_path, steps=3)
        assert "steps 1 to 3" in get(address)[1]
        kind, text = get(address + "metrics")
        assert kind.startswith("text/plain") and "ssdtrain_steps_total" in text
        with pytest.raises(urllib.error.HTTPError, match="404"):
            get(address + "../etc/passwd")


def test_a_journal_that_cannot_be_read_is_an_error_of_that_request(tmp_path: Path) -> None:
    (tmp_path / "rank-0.jsonl").write_text("no json\n")
    with serving(tmp_path) as address:
        with pytest.raises(urllib.error.HTTPError, match="500"):
            get(address)
        (tmp_path / "rank-0.jsonl").unlink()
        write(tmp_path)
        assert "steps 1 to 5" in get(address)[1]


@pytest.mark.parametrize(
    ("words", "why"),
    [
        ("--serve 99999", '--serve: "99999" is not a port; allowed: a port from 0'),
        ("--serve -1", "--serve"),
        ("--serve 0 --trace", "not allowed with argument"),
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


def test_an_address_that_cannot_be_served_on_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with Server(tmp_path, None) as taken:
        port = taken.server_address[1]
        assert main(["report", str(tmp_path), "--serve", str(port)]) == 1
    error = capsys.readouterr().err
    assert f"--host 127.0.0.1 --serve {port}: Address already in use; give another port" in error
