"""Command lines of Megatron-LM as jobs: against published figures, and by hand."""

from __future__ import annotations

import shlex
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest

from ssdtrain.config import ConfigError
from ssdtrain.config.errors import InvalidValue
from ssdtrain.config.units import GiB
from ssdtrain.tools.whatif.cluster_job import ClusterJob
from ssdtrain.tools.whatif.hardware import find_gpu
from ssdtrain.tools.whatif.megatron_command import CommandLine, read, takes
from tests.support.processes import ROOT

GPT3 = (
    "pretrain_gpt.py --num-layers 96 --hidden-size 12288 --num-attention-heads 96 --seq-length 2048 "
    "--micro-batch-size 2 --global-batch-size 1536 --bf16"
)
SMALL = "--num-layers 8 --hidden-size 1024 --num-attention-heads 16 --seq-length 512 --micro-batch-size 1"
MIXTRAL = (
    "pretrain_gpt.py --num-layers 32 --hidden-size 4096 --num-attention-heads 32 --seq-length 4096 --micro-batch-size 1 --bf16 "
    "--normalization RMSNorm --swiglu --ffn-hidden-size 14336 --group-query-attention --num-query-groups 8 "
    "--vocab-size 32000 --untie-embeddings-and-output-weights --num-experts 8 --position-embedding-type rope "
)


def line(text: str, environment: Mapping[str, str] | None = None) -> CommandLine:
    words = shlex.split(text)
    assert takes(words)
    return read(words, environment or {}, find_gpu("h100"))


def job(text: str, environment: Mapping[str, str] | None = None) -> ClusterJob:
    return line(text, environment).job


def saved(text: str) -> int:
    found = line(text)
    return found.job.model.saved_bytes(found.microbatch, found.job.layout)


def test_a_block_saves_34_sbh_and_what_parallelism_leaves_of_it() -> None:
    """Table 2 of arXiv 2205.05198; b is 2."""
    sbh = 2048 * 2 * 12288
    split = "--tensor-model-parallel-size 8"
    assert saved(GPT3) == pytest.approx(34 * sbh, rel=0.003)
    assert saved(f"{GPT3} {split}") == pytest.approx((10 + 24 / 8) * sbh, rel=0.003)
    assert saved(f"{GPT3} {split} --sequence-parallel") == pytest.approx(34 / 8 * sbh, rel=0.003)
    assert saved(f"{GPT3} --sequence-parallel") == saved(GPT3)
    assert saved(f"{GPT3} --hidden-dropout 0") == pytest.approx(32 * sbh, rel=0.003)


def test_local_layers_save_their_scores_too() -> None:
    """34 sbh + 5 a s^2 b; without dropout of attention 2 of the 5, with selective recomputation none."""
    sbh, scores = 2048 * 2 * 12288, 96 * 2048**2 * 2
    local = f"{GPT3} --transformer-impl local"
    assert saved(local) == pytest.approx(34 * sbh + 5 * scores, rel=0.003)
    assert saved(f"{local} --attention-dropout=0.0") == pytest.approx(34 * sbh + 2 * scores, rel=0.003)
    assert saved(f"{GPT3} --attention-backend unfused") == saved(local)
    assert saved(f"{local} --recompute-activations") == saved(GPT3)
    assert saved(f"{local} --recompute-granularity selective --recompute-modules mlp") == saved(local)
    assert saved(f"{local} --use-flash-attn") == saved(local), "layers of megatron-core do not read it"


def test_parameters_are_the_published_ones() -> None:
    llama = (
        "pretrain_gpt.py --num-layers 32 --hidden-size 4096 --num-attention-heads 32 --seq-length 4096 --micro-batch-size 1 "
        "--bf16 --normalization RMSNorm --swiglu --ffn-hidden-size 11008 --vocab-size 32000 "
        "--untie-embeddings-and-output-weights"
    )
    assert job(GPT3).model.parameters() == pytest.approx(175e9, rel=0.01)
    assert job(llama).model.parameters() == pytest.approx(6.74e9, rel=0.01)
    assert job(MIXTRAL).model.parameters() == pytest.approx(46.7e9, rel=0.01)
    bert = SMALL.replace("8", "24", 1)
    assert job(f"pretrain_bert.py {bert} --vocab-size 30522 --bf16").model.parameters() == pytest.approx(
        335e6, rel=0.01
    )


