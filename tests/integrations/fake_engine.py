"""A serving engine's side of weights over HTTP: ``python fake_engine.py FOLDER FAILS_AT`` prints its port."""

import json
import math
import pickle
import struct
import sys
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

FOLDER, FAILS_AT = Path(sys.argv[1]), int(sys.argv[2])
WIDTHS = {"float32": 4, "bfloat16": 2}
held: dict[str, tuple[str, list[int], bytes]] = {}
log: list[tuple[str, int, int]] = []


class Handler(BaseHTTPRequestHandler):
    def do_POST(self) -> None:
        data, name = self.rfile.read(int(self.headers["Content-Length"])), self.path.split("/")[-1]
        tensors: list[dict[str, Any]] = []
        if name == "update":
            (length,) = struct.unpack("<Q", data[:8])
            tensors, place = json.loads(data[8 : 8 + length]), 8 + length
            for one in tensors:
                size = math.prod(one["shape"]) * WIDTHS[one["dtype"]]
                held[one["name"]] = (one["dtype"], one["shape"], data[place : place + size])
                place += size
            assert place == len(data)
        log.append((name, len(tensors), len(data)))
        (FOLDER / "log.json").write_text(json.dumps(log))
        if name == "finish":
            (FOLDER / "held.pickle").write_bytes(pickle.dumps(held))
        fails = name == "update" and sum(kind == "update" for kind, *_ in log) == FAILS_AT
        self.send_response(507 if fails else 200)
        self.end_headers()
        self.wfile.write(b"no room is left" if fails else b"")

    def log_message(self, *_: Any) -> None:
        pass


if __name__ == "__main__":
    server = HTTPServer(("127.0.0.1", 0), Handler)
    print(server.server_port, flush=True)
    server.serve_forever()
