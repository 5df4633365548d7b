#!/usr/bin/env bash
# Train on several nodes without a scheduler. Run the same line on each of them, the first one being HEAD:
#
#   HEAD=node0 NODES=2 tutorials/recipes/nodes.sh train.py --its --own arguments
#
# HEAD     name or address of the node where the others meet
# NODES    how many there are, or how many at least and at most: 1:2 goes on with one when the other is lost (default 2)
# RANKS    processes on each node (default: its GPUs, or 1)
# PORT     where they meet on HEAD (default 29500)
# RESTARTS how often all ranks are started again after one was lost (default 3)
# INTERFACE the network between the nodes, such as eth0 (default: found by NCCL and gloo)
# RENDEZVOUS how soon a silent node counts as lost, seconds: keep_alive_interval=5,keep_alive_max_attempt=3,last_call_timeout=30
set -euo pipefail

: "${HEAD:?set HEAD to the name of the node where the others meet}"
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