@pytest.mark.parametrize(
    ("flags", "bytes_each"),
    [
        ("--bf16", 18),
        ("--bf16 --use-distributed-optimizer", 6 + 12 / 4),
        ("--fp16", 20),
        ("--fp16 --use-distributed-optimizer", 4 + 16 / 4),
        ("--fp16 --accumulate-allreduce-grads-in-fp32", 18),
    ],
)
def test_model_state_is_that_of_megatrons_table(flags: str, bytes_each: float) -> None:
    """Its documentation of the distributed optimizer, with d = 4."""
    found = job(f"torchrun --nproc-per-node 4 pretrain_gpt.py {SMALL} {flags}")
    assert found.layout.dp == 4
    assert sum(found.state_bytes(False).values()) == pytest.approx(found.model.parameters() * bytes_each)


def test_a_line_of_a_launch_script_is_read_as_it_is() -> None:
    found = line(
        "CUDA_DEVICE_MAX_CONNECTIONS=1 torchrun --nnodes=16 --nproc_per_node 8 --node-rank 0 --master-addr node0 "
        "-m ssdtrain_megatron.run /opt/Megatron-LM/pretrain_gpt.py --tensor-model-parallel-size 8 --sequence-parallel "
        "--pipeline-model-parallel-size 4 --num-layers-per-virtual-pipeline-stage 6 --num-layers 48 --hidden-size 6144 "
        "--num-attention-heads 64 --group-query-attention --num-query-groups 8 --seq-length 4096 --micro-batch-size 1 "
        "--global-batch-size 512 --bf16 --use-distributed-optimizer --vocab-size 50257 --data-path 0.3 one 0.7 other "
        "--split 99,1,0 --lr 1.0e-4 --adam-beta2 0.95 --ssdtrain-offload-directories '/nvme{local_rank}' /other "
        "--ssdtrain-report-interval 10"
    )
    assert found.microbatch == 1
    layout, model = found.job.layout, found.job.model
    assert (layout.tp, layout.pp, layout.dp, layout.virtual, layout.zero) == (8, 4, 4, 2, 1)
    assert layout.sequence_parallel
    assert (model.layers, model.ffn, model.kv_heads, model.vocabulary) == (48, 4 * 6144, 8, 51200)
    assert (found.job.batch, found.job.node, found.uncounted) == (512, 8, [])


def test_the_arguments_of_our_launch_scripts_are_read() -> None:
    lines = (ROOT / "configs/megatron/gpt_3d.args").read_text().splitlines()
    flags = " ".join(each for each in lines if not each.startswith("#"))
    config = ROOT / "configs/megatron/ssdtrain.yaml"
    found = line(f"WORLD_SIZE=64 pretrain_gpt.py {flags} --ssdtrain-config {config}")
    assert (found.job.layout.dp, found.job.layout.virtual) == (2, 2)
    assert found.job.host == 8 * 4 * GiB
    assert found.uncounted == ["ssdtrain.offload.amount (how much is offloaded is the plan's choice)"]


def test_the_number_of_ranks_is_the_launchers_else_world_size_else_the_fewest() -> None:
    flags = f"pretrain_gpt.py {SMALL} --bf16 --tensor-model-parallel-size 2"
    assert job(f"torchrun --nnodes 2 --nproc-per-node gpu {flags}", {"WORLD_SIZE": "4"}).layout.dp == 8
    found = job(f"torchrun --nproc-per-node 4 {flags}")
    assert (found.layout.dp, found.node) == (2, 4)
    assert job(f"WORLD_SIZE=6 python {flags}", {"WORLD_SIZE": "4"}).layout.dp == 3
    assert job(flags, {"WORLD_SIZE": "4"}).layout.dp == 2
    assert job(flags, {"WORLD_SIZE": ""}).layout.dp == 1
    fewest = line(flags)
    assert fewest.job.layout.dp == 1
    assert "2 ranks (no --nnodes and --nproc-per-node" in fewest.assumed[-2]
    assert job(f"{MIXTRAL} --expert-model-parallel-size 8 --expert-tensor-parallel-size 2").layout.dp == 16


def test_the_kind_of_model_is_that_of_megatrons_script_whatever_starts_it() -> None:
    found = line(f"python tools/launch.py examples/pretrain_bert.py {SMALL} --bf16")
    assert found.job.model.family == "bert"
    assert "a GPT" not in found.assumed
    assert job(f"python -u my_t5.py {SMALL} --bf16").model.family == "t5"


