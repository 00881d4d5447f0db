"""A rollout process of the run that train.py has started with the same configuration. It may be started at any time.

python examples/trl/rollout_process.py --name another
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import torch
import yaml
from rollouts import serve
from toy import Generator, build_model, build_tokenizer

from dataplane_core import DataPlaneError, connect
from dataplane_core.errors import BackendUnavailableError


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--config", type=Path, default=Path(__file__).with_name("config.yaml"))
    parser.add_argument("--name", required=True, help="of this process, in the timeline")
    args = parser.parse_args()
    config = yaml.safe_load(args.config.read_text(encoding="utf-8"))
    torch.set_num_threads(1)
    model = build_model(config["seed"]).eval()
    torch.seed()  # each process draws other answers
    options = {key: config["rollouts"][key] for key in ("prompts_per_claim", "lease_s", "timeout_s")}
    try:
        with connect(config["data_plane"], bootstrap=False) as client:
            try:
                serve(client, model, Generator(model, build_tokenizer()), worker=args.name, **options)
            except BackendUnavailableError as error:  # the store ends with the trainer's process
                print(f"{args.name}: the data plane has ended, so the run is over: {error}", file=sys.stderr)
    except DataPlaneError as error:
        print(f"error: {args.name}: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
