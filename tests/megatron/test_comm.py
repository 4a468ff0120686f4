"""Megatron's collectives, compressed: exact where the codec is, close where it is not, equal on all ranks that hold the same."""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Iterator
from typing import Any

import pytest

from tests.megatron.batches import Matrix
from tests.megatron.comm_rows import CASES, EXACT, QUICK, ROWS, SLOW, CommRow
from tests.megatron.rows import MOE
from tests.support.tiers import tier

pytestmark = [
    pytest.mark.distributed,
    pytest.mark.skipif(
        importlib.util.find_spec("megatron.core") is None, reason="megatron-core is not installed"
    ),
]

MATRIX = Matrix(
    "tests.megatron.comm_matrix",
    {**{row.row.name: row.row.world for row in ROWS}, **dict.fromkeys(CASES, 2)},
    batch=4,
)


def results(name: str) -> list[Any]:
    """Of one row or case, by rank."""
    found = MATRIX.results(name)
    if found is None and "fp32 accumulation" in name:
        pytest.skip("this megatron-core does not sum reduce-scatters in float32")
    assert found is not None
    return found


def parameter(row: CommRow, *ways: str) -> Any:
    name = "-".join((f"{row.row.world}: {row.row.name}", *ways))
    return pytest.param(row, *ways, id=name, marks=tier(row.row.name, QUICK, SLOW))


def parameters(rows: list[CommRow]) -> list[Any]:
    return [parameter(row) for row in rows]


all_rows = pytest.mark.parametrize("row", parameters(ROWS))
every_way = pytest.mark.parametrize(("row", "way"), [parameter(row, way) for row in ROWS for way in row.ways])


def of_case(name: str) -> pytest.MarkDecorator:
    """A test of what the ranks found in this case of `comm_cases.py`."""
    return pytest.mark.parametrize("case", [pytest.param(name, marks=pytest.mark.slow)])


def runs(row: CommRow, way: str) -> Iterator[tuple[dict[str, Any], dict[str, Any]]]:
    """(without, with) comm, of every rank."""
    for result in results(row.row.name):
        yield result["plain"], result[way]


@every_way
def test_losses_norms_and_weights(row: CommRow, way: str) -> None:
    with_loss = 0
    for plain, found in runs(row, way):
        if way in EXACT:
            assert found["steps"] == plain["steps"]
            assert found["weights"] == plain["weights"]
        else:
            assert found["weights"] != plain["weights"]
        before, after = (
            [float.fromhex(loss) for loss, _ in one["steps"] if loss is not None] for one in (plain, found)
        )
        assert after == pytest.approx(before, rel=1e-3)
        if after:
            with_loss += 1
            assert len(set(after)) == row.steps, "the model does not learn"
    assert with_loss == row.row.world // row.row.pp


@all_rows
def test_every_kind_of_traffic_passes_the_hooks(row: CommRow) -> None:
    way = row.ways[0]
    for dimension in row.dimensions:
        calls = [found["figures"].get(dimension, {"calls": 0})["calls"] for _, found in runs(row, way)]
        # Of a pipeline without virtual stages one end has nothing to send.
        assert len(calls) == row.row.world
        assert all(calls) if not dimension.startswith("pp") or row.row.vp else any(calls), (dimension, calls)
    seen = {
        name for _, found in runs(row, way) for name, figures in found["figures"].items() if figures["calls"]
    }
    assert seen == set(row.dimensions)


@every_way
def test_fewer_bytes_are_sent_where_a_codec_has_fewer_bits(row: CommRow, way: str) -> None:
    shrunk = 0
    for _, found in runs(row, way):
        for dimension, figures in found["figures"].items():
            # Elements of gradients that did not fit have followed.
            assert 0 <= figures["wire_bytes"] <= figures["raw_bytes"] or figures["overflows"], dimension
            shrunk += figures["wire_bytes"] < figures["raw_bytes"]
    assert bool(shrunk) == (way not in ("raw", "raw, offload", "all too small"))


@every_way
def test_what_several_ranks_hold_is_equal_to_the_bit(row: CommRow, way: str) -> None:
    """Data-parallel replicas; what tensor-parallel ranks repeat; the embedding of the first and the last stage."""
    ranks = results(row.row.name)
    for found in ranks:
        for kind, peers in found["ranks"].items():
            for peer in peers:
                assert ranks[peer][way]["shared"][kind] == found[way]["shared"][kind], kind


@every_way
def test_residuals_are_kept_where_gradients_are_compressed(row: CommRow, way: str) -> None:
    for _, found in runs(row, way):
        gradients = found["figures"].get("dp", {"compressed": 0})
        assert bool(found["residual_bytes"]) == bool(gradients["compressed"] and way not in EXACT)


