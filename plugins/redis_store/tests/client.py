"""A client that does what it is told, ``client.py OPTIONS``: for each line, a JSON list that begins with seconds."""

import json
import sys
import time

import torch
from redis_servers import owner_pid

from dataplane_core import connect
from dataplane_core.client.connection import LATEST_END
from dataplane_core.errors import DataPlaneError


def main(options):
    config = {"backend": "redis_store", "options": json.loads(options), "op_timeout_s": 120.0}
    with connect(config, bootstrap=True) as client:
        acts = {
            "register": lambda: client.register_partition("p", ["x"], None, ["train"]),
            "put": lambda name: client.put_samples([name], "p", {"x": torch.ones(1)}),
            "list": lambda: client.list_samples("p").sample_ids,
        }
        print(json.dumps("connected"), flush=True)
        for line in sys.stdin:
            within_s, what, *words = json.loads(line)
            LATEST_END.set(time.monotonic() + within_s)
            try:
                result = acts[what](*words)
                told = ["ok", result if what == "list" else None, owner_pid(client)]
            except DataPlaneError as error:
                told = ["error", type(error).__name__, error.retryable, str(error)]
            print(json.dumps(told), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
