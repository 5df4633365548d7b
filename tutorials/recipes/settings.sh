# shellcheck shell=bash
# Environment for training on several nodes. The scripts in this folder source it. Variables that are set stay as they are.

export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}" # as torchrun sets it; more for work on the CPU

# Network interface between the nodes; `ip -br addr` lists the names. By default NCCL and gloo select one, which may be
# the wrong one on machines with docker0 or several cards.
if [[ -n "${INTERFACE:-}" ]]; then
    export NCCL_SOCKET_IFNAME="${NCCL_SOCKET_IFNAME:-$INTERFACE}" GLOO_SOCKET_IFNAME="${GLOO_SOCKET_IFNAME:-$INTERFACE}"
fi
export NCCL_DEBUG="${NCCL_DEBUG:-WARN}" # INFO prints the network: expect NET/IB, not NET/Socket

# Flight recorder: each rank writes its last collectives to FILE<rank> when a collective times out.
export TORCH_FR_BUFFER_SIZE="${TORCH_FR_BUFFER_SIZE:-20000}"
export TORCH_NCCL_DUMP_ON_TIMEOUT="${TORCH_NCCL_DUMP_ON_TIMEOUT:-1}"
export TORCH_NCCL_DEBUG_INFO_TEMP_FILE="${TORCH_NCCL_DEBUG_INFO_TEMP_FILE:-${TMPDIR:-/tmp}/collectives_rank_}"

# Each attempt of a job uses a new store, without the entries of failed ranks.
export TORCH_DISABLE_SHARE_RDZV_TCP_STORE="${TORCH_DISABLE_SHARE_RDZV_TCP_STORE:-1}"
