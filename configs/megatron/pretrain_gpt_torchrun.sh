#!/usr/bin/env bash
# GPT with tensor, pipeline and data parallelism on several nodes, activations to each node's own drives.
# Start it on every node:
#
#   MEGATRON_LM_DIR=~/Megatron-LM NNODES=8 NODE_RANK=0 MASTER_ADDR=node0 DATA=/data/my_text_document \
#   TOKENIZER="--tokenizer-type Llama2Tokenizer --tokenizer-model tokenizer.model" ./pretrain_gpt_torchrun.sh
set -euo pipefail

here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
: "${MEGATRON_LM_DIR:?a checkout of Megatron-LM}" "${DATA:?prefix of the .bin and .idx}" "${TOKENIZER:?tokenizer flags}"
: "${NNODES:=1}" "${NODE_RANK:=0}" "${MASTER_ADDR:=localhost}" "${MASTER_PORT:=29500}" "${GPUS:=8}" "${OUT:=runs/gpt}"

export CUDA_DEVICE_MAX_CONNECTIONS=1
mapfile -t model < <(grep -v '^#' "$here/gpt_3d.args" | tr ' ' '\n')
read -r -a tokenizer <<<"$TOKENIZER"

exec torchrun --no-python \
    --nnodes "$NNODES" --node-rank "$NODE_RANK" --nproc-per-node "$GPUS" \
    --master-addr "$MASTER_ADDR" --master-port "$MASTER_PORT" \
    bash "$here/bind_rank.sh" python -m ssdtrain_megatron.run "$MEGATRON_LM_DIR/pretrain_gpt.py" \
    "${model[@]}" "${tokenizer[@]}" --data-path "$DATA" --split 99,1,0 \
    --save "$OUT/checkpoints" --load "$OUT/checkpoints" --tensorboard-dir "$OUT/tensorboard" \
    --ssdtrain-config "$here/ssdtrain.yaml" "$@"
