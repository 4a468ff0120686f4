"""Transformers on paper: parameters, FLOPs, saved bytes and model-state bytes of one rank, from the shape alone.

What is counted is what fused kernels save: FlashAttention (no matrix of scores, but for `score_bytes`), one kernel for a norm,
one for a gated activation. The sum for a GPT block, 34 x sequence x microbatch x hidden bytes in bfloat16 with dropout, is that
of arXiv 2205.05198 without its attention scores. Implementations that are not fused, as in many model libraries, save more than
is predicted here.

Letters in comments: h hidden, f width of the MLP, k width of keys (and of values), t tensor-parallel ranks. Bytes are per token
until `saved_items` multiplies.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal, NamedTuple

from ssdtrain.config.errors import InvalidValue

__all__ = ["FAMILIES", "BlockKind", "Item", "ParallelLayout", "Transformer", "model_state_bytes", "module_of"]

FAMILIES = ("gpt", "bert", "t5", "llama", "mixtral")

BlockKind = Literal["block", "decoder"]
"""What repeats; "decoder": T5's decoder block, which has cross-attention."""

ELEMENT = 2
"""Bytes of an element of a weight or an activation: training is in 16 bits."""
STATISTIC, PROBABILITY = 4, 4
"""Bytes of a float32: norms' statistics and softmax's sums are kept in it."""


class Item(NamedTuple):
    """A tensor that a block saves: what it is, and its bytes for one microbatch on one rank."""

    name: str
    nbytes: int


def module_of(item: str) -> str:
    """The module of a block that saves an item of this name: "attention", "cross-attention", "mlp" (or of its experts)."""
    module = item.partition(":")[0]
    return "mlp" if module in ("router", "experts") else module


@dataclass(frozen=True)
class ParallelLayout:
    """How a model is spread over ranks.

    Attributes:
        tp, pp, dp: ranks of tensor, pipeline and data parallelism.
        virtual: model chunks per pipeline rank (interleaved schedule); 1: none.
        sequence_parallel: norms and residuals are split over the tp ranks too.
        zero: stage 0 to 3: optimizer state, then gradients, then parameters split over the dp ranks.
        expert: ranks over which experts are spread; of the dp ranks. ZeRO splits experts over the dp / expert ranks that
            have the same ones.
    """

    tp: int = 1
    pp: int = 1
    dp: int = 1
    virtual: int = 1
    sequence_parallel: bool = False
    zero: int = 0
    expert: int = 1

    def __post_init__(self) -> None:
        for name in ("tp", "pp", "dp", "virtual", "expert"):
            if getattr(self, name) < 1:
                raise InvalidValue(f"has {name} {getattr(self, name)}", "1 or more")
        if self.zero not in (0, 1, 2, 3):
            raise InvalidValue(f"has ZeRO stage {self.zero}", "0, 1, 2 or 3")
        if self.dp % self.expert:
            raise InvalidValue(
                f"has {self.expert} expert ranks of {self.dp} data-parallel ones", "a divisor of dp"
            )

    @property
    def ranks(self) -> int:
        return self.tp * self.pp * self.dp

    def shard(self, parameters: float, experts: float = 0.0) -> float:
        """Parameters of a rank where ZeRO splits those that it would hold without it.

        Args:
            experts: of them, parameters of experts.
        """
        return (parameters - experts + experts * self.expert) / self.dp


