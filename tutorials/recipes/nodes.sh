#!/usr/bin/env bash
# Train on several nodes without a scheduler. Run the same command on each node; HEAD is the first node:
#
#   HEAD=node0 NODES=2 tutorials/recipes/nodes.sh train.py --its --own arguments
#
# HEAD       name or address of the node where all nodes meet
# NODES      number of nodes, or a range: 1:2 continues with one node after the other one failed (default 2)
# RANKS      processes on each node (default: the number of GPUs, or 1)
# PORT       port on HEAD (default 29500)
# RESTARTS   how often torchrun restarts all ranks after a failure (default 3)
# INTERFACE  network between the nodes, such as eth0 (default: NCCL and gloo select one)
# RENDEZVOUS time-outs in seconds after which a silent node counts as failed:
#            keep_alive_interval=5,keep_alive_max_attempt=3,last_call_timeout=30
set -euo pipefail

: "${HEAD:?set HEAD to the name of the node where all nodes meet}"
# shellcheck source=tutorials/recipes/settings.sh
source "$(dirname "${BASH_SOURCE[0]}")/settings.sh"

gpus() { { nvidia-smi --list-gpus 2>/dev/null || true; } | wc -l; }
ranks="${RANKS:-$(gpus)}"

exec torchrun \
    --nnodes "${NODES:-2}" \
    --nproc-per-node "$((ranks > 0 ? ranks : 1))" \
    --max-restarts "${RESTARTS:-3}" \
    --rdzv-backend c10d \
    --rdzv-id "${RUN:-autopar}" \
    --rdzv-endpoint "$HEAD:${PORT:-29500}" \
    ${RENDEZVOUS:+--rdzv-conf "$RENDEZVOUS"} \
    "$@"
