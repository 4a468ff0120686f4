#!/usr/bin/env bash
# Runs a command on the NUMA node of this rank's GPU, so that its pinned arena and its drive's queue are near it.
#
#   torchrun --no-python --nproc-per-node 8 bind_rank.sh python -m ssdtrain_megatron.run pretrain_gpt.py ...
#
# Set SSDTRAIN_NUMA_NODES to one node per local rank ("0 0 0 0 1 1 1 1") where the driver does not say.
set -euo pipefail

rank=${LOCAL_RANK:-${SLURM_LOCALID:-0}}
export LOCAL_RANK=$rank

node=-1
if [[ -n ${SSDTRAIN_NUMA_NODES:-} ]]; then
    read -r -a nodes <<<"$SSDTRAIN_NUMA_NODES"
    node=${nodes[$rank]}
elif command -v nvidia-smi >/dev/null; then
    bus=$(nvidia-smi --query-gpu=pci.bus_id --format=csv,noheader --id="$rank")
    # nvidia-smi writes an eight-digit domain in capitals, sysfs four digits in small letters.
    bus=$(tr '[:upper:]' '[:lower:]' <<<"${bus:4}")
    if [[ -r /sys/bus/pci/devices/$bus/numa_node ]]; then
        node=$(<"/sys/bus/pci/devices/$bus/numa_node")
    fi
fi

# A machine of one node says -1.
if ((node >= 0)) && command -v numactl >/dev/null; then
    exec numactl --cpunodebind="$node" --membind="$node" "$@"
fi
exec "$@"