@every_way
def test_functions_are_replaced_while_attached_and_put_back(row: CommRow, way: str) -> None:
    for _, found in runs(row, way):
        assert found["replaced"] == (27 if way == "raw, offload" else 16)
        assert found["put_back"]
        assert found["counted_steps"] == [row.steps, row.steps]


@pytest.mark.parametrize("row", parameters([row for row in ROWS if "raw, offload" in row.ways]))
def test_offload_and_compression_work_side_by_side(row: CommRow) -> None:
    assert min(found["spilled"] for _, found in runs(row, "raw, offload")) > 2**20


@pytest.mark.parametrize("row", parameters([row for row in ROWS if "all too small" in row.ways]))
def test_messages_below_the_minimum_go_as_they_are(row: CommRow) -> None:
    for _, found in runs(row, "all too small"):
        figures = found["figures"].values()
        assert [one["wire_bytes"] for one in figures] == [one["raw_bytes"] for one in figures]
        assert sum(one["calls"] for one in figures) > 0


@of_case("skipped")
def test_a_skipped_step_drops_the_residuals_and_counts(case: str) -> None:
    for found in results(case):
        before, after, again = found["residual_bytes"]
        assert before > 0 and after == 0 and again == before
        assert found["steps"] == 4


@of_case("overflow")
def test_an_infinite_gradient_of_one_rank_reaches_the_norm_of_all(case: str) -> None:
    for found in results(case):
        assert found.keys() == {"all-reduce", "reduce-scatter"}
        assert not any(math.isfinite(float.fromhex(norm)) for norm in found.values())


@of_case("checkpoint")
def test_residuals_go_through_a_checkpoint(case: str) -> None:
    for found in results(case):
        assert found["equal"] and found["residual_bytes"] > 0


@of_case("checkpoint")
def test_residuals_of_some_ranks_only_are_dropped_by_all(case: str) -> None:
    for rank, found in enumerate(results(case)):
        steps, residual_bytes, said = found["with a rank missing"]
        assert (steps, residual_bytes) == (0, 0)
        assert any("ranks [1]" in line for line in said) == (rank == 0)


@of_case("checkpoint")
def test_a_model_of_which_little_is_compressed_is_told_at_start(case: str) -> None:
    for rank, found in enumerate(results(case)):
        assert len(found["at start"]) == (rank == 0)
        assert all("comm.min_bytes" in text for text in found["at start"])


@of_case("checkpoint")
def test_residuals_of_another_layout_are_dropped_and_the_steps_are_kept(case: str) -> None:
    for rank, found in enumerate(results(case)):
        steps, residual_bytes, said = found["on another layout"]
        assert (steps, residual_bytes) == (2, 0)
        assert any("are dropped" in line for line in said) == (rank == 0)


@of_case("loss_scale")
def test_residuals_follow_the_loss_scale_of_megatrons_optimizer(case: str) -> None:
    for found in results(case):
        assert [scale for scale, *_ in found] == [1.0, 1.0, 2.0, 2.0, 4.0]
        for scale, seen, nbytes, norm in found:
            assert seen == scale and nbytes > 0
            assert 0 < float.fromhex(norm) < 100  # Megatron's, of unscaled gradients


@of_case("transformer_engine")
def test_layers_of_transformer_engine_are_told_by_module_and_group(case: str) -> None:
    for found in results(case):
        calls, errors = found.pop("transformer_engine.pytorch.distributed")
        assert calls == 4
        assert errors and min(errors) > 0 and max(errors) < 0.03
        calls, errors = found.pop("transformer_engine.pytorch.cross_entropy")
        assert (calls, errors) == (0, [0, 0, 0])
        assert len(found) == 3
        assert all(calls == 0 for calls, _ in found.values())


@of_case("compressed_inputs")
def test_a_layer_with_a_compressed_input_sends_its_gradient_as_any_other(case: str) -> None:
    for plain, compressed in results(case):
        assert plain == compressed > 0


@of_case("second_model")
def test_a_model_that_nothing_is_attached_to_sends_as_without_an_attachment(case: str) -> None:
    for found in results(case):
        assert len(found) == 3
        for layout in found.values():
            assert layout["equal"] and layout["weights"]
            first, second, third, fourth = layout["calls"]
            assert first < second == third < fourth, "only the attached model's are compressed"


@of_case("probabilities")
def test_routing_probabilities_are_never_compressed(case: str) -> None:
    for shapes in results(case):
        assert {len(shape) for shape in shapes} == {2, 3}, "tokens of experts, and activations"
        assert MOE["num_moe_experts"] not in {shape[-1] for shape in shapes}


@of_case("rejected")
def test_a_second_attachment_that_compresses_is_rejected_and_so_is_one_without_an_optimizer(
    case: str,
) -> None:
    for found in results(case):
        assert "optimizer=optimizer" in found["no optimizer"]
        assert "compressed already" in found["second"]
        assert found["left"] == "None"
