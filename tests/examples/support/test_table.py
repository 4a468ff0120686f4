import io

from rich.console import Console

from examples.support.table import comparison_table
from tests.examples.support.runs import result, spilling


def rendered(*runs, width: int = 80, rated_bytes: float = 600e12) -> dict[str, list[str]]:
    """Cells by the name of their row, as they come out on a console of `width` columns."""
    console = Console(width=width, record=True, file=io.StringIO())
    console.print(comparison_table(runs, rated_bytes=rated_bytes, titles={"ssdtrain": "SSDTrain"}))
    rows = [
        line.strip("│┃ ").replace("┃", "│").split("│")
        for line in console.export_text().splitlines()
        if "│" in line or "┃" in line
    ]
    return {row[0].strip(): [cell.strip() for cell in row[1:]] for row in rows}


def test_every_figure_stands_in_its_row_with_its_ratio_to_the_first_run() -> None:
    rows = rendered(result(), spilling(step_seconds=[2.6, 2.6, 2.6]))
    assert rows["final loss"] == ["3.125000", "3.125000"]
    assert rows["losses and weights as keep"] == ["", "to the bit"]
    assert rows["activation memory, peak"] == ["800 MiB", "200 MiB (x0.25)"]
    assert rows["process memory, peak"] == ["1.95 GiB", "1.95 GiB (x1.00)"]
    assert rows["step time, median"] == ["2.50 s", "2.60 s (x1.04)"]
    assert rows["written to SSD per step"] == ["-", "700 MiB"]
    assert rows["read from SSD per step"] == ["-", "600 MiB"]
    assert rows["waited for SSD per step"] == ["-", "100 ms"]


def test_the_projected_life_is_rated_bytes_over_bytes_per_second() -> None:
    a_day_of_writing = 86400 * 700 * 2**20 / 2.5
    rows = rendered(result(), spilling(), rated_bytes=100 * a_day_of_writing)
    assert rows["SSD life, rated 2537 TB"] == ["-", "100 days"]


def test_a_run_that_differs_says_no() -> None:
    rows = rendered(result(), spilling(losses=[(1.0).hex()] * 3))
    assert rows["losses and weights as keep"] == ["", "no"]


def test_cuda_peaks_stand_in_the_table_where_there_are_any() -> None:
    rows = rendered(result(device_peak_bytes=4 * 2**30), spilling(device_peak_bytes=2**30))
    assert rows["CUDA memory, peak"] == ["4.00 GiB", "1.00 GiB (x0.25)"]
    assert "CUDA memory, peak" not in rendered(result(), spilling())


def test_three_runs_fit_a_terminal_of_80_columns() -> None:
    rows = rendered(result(), result("recompute"), spilling(), width=80)
    assert len(rows["activation memory, peak"]) == 3
    assert not any("…" in cell for cells in rows.values() for cell in cells)