@dataclass(frozen=True)
class Transformer:
    """A model by its shape.

    Attributes:
        family: one of `FAMILIES`. gpt and bert: LayerNorm, biases, GELU. t5: RMSNorm, no biases, GELU (`activation`
            "relu" for the original), an encoder and a decoder of `layers` blocks each. llama: RMSNorm, grouped keys, SwiGLU.
            mixtral: the same with `experts`, `top_k` of which each token passes.
        ffn: width of the MLP (of one expert).
        kv_heads: heads of keys and values.
        activation: "gelu", "relu" (saves one tensor, not two) or "swiglu".
        fused: the gated activation is one kernel; else its silu is saved too.
        tied: the output layer shares the embedding's weight.
        score_bytes: that are saved of each attention score. 0: attention is one kernel (FlashAttention), which saves none; 2
            where softmax is a kernel of its own, 5 with dropout on what it puts out (arXiv 2205.05198). Keys and values are then
            repeated to all heads.
    """

    family: str
    hidden: int
    layers: int
    heads: int
    vocabulary: int
    sequence: int
    ffn: int
    kv_heads: int
    experts: int = 1
    top_k: int = 1
    activation: Literal["gelu", "relu", "swiglu"] = "gelu"
    dropout: bool = True
    fused: bool = True
    tied: bool = True
    score_bytes: int = 0

    @classmethod
    def of(
        cls,
        family: str,
        *,
        hidden: int,
        layers: int,
        sequence: int,
        heads: int | None = None,
        vocabulary: int | None = None,
        ffn: int | None = None,
        kv_heads: int | None = None,
        experts: int | None = None,
        top_k: int | None = None,
        dropout: bool | None = None,
        fused: bool = True,
    ) -> Transformer:
        """A model of `family`; what is left out is as usual for the family: heads of 128 (64 below hidden 2048), an MLP of 4 h
        (or 8/3 h in multiples of 256, Mixtral 3.5 h), vocabularies of 50304, 30592, 32128 and 32000, no dropout in llama and
        mixtral.

        Raises:
            InvalidValue: unknown family; hidden is no multiple of heads, or heads of kv_heads; top_k is above experts; a number
            below 1.
        """
        if family not in FAMILIES:
            raise InvalidValue(f'has the unknown family "{family}"', ", ".join(FAMILIES))
        gated = family in ("llama", "mixtral")
        if heads is None:
            head = 128 if hidden >= 2048 and hidden % 128 == 0 else 64
            heads = max(1, hidden // head)
        if ffn is None:
            ffn = 4 * hidden
            if gated:
                ffn = 7 * hidden // 2 if family == "mixtral" else -(-(8 * hidden // 3) // 256) * 256
        vocabularies = {"gpt": 50304, "bert": 30592, "t5": 32128, "llama": 32000, "mixtral": 32000}
        model = cls(
            family=family,
            hidden=hidden,
            layers=layers,
            heads=heads,
            vocabulary=vocabularies[family] if vocabulary is None else vocabulary,
            sequence=sequence,
            ffn=ffn,
            kv_heads=heads if kv_heads is None else kv_heads,
            experts=(8 if family == "mixtral" else 1) if experts is None else experts,
            top_k=(2 if family == "mixtral" else 1) if top_k is None else top_k,
            activation="swiglu" if gated else "gelu",
            dropout=not gated if dropout is None else dropout,
            fused=fused,
            tied=not gated,
        )
        for name in (
            "hidden",
            "layers",
            "heads",
            "vocabulary",
            "sequence",
            "ffn",
            "kv_heads",
            "experts",
            "top_k",
        ):
            if getattr(model, name) < 1:
                raise InvalidValue(f"has {name} {getattr(model, name)}", "1 or more")
        if model.top_k > model.experts:
            raise InvalidValue(f"has top-k {model.top_k} of {model.experts} experts", "at most all experts")
        if hidden % model.heads or model.heads % model.kv_heads:
            raise InvalidValue(
                f"has hidden {hidden}, {model.heads} heads and {model.kv_heads} heads of keys",
                "hidden a multiple of heads, and heads of the heads of keys",
            )
        return model

    @property
    def key_width(self) -> int:
        """Width of keys, and of values."""
        return self.hidden // self.heads * self.kv_heads

    @property
    def block_kinds(self) -> tuple[BlockKind, ...]:
        """The blocks in the order in which they run."""
        kinds: list[BlockKind] = ["block" for _ in range(self.layers)]
        if self.family == "t5":
            kinds += ["decoder" for _ in range(self.layers)]
        return tuple(kinds)

    # Parameters

    def block_parameters(self, kind: BlockKind = "block") -> int:
        """Parameters of one block, all experts included."""
        attention, _, rest = self._matrices(kind)
        return attention + self.mlp_parameters(kind) + rest

    def mlp_parameters(self, kind: BlockKind = "block") -> int:
        """Weights of a block's MLP, of all experts."""
        return self.experts * self._matrices(kind)[1]

    def _matrices(self, kind: BlockKind) -> tuple[int, int, int]:
        """Weights of attention, of the MLP (one expert), and all else."""
        h, f, k = self.hidden, self.ffn, self.key_width
        attention = 2 * h * h + 2 * h * k
        mlp = (3 if self.activation == "swiglu" else 2) * h * f
        if self.family in ("gpt", "bert"):
            return attention, mlp, (h + 2 * k) + h + f + h + 2 * (2 * h)
        norms = 2 * h
        if kind == "decoder":
            return 2 * attention, mlp, norms + h
        return attention, mlp, norms + (h * self.experts if self.experts > 1 else 0)

    def embedding_parameters(self) -> int:
        h = self.hidden
        positions = self.sequence * h if self.family in ("gpt", "bert") else 0
        # BERT: two segment types and a norm. T5: buckets of relative positions, in each half.
        rest = {"bert": 2 * h + 2 * h, "t5": 2 * 32 * self.heads}.get(self.family, 0)
        return self.vocabulary * h + positions + rest

    def head_parameters(self) -> int:
        """The final norm and the output layer."""
        h = self.hidden
        output = 0 if self.tied else self.vocabulary * h
        # BERT's masked-language head: a transformation, its norm, a bias per word.
        norm = {"gpt": 2 * h, "bert": h * h + h + 2 * h + self.vocabulary, "t5": 2 * h}.get(self.family, h)
        return norm + output

    def parameters(self) -> int:
        """Parameters of the whole model."""
        return (
            self.embedding_parameters()
            + sum(self.block_parameters(kind) for kind in self.block_kinds)
            + self.head_parameters()
        )

    # FLOPs

    def block_flops(self, microbatch: int, kind: BlockKind = "block", *, computed: bool = False) -> float:
        """FLOPs of one block's forward on one microbatch, over all tensor-parallel ranks. A multiplication and an addition are
        two.

        Args:
            computed: only the half of causal attention that kernels compute; else it is counted in full, as publications of FLOP
                rates do.
        """
        attention, mlp, _ = self._matrices(kind)
        tokens = microbatch * self.sequence
        router = self.hidden * self.experts if self.experts > 1 else 0
        scores = 4 * self.sequence * self.hidden * (2 if kind == "decoder" else 1)
        if computed and (kind == "decoder" or self.family not in ("bert", "t5")):
            scores -= 2 * self.sequence * self.hidden  # of self-attention, in a decoder beside another one
        return tokens * (2.0 * (attention + self.top_k * mlp + router) + scores)

    def head_flops(self, microbatch: int) -> float:
        transformation = self.hidden * self.hidden if self.family == "bert" else 0
        return 2.0 * microbatch * self.sequence * (self.hidden * self.vocabulary + transformation)

    # Saved bytes

    def saved_items(
        self,
        microbatch: int,
        layout: ParallelLayout | None = None,
        kind: BlockKind = "block",
        itemsize: int = ELEMENT,
    ) -> list[Item]:
        """What one block saves for backward, for one microbatch on one rank, without weights.

        Args:
            itemsize: bytes of an activation's element.
        """
        layout = layout or ParallelLayout()
        tokens = microbatch * self.sequence
        return [Item(name, int(tokens * nbytes)) for name, nbytes in self._per_token(layout, kind, itemsize)]

    def saved_bytes(
        self,
        microbatch: int,
        layout: ParallelLayout | None = None,
        kind: BlockKind = "block",
        itemsize: int = ELEMENT,
    ) -> int:
        """The sum of `saved_items`."""
        return sum(item.nbytes for item in self.saved_items(microbatch, layout, kind, itemsize))

    def block_input_bytes(self, microbatch: int, layout: ParallelLayout) -> int:
        """What a recomputed block saves: its input."""
        split = layout.tp if layout.sequence_parallel else 1
        return microbatch * self.sequence * self.hidden * ELEMENT // split

    def head_saved_bytes(self, microbatch: int, layout: ParallelLayout) -> int:
        """Bytes of the final norm, the output layer and the loss: two tensors of the hidden width, and log-probabilities in
        float32."""
        split = layout.tp if layout.sequence_parallel else 1
        tokens = microbatch * self.sequence
        return tokens * (2 * self.hidden * ELEMENT // split + PROBABILITY * self.vocabulary // layout.tp)

    def head_transient_bytes(self, microbatch: int, layout: ParallelLayout) -> int:
        """Alive for a moment when backward begins, beside what is saved: the gradient of the logits, in float32 and as they
        are."""
        return microbatch * self.sequence * self.vocabulary * (PROBABILITY + ELEMENT) // layout.tp

    def _per_token(
        self, layout: ParallelLayout, kind: BlockKind, itemsize: int
    ) -> Iterator[tuple[str, float]]:
        t = layout.tp
        split = t if layout.sequence_parallel else 1
        h, k = self.hidden * itemsize, self.key_width * itemsize
        statistics = STATISTIC * (2 if self.family in ("gpt", "bert") else 1) / split
        for part in ("attention",) if kind == "block" else ("attention", "cross-attention"):
            yield f"{part}: input of its norm", h / split
            yield f"{part}: statistics of its norm", statistics
            yield f"{part}: input of its projections", h / split
            yield f"{part}: queries, keys, values", (h + 2 * (h if self.score_bytes else k)) / t
            yield f"{part}: output", h / t
            if self.score_bytes:
                yield f"{part}: scores", self.score_bytes * self.heads * self.sequence / t
            else:
                yield f"{part}: sums of its softmax", STATISTIC * self.heads / t
            if self.dropout:
                yield f"{part}: dropout mask", self.hidden / split
        yield "mlp: input of its norm", h / split
        yield "mlp: statistics of its norm", statistics
        yield "mlp: input", h / split
        yield from self._mlp_per_token(layout, itemsize)
        if self.dropout:
            yield "mlp: dropout mask", self.hidden / split

    def _mlp_per_token(self, layout: ParallelLayout, itemsize: int) -> Iterator[tuple[str, float]]:
        copies = self.top_k if self.experts > 1 else 1
        h, f = self.hidden * itemsize, copies * self.ffn * itemsize / layout.tp
        if self.experts > 1:
            yield "router: probabilities", PROBABILITY * self.experts
            yield "experts: their tokens", copies * h
        if self.activation == "swiglu":
            yield "mlp: gate and up", 2 * f
            if not self.fused:
                yield "mlp: silu of the gate", f
        elif self.activation == "gelu":
            yield "mlp: input of its activation", f
        yield "mlp: output of its activation", f
        if self.experts > 1:
            yield "experts: their outputs", copies * h


def model_state_bytes(
    parameters: float,
    layout: ParallelLayout,
    *,
    experts: float = 0.0,
    gradient: int = 2,
    optimizer: int = 12,
) -> dict[str, int]:
    """Bytes of parameters, gradients and optimizer state that one rank holds.

    Args:
        parameters: that this rank would hold without ZeRO.
        experts: of them, parameters of experts.
        gradient, optimizer: bytes per parameter; by default mixed precision with Adam (a float32 copy and two moments).
            `gradient=4` where they are accumulated in float32.
    """
    shard = layout.shard(parameters, experts)
    return {
        "parameters": int(ELEMENT * (shard if layout.zero >= 3 else parameters)),
        "gradients": int(gradient * (shard if layout.zero >= 2 else parameters)),
        "optimizer": int(optimizer * (shard if layout.zero >= 1 else parameters)),
    }
