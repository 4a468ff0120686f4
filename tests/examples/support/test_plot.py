import sys
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from examples.support.plot import MatplotlibMissing, plot_activation_memory
from tests.examples.support.runs import result, spilling


def pixels(path: Path) -> np.ndarray:
    return np.asarray(Image.open(path).convert("RGB"))


@pytest.mark.slow
def test_the_plot_is_a_png_with_a_line_per_run(tmp_path: Path) -> None:
    one = plot_activation_memory([result()], tmp_path / "made" / "one.png")
    two = plot_activation_memory(
        [result(), spilling(activation_timeline=[(0.0, 10**8), (2.5, 10**8)])], tmp_path / "two.png"
    )
    assert one.read_bytes().startswith(b"\x89PNG\r\n")
    orange = (pixels(two) == (0xE6, 0x9F, 0x00)).all(axis=2)
    # A level line over the whole step: more than half of the picture's columns have it, in a few rows.
    assert orange.any(axis=0).sum() > pixels(two).shape[1] / 2
    assert not (pixels(one) == (0xE6, 0x9F, 0x00)).all(axis=2).any()


@pytest.mark.slow
def test_higher_memory_is_drawn_higher(tmp_path: Path) -> None:
    level = [
        result("high", activation_timeline=[(0.0, 8 * 10**8), (2.0, 8 * 10**8)], backward_began=None),
        result("low", activation_timeline=[(0.0, 10**8), (2.0, 10**8)], backward_began=None),
    ]
    picture = pixels(plot_activation_memory(level, tmp_path / "level.png"))
    # In the left half, where the legend is not.
    left = picture[:, : picture.shape[1] // 2]
    low_row = np.median(np.nonzero((left == (0xE6, 0x9F, 0x00)).all(axis=2))[0])
    black = np.nonzero((left == (0, 0, 0)).all(axis=2).sum(axis=1) > left.shape[1] / 3)[0]
    assert black.min() < low_row


def test_without_a_timeline_there_is_nothing_to_plot(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no run has a timeline"):
        plot_activation_memory([result(activation_timeline=[])], tmp_path / "none.png")


def test_without_matplotlib_the_error_names_the_extra(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(MatplotlibMissing, match=r"ssdtrain\[plot\]"):
        plot_activation_memory([result()], tmp_path / "none.png")
