"""``python forked.py RANKS SCRIPT ARGUMENTS``: ranks of a script, forked after torch and transformers are imported."""

import os
import runpy
import signal
import socket
import sys
import traceback

import torch._dynamo  # noqa: F401
from transformers import LlamaForCausalLM  # noqa: F401


def rank_main(rank: int, script: str) -> None:
    """Run the script as one rank, and end the process."""
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank))
    sys.path[0] = os.path.dirname(script)
    code = 1
    try:
        runpy.run_path(script, run_name="__main__")
        code = 0
    except BaseException:
        traceback.print_exc()
    sys.stdout.flush()
    os._exit(code)


def main() -> int:
    """Return the first exit code that is not 0, after the other ranks are stopped."""
    ranks, script, sys.argv = sys.argv[1], sys.argv[2], sys.argv[2:]
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    os.environ.update(WORLD_SIZE=ranks, LOCAL_WORLD_SIZE=ranks, MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    running = set[int]()
    for rank in range(int(ranks)):
        child = os.fork()
        if not child:
            rank_main(rank, script)
        running.add(child)
    while running:
        child, status = os.wait()
        running.discard(child)
        if status:
            for other in running:
                os.kill(other, signal.SIGTERM)
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
