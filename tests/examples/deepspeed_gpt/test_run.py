"""The demo itself, two layers and few steps, with real DeepSpeed processes."""

import dataclasses
import io
import os
from pathlib import Path

import pytest
from rich.console import Console

from examples.deepspeed_gpt.compare import DIFFERENT, EQUAL, FAILED, main, verdict
from examples.deepspeed_gpt.process import ModeFailed, ModeProcess
from examples.deepspeed_gpt.settings import Settings
from examples.support.result import RunResult
from ssdtrain.telemetry.lines import read_lines
from tests.examples.support.runs import result, spilling

SMALL = {"layers": 2, "hidden": 128, "heads": 2, "sequence": 256, "microbatch": 4, "steps": 5, "dropout": 0.1}
SHAPE = [word for name, value in SMALL.items() for word in (f"--{name}", str(value))]


@dataclasses.dataclass
class Demo:
    status: int
    printed: str
    runs: dict[str, RunResult]
    out: Path
    extensions: list[Path] = dataclasses.field(default_factory=list)


def run_demo(out: Path, *arguments: str) -> Demo:
    printed = io.StringIO()
    status = main([*SHAPE, "--out", str(out), *arguments], Console(file=printed, width=100))
    results = out / "results.jsonl"
    records = list(read_lines(results.read_text().splitlines())) if results.exists() else []
    runs = [RunResult.from_json(record) for record in records]
    return Demo(status, printed.getvalue(), {run.name: run for run in runs}, out)


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> Demo:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OMP_NUM_THREADS", "1")
        # Where torch, and so DeepSpeed, builds extensions on first use.
        patch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path_factory.mktemp("extensions")))
        patch.chdir(tmp_path_factory.mktemp("elsewhere"))
        made = run_demo(tmp_path_factory.mktemp("demo"))
        made.extensions = list(Path(os.environ["TORCH_EXTENSIONS_DIR"]).rglob("*"))
        return made


@pytest.mark.slow
def test_all_three_runs_have_the_same_losses_and_weights_to_the_bit(demo: Demo) -> None:
    assert demo.status == EQUAL, demo.printed
    keep, recompute, spill = (demo.runs[name] for name in ("keep", "recompute", "ssdtrain"))
    assert len(keep.losses) == 5
    assert keep.losses == recompute.losses == spill.losses
    assert keep.weights_sha256 == recompute.weights_sha256 == spill.weights_sha256


@pytest.mark.slow
def test_the_model_learns(demo: Demo) -> None:
    losses = [float.fromhex(loss) for loss in demo.runs["keep"].losses]
    assert 5.3 < losses[0] < 5.9
    assert losses[-1] < losses[0] - 0.3


@pytest.mark.slow
def test_recomputing_lowers_the_peak_of_activations(demo: Demo) -> None:
    keep, recompute = demo.runs["keep"], demo.runs["recompute"]
    assert recompute.activation_peak_bytes < 0.7 * keep.activation_peak_bytes


@pytest.mark.slow
def test_every_run_has_the_timeline_of_one_step(demo: Demo) -> None:
    for run in demo.runs.values():
        # With SSDTrain the highest point depends on when stores end, and may be that of another step.
        highest = max(alive for _, alive in run.activation_timeline)
        assert highest == run.activation_peak_bytes or (
            run.name == "ssdtrain" and 0 < highest < run.activation_peak_bytes
        )
        assert run.backward_began is not None and 0 < run.backward_began < run.activation_timeline[-1][0]


@pytest.mark.slow
def test_only_ssdtrain_writes_and_it_reads_no_more_than_it_wrote(demo: Demo) -> None:
    spill = demo.runs["ssdtrain"]
    assert demo.runs["keep"].bytes_written == demo.runs["recompute"].bytes_written == 0
    # Two blocks of 4 x 256 tokens: 16 hidden-sized tensors of 512 KiB each at least, of which the last may be cancelled.
    assert spill.bytes_written + spill.bytes_cancelled > 2 * 16 * 512 * 1024 * spill.steps
    assert 0 < spill.bytes_read <= spill.bytes_written


@pytest.mark.slow
def test_it_prints_a_table_and_the_verdict_and_leaves_results_logs_and_a_plot(demo: Demo) -> None:
    assert "activation memory, peak" in demo.printed
    assert "SSDTrain and keep: all 5 losses and the final weights are equal to the bit." in demo.printed
    assert sorted(path.name for path in demo.out.iterdir()) == [
        "activation_memory.png",
        "keep.log",
        "recompute.log",
        "results.jsonl",
        "ssdtrain.log",
    ]


@pytest.mark.slow
def test_nothing_is_compiled_on_the_way(demo: Demo) -> None:
    assert demo.status == EQUAL
    assert demo.extensions == []


@pytest.mark.long
def test_a_run_that_fails_ends_the_demo_with_the_end_of_its_log(tmp_path: Path) -> None:
    book = tmp_path / "short.txt"
    book.write_text("too short")
    failed = run_demo(tmp_path / "out", "--modes", "keep", "--data", str(book))
    assert failed.status == FAILED
    assert "the run keep ended with status 1" in failed.printed
    assert "the text has 9 bytes, one window needs 257" in failed.printed.replace("\n", " ")


def test_a_parent_that_gives_up_leaves_no_process_behind(tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt), ModeProcess("keep", Settings(), tmp_path / "log") as process:
        pid = process.pid
        raise KeyboardInterrupt
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


def test_a_process_that_was_killed_is_a_failed_run(tmp_path: Path) -> None:
    with ModeProcess("keep", Settings(), tmp_path / "log") as process:
        os.kill(process.pid, 9)
        with pytest.raises(ModeFailed, match="status -9"):
            process.step()


@pytest.mark.parametrize("arguments", [["--steps", "2"], ["--data", "/no/such/file"], ["--hidden", "100"]])
def test_arguments_that_cannot_be_run_are_refused_before_anything_starts(
    tmp_path: Path, arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["--out", str(tmp_path), *arguments])
    assert ended.value.code == 2
    assert "ssdtrain demo: error:" in capsys.readouterr().err


def judged(*runs: RunResult) -> tuple[int, str]:
    printed = io.StringIO()
    return verdict({run.name: run for run in runs}, Console(file=printed, width=200)), printed.getvalue()


def test_a_difference_of_ssdtrain_fails_the_demo_loudly() -> None:
    status, printed = judged(result(), spilling(losses=[(1.5).hex()] * 3))
    assert status == DIFFERENT
    assert "NOT EQUAL: the loss of step 1 is 1.5" in printed


def test_a_difference_of_recompute_is_told_and_fails_nothing() -> None:
    status, printed = judged(result(), result("recompute", losses=[(1.5).hex()] * 3), spilling())
    assert status == EQUAL
    assert "NOT EQUAL" in printed and "SSDTrain and keep: all 3 losses" in printed
