#!/bin/sh
# Several nodes over ssh: DeepSpeed's own launcher, which starts the ranks of each node by pdsh.
#
#   sh configs/deepspeed/launch-pdsh.sh train.py --deepspeed_config configs/deepspeed/gpt-20b-3d.json
#
# Needs on every node: this environment under the same path, ssh without a password, pdsh on the first, and the
# directories of the `ssdtrain` block on local drives.
set -e
hostfile=${HOSTFILE:-configs/deepspeed/hostfile}
exec deepspeed --hostfile "$hostfile" --module ssdtrain_ds "$@"
