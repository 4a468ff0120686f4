"""Reads the command line of a Megatron-LM training script as a job that the planner can predict: `ssdtrain estimate`.

Flags that say shape, parallelism, batch, precision and layers have the names and defaults of Megatron-LM (0.12 to 0.19). Options
that change what the job takes and that the planner's model does not have are named (`uncounted`); all others are ignored, as
are the words of a launcher. Nothing of Megatron is imported.
"""

from __future__ import annotations

import argparse
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from ssdtrain.config import Config
from ssdtrain.config.errors import InvalidValue
from ssdtrain.tools.whatif.cluster_job import ClusterJob
from ssdtrain.tools.whatif.hardware import Gpu
from ssdtrain.tools.whatif.megatron_flags import ALL_GPUS, parser
from ssdtrain.tools.whatif.megatron_uncounted import is_uneven, uncounted_flags, uncounted_keys
from ssdtrain.tools.whatif.models import ParallelLayout, Transformer
from ssdtrain_megatron.flags import config_from_args

__all__ = ["CommandLine", "read", "takes"]

GPUS_PER_NODE = 8

_SIGNS = {
    *("--num-layers", "--encoder-num-layers", "--hidden-size", "--num-attention-heads", "--seq-length"),
    *("--encoder-seq-length", "--micro-batch-size", "--global-batch-size"),
    *("--tensor-model-parallel-size", "--pipeline-model-parallel-size"),
}
_SCRIPT = re.compile(r"(.*/)?pretrain_\w+\.py")
_LAUNCHERS = re.compile(rf"(.*/)?torchrun|{_SCRIPT.pattern}|ssdtrain_megatron\.run")
_OTHER_MODELS = {"mamba", "hybrid", "vlm", "vision", "retro", "ict", "biencoder"}
_FACTORY = "a function that builds the model (ssdtrain estimate module:function)"


@dataclass(frozen=True)
class CommandLine:
    """A job, and what the words leave open.

    Attributes:
        microbatch: sequences.
        batch_given: the sequences of a step are given. Else it has one microbatch.
        assumed: what the words do not say, and what is taken for it.
        uncounted: options whose effect is not in the job, with what is counted in their place.
    """

    job: ClusterJob
    microbatch: int
    batch_given: bool
    assumed: list[str]
    uncounted: list[str]


def takes(words: Sequence[str]) -> bool:
    """Whether these are the words of a Megatron-LM command line: a flag of a shape, a launcher or a script of its own."""
    return any(word.partition("=")[0] in _SIGNS or _LAUNCHERS.fullmatch(word) for word in words)


def read(
    words: Sequence[str], environment: Mapping[str, str], gpu: Gpu, *, node: int | None = None, **machine: Any
) -> CommandLine:
    """The job that `words` describe, on such GPUs.

    Args:
        environment: may have WORLD_SIZE.
        node: GPUs of a node; None: as many as the launcher starts there, else 8.
        machine: other attributes of `ClusterJob`.

    Raises:
        InvalidValue: completes "the command line ...": a flag is missing, or values do not go together.
        ConfigError: of --ssdtrain-* flags.
        SystemExit: a value is not what its flag takes; the error is printed, as argparse does it.
    """
    args, others = parser().parse_known_args(list(words))
    node = node or args.nproc_per_node or GPUS_PER_NODE
    reading = _Reading(args, others, environment, node)
    return reading.command_line(gpu, {"node": node, **machine})


