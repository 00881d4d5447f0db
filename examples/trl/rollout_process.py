"""A rollout process of the run that train.py, or train_async.py, has started with the same configuration.

It may be started at any time.

    python examples/trl/rollout_process.py --name another
    python examples/trl/rollout_process.py --name another --asynchronous
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import yaml
from rollouts import Generate, sample_columns, serve
from toy import Generator, build_model, build_tokenizer, reward
from transformers import PreTrainedTokenizerBase

from dataplane_core import DataPlaneError, connect
from dataplane_core.errors import BackendUnavailableError


def scored(generate: Generate, tokenizer: PreTrainedTokenizerBase) -> Generate:
    """Also gives the rewards and advantages: AsyncGRPOTrainer leaves them to who generates."""

    def generate_and_score(prompts: Sequence[str], answers: int, *how: Any) -> dict[str, list[Any]]:
        rows = generate(prompts, answers, *how)
        texts = tokenizer.batch_decode(rows["completion_ids"], skip_special_tokens=True)
        return sample_columns(rows, reward([prompt for prompt in prompts for _ in range(answers)], texts), answers)

    return generate_and_score


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--config", type=Path, default=Path(__file__).with_name("config.yaml"))
    parser.add_argument("--name", required=True, help="of this process, in the timeline")
    parser.add_argument("--asynchronous", action="store_true", help="for train_async.py")
    args = parser.parse_args()
    config = yaml.safe_load(args.config.read_text(encoding="utf-8"))
    torch.set_num_threads(1)
    model = build_model(config["seed"]).eval()
    tokenizer = build_tokenizer()
    generate: Generate = Generator(model, tokenizer)
    torch.seed()  # each process draws other answers
    options = {key: config["rollouts"][key] for key in ("prompts_per_claim", "lease_s", "timeout_s")}
    if args.asynchronous:
        generate = scored(Generator(model, tokenizer), tokenizer)
        options["most_waiting"] = config["asynchronous"]["most_waiting"]
    try:
        with connect(config["data_plane"], bootstrap=False) as client:
            try:
                serve(client, model, generate, worker=args.name, **options)
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
