from itertools import islice
from pathlib import Path

import pytest
import torch

from examples.support import data
from examples.support.data import batches, corpus, library_sources


def test_the_corpus_is_the_text_of_the_standard_library() -> None:
    text = corpus()
    assert text.dtype == torch.uint8 and len(text) > 4_000_000
    whole = bytes(text.numpy())
    import argparse

    assert Path(argparse.__file__).read_bytes() in whole
    assert whole.count(b"import ") > 1000


def test_the_order_is_that_of_names_not_of_the_file_system(tmp_path: Path) -> None:
    for name in ("b.py", "a/z.py", "a.py", "test/fixture.py", "_sysconfigdata_x86.py", "notes.txt"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(name)
    assert [path.relative_to(tmp_path).as_posix() for path in library_sources(tmp_path)] == [
        "a.py",
        "a/z.py",
        "b.py",
    ]


def test_any_file_will_do_and_is_cut_at_the_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    book = tmp_path / "book.txt"
    book.write_bytes("Ä book".encode())
    assert bytes(corpus(book).numpy()) == "Ä book".encode()
    monkeypatch.setattr(data, "CORPUS_LIMIT_BYTES", 3)
    assert len(corpus(book)) == 3


def test_an_empty_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "empty").touch()
    with pytest.raises(ValueError, match="no text to train on"):
        corpus(tmp_path / "empty")


def test_batches_are_windows_of_the_text_with_the_next_byte_as_target() -> None:
    text = torch.arange(200, dtype=torch.uint8)
    for tokens, targets in islice(batches(text, microbatch=3, sequence=8, seed=1), 20):
        assert tokens.shape == targets.shape == (3, 8)
        assert tokens.dtype == targets.dtype == torch.int64
        assert torch.equal(targets, tokens + 1)
        assert torch.equal(tokens, tokens[:, :1] + torch.arange(8))


def test_batches_depend_on_the_seed_alone() -> None:
    text = corpus()[:10_000]

    def first(seed: int) -> list[torch.Tensor]:
        return [tokens for tokens, _ in islice(batches(text, microbatch=2, sequence=16, seed=seed), 3)]

    torch.manual_seed(5)
    one = first(seed=1)
    torch.manual_seed(6)
    state = torch.get_rng_state()
    assert all(torch.equal(a, b) for a, b in zip(one, first(seed=1), strict=True))
    assert torch.equal(state, torch.get_rng_state())
    assert not torch.equal(one[0], first(seed=2)[0])


def test_the_last_window_of_the_text_can_be_drawn_and_a_shorter_text_is_refused() -> None:
    text = torch.arange(9, dtype=torch.uint8)
    tokens, targets = next(batches(text, microbatch=1, sequence=8, seed=0))
    assert tokens[0, 0] == 0 and targets[0, -1] == 8
    with pytest.raises(ValueError, match="8 bytes, one window needs 9"):
        next(batches(text[:8], microbatch=1, sequence=8, seed=0))