class _Reading:
    """The parsed flags, and what follows from them."""

    def __init__(
        self, args: argparse.Namespace, others: Sequence[str], environment: Mapping[str, str], node: int
    ) -> None:
        self.args, self.others, self.environment, self.node = args, others, environment, node
        self.assumed: list[str] = []
        self.uncounted = list(uncounted_flags(args))

    def command_line(self, gpu: Gpu, machine: Mapping[str, Any]) -> CommandLine:
        args = self.args
        self._check_given()
        model, layout = self._model(), self._layout()
        batch = args.global_batch_size or args.micro_batch_size * layout.dp
        each = args.micro_batch_size * layout.dp
        _check_multiple(
            f"--global-batch-size {batch}", batch, each, "--micro-batch-size times data-parallel ranks"
        )
        gradient = 4 if self._float32_gradients else 2
        # With gradients in 16 bits the optimizer has a copy of them in 32.
        job = ClusterJob(
            model,
            layout,
            gpu,
            batch=batch,
            gradient=gradient,
            optimizer=12 if gradient == 4 else 16,
            recompute=self._recomputes(layout),
            host=self._host * min(machine["node"], layout.ranks),
            **machine,
        )
        return CommandLine(
            job, args.micro_batch_size, args.global_batch_size is not None, self.assumed, self.uncounted
        )

    def _check_given(self) -> None:
        args = self.args
        if args.yaml_cfg is not None:
            raise InvalidValue(f"has its shape in the file --yaml-cfg {args.yaml_cfg}", "flags")
        needed = {
            "--num-layers": args.num_layers or args.encoder_num_layers,
            "--hidden-size": args.hidden_size,
            "--num-attention-heads": args.num_attention_heads,
            "--seq-length": args.seq_length or args.encoder_seq_length,
            "--micro-batch-size": args.micro_batch_size,
        }
        missing = [flag for flag, value in needed.items() if value is None]
        if missing:
            raise InvalidValue(
                f"has no {', no '.join(missing)}",
                "the flags of a Megatron-LM script, also those that a checkpoint, a file or the script itself would give; of "
                f"another script, {_FACTORY}",
            )
        if args.fp16 == args.bf16:
            what = "both --fp16 and --bf16" if args.fp16 else "neither --bf16 nor --fp16"
            raise InvalidValue(f"has {what}", "one of them: training in float32 is not predicted")
        for one, other in (("num_layers", "encoder_num_layers"), ("seq_length", "encoder_seq_length")):
            if getattr(args, one) is not None and getattr(args, other) is not None:
                one, other = ("--" + name.replace("_", "-") for name in (one, other))
                raise InvalidValue(f"has both {one} and {other}", "one of them")

    @cached_property
    def _kind(self) -> str:
        """ "gpt", "bert" or "t5", from the name of the script."""
        scripts = [word for word in self.others if word.endswith(".py")]
        script = next(filter(_SCRIPT.fullmatch, scripts), scripts[0] if scripts else "")
        pieces = set(re.split(r"[\W_]+", Path(script).stem.lower()))
        other = pieces & _OTHER_MODELS
        if other:
            raise InvalidValue(f"runs {script}, whose model ({', '.join(other)}) is not predicted", _FACTORY)
        for word in self.others:
            if word.partition("=")[0] in ("--hybrid-override-pattern", "--hybrid-layer-pattern"):
                raise InvalidValue(f"has {word}, whose layers are not predicted", _FACTORY)
        kinds = pieces & {"bert", "t5"}
        if not kinds and "gpt" not in pieces:
            self.assumed.append("a GPT")
        return kinds.pop() if kinds else "gpt"

    def _model(self) -> Transformer:
        args, kind = self.args, self._kind
        hidden, heads = args.hidden_size, args.num_attention_heads
        groups = (args.num_query_groups or 1) if args.group_query_attention else heads
        if args.kv_channels is None or args.kv_channels == hidden // heads:
            _check_multiple(f"--hidden-size {hidden}", hidden, heads, "--num-attention-heads")
        else:
            self.uncounted.append(
                f"--kv-channels {args.kv_channels} (heads are counted as --hidden-size has them)"
            )
        _check_multiple(f"--num-attention-heads {heads}", heads, groups, "--num-query-groups")
        if kind == "t5":
            self._check_decoder(args.num_layers or args.encoder_num_layers)
        gated = args.swiglu or args.quick_geglu
        ffn = args.ffn_hidden_size or (8 * hidden // 3 // 64 * 64 if args.swiglu else 4 * hidden)
        if args.num_experts:
            ffn = args.moe_ffn_hidden_size or ffn
            if args.moe_router_topk > args.num_experts:
                raise InvalidValue(
                    f"has --moe-router-topk {args.moe_router_topk} and --num-experts {args.num_experts}",
                    "at most as many as there are experts",
                )
        family = kind
        if kind == "gpt" and args.normalization == "RMSNorm":
            family = "mixtral" if args.num_experts else "llama"
        model = Transformer.of(
            family,
            hidden=hidden,
            layers=self._layers,
            sequence=args.seq_length or args.encoder_seq_length,
            heads=heads,
            ffn=ffn,
            kv_heads=groups,
            experts=args.num_experts or 1,
            top_k=args.moe_router_topk if args.num_experts else 1,
            dropout=args.hidden_dropout > 0,
            fused=not args.no_bias_swiglu_fusion,
        )
        return replace(
            model,
            vocabulary=self._vocabulary(model.vocabulary),
            activation="swiglu" if gated else "gelu",
            tied=not args.untie_embeddings_and_output_weights,
            score_bytes=self._score_bytes(),
        )

    @cached_property
    def _layers(self) -> int:
        """Number of layers that are counted, of an encoder as many as of its decoder."""
        args = self.args
        given = int(args.num_layers or args.encoder_num_layers)
        if not is_uneven(args):
            return given
        each = args.num_layers_per_virtual_pipeline_stage or args.num_virtual_stages_per_pipeline_rank or 1
        unit = args.pipeline_model_parallel_size * each
        unit //= math.gcd(unit, 2) if self._kind == "t5" else 1
        counted = -(-given // unit) * unit
        if counted != given:
            flag = "--num-layers" if args.num_layers else "--encoder-num-layers"
            self.uncounted.append(f"{flag} {given} ({counted} are counted, as many on each pipeline rank)")
        return int(counted)

    def _check_decoder(self, layers: int) -> None:
        args = self.args
        if args.decoder_num_layers not in (None, layers):
            raise InvalidValue(
                f"has --decoder-num-layers {args.decoder_num_layers} and {layers} layers of the encoder",
                f"as many of both, or {_FACTORY}",
            )
        if args.decoder_seq_length not in (None, args.seq_length or args.encoder_seq_length):
            self.uncounted.append(
                f"--decoder-seq-length {args.decoder_seq_length} (counted as long as those of the encoder)"
            )

    def _vocabulary(self, usual: int) -> int:
        """Words, with those that fill it up."""
        args = self.args
        if args.padded_vocab_size:
            return int(args.padded_vocab_size)
        if not args.vocab_size:
            self.assumed.append(f"a vocabulary of {usual} (no --vocab-size)")
        unit = args.make_vocab_size_divisible_by * args.tensor_model_parallel_size
        return -(-(args.vocab_size or usual) // unit) * int(unit)

    def _score_bytes(self) -> int:
        """See `Transformer`."""
        args = self.args
        local = args.transformer_impl == "local"
        if not local and args.attention_backend != "unfused":
            self.assumed.append("layers of Transformer Engine, with FlashAttention or cuDNN attention")
            return 0
        recomputed = args.recompute_activations is not None or args.recompute_granularity == "selective"
        if recomputed and "core_attn" in args.recompute_modules:
            return 0
        layers = "local layers" if local else "layers of Transformer Engine"
        self.assumed.append(f"{layers}, whose attention saves its scores")
        return 5 if args.attention_dropout > 0 else 2

    def _layout(self) -> ParallelLayout:
        args = self.args
        tp, pp, expert = (
            args.tensor_model_parallel_size,
            args.pipeline_model_parallel_size,
            args.expert_model_parallel_size,
        )
        heads = args.num_attention_heads
        _check_multiple(f"--num-attention-heads {heads}", heads, tp, "--tensor-model-parallel-size")
        model = tp * pp * args.context_parallel_size
        experts = (args.expert_tensor_parallel_size or tp) * pp * expert
        world, said = self._world() or (math.lcm(model * expert, experts), "")
        dp = world // model
        if not said:
            self.assumed.append(
                f"{world} ranks (no --nnodes and --nproc-per-node of torchrun, and no WORLD_SIZE: data parallelism of {dp})"
            )
        ranks = f"{world} ranks ({said})"
        _check_multiple(ranks, world, model, "tensor x pipeline x context parallelism")
        _check_multiple(ranks, world, experts, "expert-tensor x pipeline x --expert-model-parallel-size")
        if dp % expert:
            others = ("tensor_model_parallel_size", "context_parallel_size", "expert_tensor_parallel_size")
            sizes = ((f"--{name.replace('_', '-')}", getattr(args, name)) for name in others)
            beside = ", ".join(f"{flag} {size}" for flag, size in sizes if size is not None)
            raise InvalidValue(
                f"spreads experts by --expert-model-parallel-size {expert} over more than the {dp} data-parallel ranks "
                f"({beside}): such folding is valid in Megatron-LM and not predicted",
                f"an --expert-model-parallel-size that divides {dp}",
            )
        return ParallelLayout(
            tp,
            pp,
            dp,
            self._virtual(pp),
            sequence_parallel=args.sequence_parallel and tp > 1,
            zero=1 if args.use_distributed_optimizer else 0,
            expert=expert,
        )

    def _virtual(self, pp: int) -> int:
        """Model chunks of a pipeline rank."""
        args = self.args
        layers = self._layers
        what = f"--num-layers {layers}"
        if self._kind == "t5":
            layers, what = 2 * layers, f"{layers} layers of the encoder and as many of the decoder"
        _check_multiple(what, layers, pp, "--pipeline-model-parallel-size")
        chunks = args.num_virtual_stages_per_pipeline_rank or 1
        each = args.num_layers_per_virtual_pipeline_stage
        if each is not None:
            name = "--num-layers-per-virtual-pipeline-stage"
            _check_multiple(f"{layers // pp} layers on a pipeline rank", layers // pp, each, name)
            chunks = layers // pp // each
        name = "--num-virtual-stages-per-pipeline-rank"
        _check_multiple(f"{layers // pp} layers on a pipeline rank", layers // pp, chunks, name)
        return int(chunks)

    def _world(self) -> tuple[int, str] | None:
        """Ranks of the job, and what says so; None: nothing does."""
        args = self.args
        if args.nnodes is not None or args.nproc_per_node is not None:
            each = 1 if args.nproc_per_node is None else args.nproc_per_node
            each = self.node if each == ALL_GPUS else each
            return (args.nnodes or 1) * each, "--nnodes x --nproc-per-node"
        said = [word.partition("=")[2] for word in self.others if word.startswith("WORLD_SIZE=")]
        text = said[-1] if said else self.environment.get("WORLD_SIZE")
        if not text:
            return None
        if not text.isdecimal() or not int(text):
            raise InvalidValue(f'has WORLD_SIZE "{text}"', "the number of ranks, such as 64")
        return int(text), "WORLD_SIZE"

    @property
    def _float32_gradients(self) -> bool:
        args = self.args
        if args.fp16:
            return bool(args.accumulate_allreduce_grads_in_fp32)
        return not args.grad_reduce_in_bf16 and args.main_grads_dtype == "fp32"

    def _recomputes(self, layout: ParallelLayout) -> bool:
        """Whether blocks may be recomputed: by Megatron, or by a plan of ours where it can."""
        args, config = self.args, self._config
        if args.spec:
            self.uncounted.append(
                f"--spec {' '.join(args.spec)} (blocks are counted as those that Megatron chooses)"
            )
        plain = args.transformer_impl == "local" and not args.num_experts and layout.virtual == 1
        able = plain and not self.uncounted and not args.spec
        self.uncounted += uncounted_keys(config)
        if args.recompute_granularity == "full" or args.checkpoint_activations is not None:
            return True
        plan = config.plan if config is not None and config.plans and config.compact is None else None
        if plan is not None and plan.recompute != "off" and able:
            return True
        why = "no --recompute-granularity full"
        if plan is not None:
            why += ", and --ssdtrain-plan recomputes none beside these options"
        self.assumed.append(f"no block is recomputed ({why})")
        return False

    @property
    def _host(self) -> int:
        """Bytes of host memory that a rank fills before the drives."""
        config = self._config
        return (
            int(config.offload.host)
            if config is not None and config.enabled and config.offload is not None
            else 0
        )

    @cached_property
    def _config(self) -> Config | None:
        """Return the config of our own flags. A file that is not on this machine counts as none."""
        file = self.args.ssdtrain_config
        if file is not None and not Path(file).is_file():
            self.uncounted.append(f"--ssdtrain-config {file} (there is no such file here)")
            self.args.ssdtrain_config = None
        return config_from_args(self.args)


def _check_multiple(what: str, value: int, of: int, named: str) -> None:
    if value % of:
        raise InvalidValue(f"has {what}, no multiple of {of} ({named})", f"a multiple of {of}")