def test_a_step_without_a_number_of_sequences_has_one_microbatch() -> None:
    found = line(f"torchrun --nproc-per-node 4 pretrain_gpt.py {SMALL} --bf16")
    assert (found.job.batch, found.batch_given) == (4, False)


def test_a_gated_mlp_has_megatrons_default_width_and_groups_count_where_they_are_asked_for() -> None:
    model = job(f"pretrain_gpt.py {SMALL} --bf16 --swiglu --num-query-groups 4").model
    assert (model.ffn, model.activation, model.kv_heads) == (2688, "swiglu", 16)
    model = job(f"pretrain_gpt.py {SMALL} --bf16 --quick-geglu").model
    assert (model.ffn, model.activation) == (4 * 1024, "swiglu"), "only --swiglu narrows it"
    assert not job(f"pretrain_gpt.py {SMALL} --bf16 --swiglu --no-bias-swiglu-fusion").model.fused


def test_experts_are_spread_over_data_parallel_ranks() -> None:
    found = job(f"torchrun --nproc-per-node 8 {MIXTRAL} --expert-model-parallel-size 8 --moe-router-topk 1")
    assert (found.layout.expert, found.layout.dp, found.model.top_k) == (8, 8, 1)
    one = replace(found.model, experts=1, top_k=1).block_parameters()
    assert found.block_parameters("block") == one + 8 * 4096, "one expert, and the router"


def test_the_distributed_optimizer_does_not_split_experts_that_no_other_rank_has() -> None:
    """18 bytes per parameter of an expert, 6 + 12/8 of the others: 105.7 GiB, not 50.6."""
    found = job(
        f"torchrun --nproc-per-node 8 {MIXTRAL} --expert-model-parallel-size 8 --use-distributed-optimizer"
    )
    experts = 32 * 3 * 4096 * 14336
    others = found.rank_parameters(False) - experts
    expected = 18 * experts + (6 + 12 / 8) * others
    assert expected == pytest.approx(105.7 * GiB, rel=0.001)
    assert sum(found.state_bytes(False).values()) == pytest.approx(expected)


def test_t5_has_as_many_layers_in_its_decoder() -> None:
    flags = SMALL.replace("--num-layers", "--encoder-num-layers").replace("--seq", "--encoder-seq")
    found = line(f"pretrain_t5.py {flags} --decoder-num-layers 8 --decoder-seq-length 128 --bf16")
    assert (found.job.model.family, len(found.job.model.block_kinds)) == ("t5", 16)
    assert found.uncounted == ["--decoder-seq-length 128 (counted as long as those of the encoder)"]


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        ("--context-parallel-size 2", "--context-parallel-size 2 (a sequence"),
        ("--recompute-granularity full --recompute-method uniform", "--recompute-granularity full (which"),
        ("--recompute-activations", "--recompute-activations (what"),
        ("--multi-latent-attention --kv-lora-rank 512", "--multi-latent-attention (attention"),
        ("--mtp-num-layers 1", "--mtp-num-layers 1 (layers"),
        ("--fp8-format hybrid", "--fp8-format hybrid (tensors"),
        ("--kv-channels 128", "--kv-channels 128 (heads"),
        ("--num-experts 8 --moe-layer-freq ([0]+[1]*7)", "--moe-layer-freq ([0]+[1]*7) (every"),
        ("--use-megatron-fsdp", "--use-megatron-fsdp (model state"),
        ("--optimizer sgd", "--optimizer sgd (model state"),
        ("--spec my_package.layers spec", "--spec my_package.layers spec (blocks"),
        ("--ssdtrain-config /no/such.yaml", "--ssdtrain-config /no/such.yaml (there is no"),
        (
            "--ssdtrain-offload-directories /d --ssdtrain-offload-codec int8",
            "ssdtrain.offload.codec (tensors",
        ),
        ("--ssdtrain-compact-mode quant", "ssdtrain.compact (linear"),
    ],
)
def test_what_changes_the_job_and_is_not_in_the_model_is_named(flags: str, named: str) -> None:
    [found] = line(f"pretrain_gpt.py {SMALL} --bf16 {flags}").uncounted
    assert found.startswith(named)


def test_values_that_change_nothing_are_not_named() -> None:
    flags = (
        "--context-parallel-size 1 --optimizer adam --mtp-num-layers 0 --moe-layer-freq 2 --kv-channels 64"
    )
    ours = "--ssdtrain-offload-directories /d --ssdtrain-offload-amount auto"
    assert not line(f"pretrain_gpt.py {SMALL} --bf16 {flags} {ours}").uncounted


