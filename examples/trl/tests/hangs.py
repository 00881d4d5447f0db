"""Run as a program: a rollout process that hangs at a given point of a given claim, for a test that kills it there.

``hangs.py CONFIG POINT NTH``: ``POINT`` is ``generating``, when no answer is written, or ``written``, when all are and
the claim is not acked. When it is there, it prints its prompts.
"""

import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
import yaml
from rollouts import serve
from toy import Generator, build_model, build_tokenizer

from dataplane_core import connect


def main(config, point, nth):
    torch.set_num_threads(1)
    model = build_model(config["seed"])
    generator, calls, held = Generator(model, build_tokenizer()), 0, [""]
    with connect(config["data_plane"], bootstrap=False) as client:
        ack = client.ack

        def hang_at(here):
            if here == point and calls == nth:
                print(*held, flush=True)
                time.sleep(600)

        def generate(prompts, *how):
            nonlocal calls, held
            calls, held = calls + 1, prompts
            hang_at("generating")
            return generator(prompts, *how)

        def acked(meta):
            hang_at("written")
            ack(meta)

        client.ack = acked
        options = {key: config["rollouts"][key] for key in ("prompts_per_claim", "lease_s", "timeout_s")}
        serve(client, model, generate, worker="killed", **options)


if __name__ == "__main__":
    main(yaml.safe_load(Path(sys.argv[1]).read_text()), sys.argv[2], int(sys.argv[3]))
