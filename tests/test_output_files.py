"""Files that a run leaves behind are replaced whole, by names that nobody can guess."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from ssdtrain.output_files import replace_file


def test_a_block_that_fails_leaves_the_file_as_it_was_and_nothing_beside_it(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("before")
    with pytest.raises(ZeroDivisionError), replace_file(file) as stream:
        stream.write(b"after")
        raise ZeroDivisionError
    assert file.read_text() == "before" and list(tmp_path.iterdir()) == [file]


@pytest.mark.parametrize("suffix", [".new", ".partial"])
def test_what_somebody_put_beside_it_is_not_written_to(suffix: str, tmp_path: Path) -> None:
    """A partial file of a name that can be guessed would be a link to another file of this user."""
    file, victim = tmp_path / "residuals-rank-0.pt", tmp_path / "victim"
    victim.write_text("precious")
    file.with_suffix(suffix).symlink_to(victim)
    with replace_file(file) as stream:
        stream.write(b"data")
    assert (file.read_bytes(), victim.read_text()) == (b"data", "precious")


def test_the_umask_takes_permissions_away_and_adds_none(tmp_path: Path) -> None:
    before = os.umask(0o027)
    try:
        for mode, expected in ((0o600, 0o600), (0o666, 0o640)):
            with replace_file(tmp_path / oct(mode), mode):
                pass
            assert (tmp_path / oct(mode)).stat().st_mode & 0o777 == expected
    finally:
        os.umask(before)