@pytest.mark.parametrize(
    ("flags", "counted", "chunks"),
    [
        ("--num-layers 94 --decoder-last-pipeline-num-layers 22", 96, 1),
        (
            "--num-layers 30 --account-for-embedding-in-pipeline-split --account-for-loss-in-pipeline-split",
            32,
            1,
        ),
        (
            "--num-layers 94 --decoder-last-pipeline-num-layers 22 --num-virtual-stages-per-pipeline-rank 3",
            96,
            3,
        ),
        (
            "--num-layers 31 --account-for-loss-in-pipeline-split --num-layers-per-virtual-pipeline-stage 4",
            32,
            2,
        ),
    ],
)
def test_uneven_pipelines_are_counted_as_the_even_one_with_no_fewer_layers(
    flags: str, counted: int, chunks: int
) -> None:
    found = line(f"pretrain_gpt.py {SMALL} --bf16 --pipeline-model-parallel-size 4 {flags}")
    assert (found.job.model.layers, found.job.layout.virtual) == (counted, chunks)
    *uneven, layers = found.uncounted
    assert uneven
    assert all(each.endswith("(layers are counted as spread evenly)") for each in uneven)
    assert (
        layers == f"{flags[: len('--num-layers 94')]} ({counted} are counted, as many on each pipeline rank)"
    )


def test_an_uneven_pipeline_of_t5_is_counted_with_as_many_layers_in_both_halves() -> None:
    flags = f"{SMALL} --num-layers 7 --pipeline-model-parallel-size 4 --pipeline-model-parallel-split-rank 1"
    found = line(f"pretrain_t5.py {flags} --bf16")
    assert len(found.job.model.block_kinds) == 16
    even = line(f"pretrain_t5.py {flags} --num-layers 6 --bf16")
    assert len(even.job.model.block_kinds) == 12
    assert not any("--num-layers" in each for each in even.uncounted)


