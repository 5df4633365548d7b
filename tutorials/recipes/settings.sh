# shellcheck shell=bash
# What matters for training on several nodes; each line only where nothing else is set. Sourced by the scripts beside it.

export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}" # torchrun sets 1 too; more for CPU work beside the GPU

# Over which network nodes talk: the names are those of `ip -br addr`. Without them NCCL and gloo pick one by themselves,
# and on machines with docker0 or several cards pick the wrong one.
if [[ -n "${INTERFACE:-}" ]]; then
    export NCCL_SOCKET_IFNAME="${NCCL_SOCKET_IFNAME:-$INTERFACE}" GLOO_SOCKET_IFNAME="${GLOO_SOCKET_IFNAME:-$INTERFACE}"
fi
export NCCL_DEBUG="${NCCL_DEBUG:-WARN}" # INFO says which network it found: look for NET/IB, not NET/Socket

# The flight recorder: the last collectives of every rank, written to FILE<rank> when one times out.
export TORCH_FR_BUFFER_SIZE="${TORCH_FR_BUFFER_SIZE:-20000}"
export TORCH_NCCL_DUMP_ON_TIMEOUT="${TORCH_NCCL_DUMP_ON_TIMEOUT:-1}"
export TORCH_NCCL_DEBUG_INFO_TEMP_FILE="${TORCH_NCCL_DEBUG_INFO_TEMP_FILE:-${TMPDIR:-/tmp}/collectives_rank_}"

# Each attempt of a job meets in a store of its own, without what lost ranks have left in the last one.
export TORCH_DISABLE_SHARE_RDZV_TCP_STORE="${TORCH_DISABLE_SHARE_RDZV_TCP_STORE:-1}"