@pytest.mark.parametrize(
    ("flags", "recomputes"),
    [
        ("", False),
        ("--recompute-granularity full", True),
        ("--recompute-granularity selective", False),
        ("--ssdtrain-plan auto", False),  # with Transformer Engine it recomputes none
        ("--ssdtrain-plan auto --transformer-impl local", True),
        ("--ssdtrain-plan auto --transformer-impl local --ssdtrain-plan-device-limit 30GiB", True),
        ("--ssdtrain-plan auto --transformer-impl local --num-experts 4", False),
        ("--ssdtrain-plan auto --transformer-impl local --mtp-num-layers 1", False),
        ("--ssdtrain-plan auto --transformer-impl local --ssdtrain-plan-recompute off", False),
    ],
)
def test_blocks_are_recomputed_where_megatron_or_a_plan_does_it(flags: str, recomputes: bool) -> None:
    found = line(f"pretrain_gpt.py {SMALL} --bf16 --global-batch-size 8 {flags}")
    assert found.job.recompute is recomputes
    assert any("no block is recomputed" in each for each in found.assumed) is not recomputes


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("pretrain_gpt.py --bf16", "has no --num-layers, no --hidden-size, no --num-attention-heads"),
        (f"pretrain_gpt.py {SMALL}", "has neither --bf16 nor --fp16"),
        (f"pretrain_gpt.py {SMALL} --bf16 --fp16", "has both --fp16 and --bf16"),
        (f"pretrain_gpt.py {SMALL} --bf16 --encoder-num-layers 2", "has both --num-layers and --encoder"),
        (f"pretrain_gpt.py {SMALL} --bf16 --yaml-cfg x.yaml", "in the file --yaml-cfg x.yaml"),
        (f"pretrain_mamba.py {SMALL} --bf16", "runs pretrain_mamba.py, whose model (mamba)"),
        (f"pretrain_gpt.py {SMALL} --bf16 --hybrid-layer-pattern M*M", "has --hybrid-layer-pattern"),
        (
            f"pretrain_gpt.py {SMALL} --bf16 --pipeline-model-parallel-size 3",
            "has --num-layers 8, no multiple of 3 (--pipeline-model-parallel-size)",
        ),
        (
            f"pretrain_gpt.py {SMALL} --bf16 --tensor-model-parallel-size 3",
            "has --num-attention-heads 16, no multiple of 3 (--tensor-model-parallel-size)",
        ),
        (
            f"pretrain_gpt.py {SMALL} --bf16 --num-layers-per-virtual-pipeline-stage 3",
            "8 layers on a pipeline rank, no multiple of 3 (--num-layers-per-virtual",
        ),
        (
            f"torchrun --nproc-per-node 6 pretrain_gpt.py {SMALL} --bf16 --tensor-model-parallel-size 4",
            "has 6 ranks (--nnodes x --nproc-per-node), no multiple of 4 (tensor x pipeline x context",
        ),
        (f"WORLD_SIZE=x pretrain_gpt.py {SMALL} --bf16", 'has WORLD_SIZE "x"'),
        (
            f"WORLD_SIZE=8 pretrain_gpt.py {SMALL} --bf16 --global-batch-size 12",
            "has --global-batch-size 12, no multiple of 8 (--micro-batch-size times",
        ),
        (
            f"WORLD_SIZE=4 pretrain_gpt.py {SMALL} --bf16 --num-experts 8 --expert-model-parallel-size 8",
            "has 4 ranks (WORLD_SIZE), no multiple of 8 (expert-tensor x pipeline x --expert-model-parallel-size)",
        ),
        (
            f"WORLD_SIZE=8 {MIXTRAL} --tensor-model-parallel-size 2 --expert-model-parallel-size 8 "
            "--expert-tensor-parallel-size 1",
            "--expert-model-parallel-size 8 over more than the 4 data-parallel ranks (--tensor-model-parallel-size 2, "
            "--context-parallel-size 1, --expert-tensor-parallel-size 1): such folding is valid in Megatron-LM and not predicted",
        ),
        (
            f"WORLD_SIZE=8 {MIXTRAL} --context-parallel-size 2 --expert-model-parallel-size 8",
            "(--tensor-model-parallel-size 1, --context-parallel-size 2): such folding is valid",
        ),
        (
            f"WORLD_SIZE=8 {MIXTRAL} --expert-model-parallel-size 8 --expert-tensor-parallel-size 2",
            "has 8 ranks (WORLD_SIZE), no multiple of 16 (expert-tensor x pipeline x --expert",
        ),
        (
            f"pretrain_gpt.py {SMALL} --bf16 --num-experts 2 --moe-router-topk 3",
            "has --moe-router-topk 3 and --num-experts 2",
        ),
        (f"pretrain_t5.py {SMALL} --bf16 --decoder-num-layers 4", "has --decoder-num-layers 4"),
    ],
)
def test_values_that_are_missing_or_do_not_go_together_are_named(text: str, says: str) -> None:
    with pytest.raises(InvalidValue) as caught:
        line(text)
    assert says in str(caught.value)
    assert "; allowed: " in str(caught.value)


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        ("--hidden-size 1k", 'argument --hidden-size: "1k" is not a whole number; allowed: '),
        ("--num-layers 99999999", '"99999999" is above 1000'),
        ("--nnodes 2:4", 'argument --nnodes: "2:4" is not a whole number'),
        ("--nproc-per-node --bf16", "argument --nproc-per-node/--nproc_per_node: expected one argument"),
        ("--hidden-dropout 2", 'argument --hidden-dropout: "2" is above 1'),
        ("--normalization BatchNorm", "invalid choice"),
        ("--ssdtrain-offload-dirctories /d", "did you mean --ssdtrain-offload-directories?"),
    ],
)
def test_a_value_that_a_flag_does_not_take_is_an_error_of_usage(
    flags: str, says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        line(f"pretrain_gpt.py {SMALL} {flags}")
    assert caught.value.code == 2
    assert says in capsys.readouterr().err


def test_an_invalid_config_of_ours_is_an_error() -> None:
    with pytest.raises(ConfigError, match="offload"):
        line(f"pretrain_gpt.py {SMALL} --bf16 --ssdtrain-offload-device-budget 1GiB")


def test_reading_imports_nothing_of_megatron() -> None:
    code = (
        "import sys; from ssdtrain.tools.whatif import megatron_command; "
        "sys.exit(any(name.partition('.')[0] == 'megatron' for name in sys.modules))"
    )
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, timeout=120).returncode == 0


def test_a_function_or_a_config_is_no_command_line(tmp_path: Path) -> None:
    assert not takes(["my_package.model:build", "--batch", "8", "--gpu", "h100"])
    assert not takes(["./llama/config.json", "--seq", "4096"])
    assert not takes(["pretrain_gpt.py:build"])
