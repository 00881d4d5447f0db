"""Trains a small transformer by GRPO, through a data plane chosen by name.

    python examples/grpo/train.py --config examples/grpo/config.yaml --in-memory

Leaves ``metrics.jsonl`` (a line per step), ``summary.json`` and ``reward.png`` in the folder given by ``--out``; over a
data plane also ``events``, a recording of its operations, ``run.html``, its page, and the rows of the last step.
"""

from __future__ import annotations

import argparse
import functools
import json
import logging
import os
import shutil
import sys
import time
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    # Run as a script: the package `grpo` is this file's folder. Taking the script's own entry away keeps modules
    # such as `config` from being importable under two names.
    sys.path[0] = str(Path(__file__).resolve().parent.parent)

import torch

from dataplane_core.cli import main as dataplane
from dataplane_core.errors import ConfigError, DataPlaneError, PluginError
from dataplane_integrations.rollout import FoundRollouts
from dataplane_observe import is_recording
from grpo.async_path import AsyncPath
from grpo.checkpoint import Checkpoints
from grpo.cluster import connect_actors, ray_session, required_cpus, start_actors
from grpo.config import RunConfig, load_config
from grpo.data_path import DataPath, InMemoryPath
from grpo.errors import RunFailedError, UserError
from grpo.model import build_model
from grpo.plane_path import DataPlanePath
from grpo.plot import plot_run
from grpo.progress import StepLines
from grpo.replay_path import ReplayPath
from grpo.rollout import draw_problems
from grpo.sampling_path import SamplingPath
from grpo.task import Problem, read_problems, split_problems
from grpo.trainer import LAST_ROWS, Trainer
from grpo.weights import pack_weights

_EVENTS = "events"
_FOUND = "found.jsonl"
_EXAMPLES = Path(__file__).resolve().parent.parent


def main(argv: list[str] | None = None) -> int:
    """Runs the program; returns its exit status: 0 well, 1 the run failed, 2 bad input, 130 interrupted."""
    args = _parse(argv)
    # torch says once per process, in four lines, that a jagged tensor was made
    logging.getLogger("torch.fx._symbolic_trace").setLevel(logging.ERROR)
    try:
        config = load_config(
            args.config,
            {
                "seed": args.seed,
                "grpo.steps": args.steps,
                "data.file": None if args.data is None else str(args.data.resolve()),
                "data_plane.backend": args.backend,
                "data_plane": None if args.replay is None else _replayed(args.replay, args.on_difference),
                "workers": args.workers,
                "tensor_parallel": args.tp,
                "sequence_packing.enabled": args.packing or None,
                "dynamic_sampling.enabled": args.dynamic_sampling or None,
                "rollouts.mode": args.mode,
                "rollouts.staleness": args.staleness,
                "saving.every": args.save_every,
            },
        )
        if args.staleness is not None and config.rollouts.mode == "sync":
            raise UserError("--staleness: rollouts run ahead with --mode async only. Add it, or leave out --staleness.")
        run(config, _data_path(config, args), args.out, resume=args.resume)
    except (UserError, ConfigError, PluginError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except (RunFailedError, DataPlaneError) as error:
        print(f"error: {error}", file=sys.stderr)
        details = getattr(error, "details", "")
        if details:
            report = args.out / "failure.txt"
            report.write_text(details, encoding="utf-8")
            print(f"What the actors reported is in {report}.", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
    return 0


def run(config: RunConfig, path: DataPath, out: Path, *, resume: bool = False) -> None:
    """One run from the prompts to the picture; everything that it starts has ended when it returns or raises.

    Args:
        config: What to run.
        path: How its tensors travel.
        out: The folder for its results, and for its saves.
        resume: Go on from the newest save in ``out``, which must be there. With ``saving.resume``, it need not.
    """
    start = time.monotonic()
    problems = read_problems(
        config.data.file,
        max_prompt_chars=config.model.context - config.grpo.max_new_tokens,
        max_answer_chars=config.grpo.max_new_tokens - 1,
    )
    train_problems, eval_problems = split_problems(problems, config.data.eval_prompts)
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"--out {out} cannot be used: {error}.") from error
    checkpoints = Checkpoints(out, config)
    going_on = config.saving.resume
    save = checkpoints.newest() if resume or (going_on and checkpoints.exist()) else None
    if save is None:
        checkpoints.refuse_to_mix()

    found = out / _FOUND
    if not going_on:  # what an earlier run left
        found.unlink(missing_ok=True)
        shutil.rmtree(out / _EVENTS, ignore_errors=True)

    with ray_session(config.ray, required_cpus(config)):
        torch.set_num_threads(1)  # as in the actors: more threads would change the last bits
        actors = start_actors(config, path.rollout_class, path.worker_classes[config.workers])
        print(f"{len(train_problems)} prompts to train on, {len(eval_problems)} to evaluate, from {config.data.file}")
        model = build_model(config.model, config.seed)
        reference = pack_weights(model) if save is None else save.reference_weights()
        try:
            pids = connect_actors(actors, reference, config.ray)
            print("running over " + path.name + ": " + ", ".join(f"{name} (pid {pid})" for name, pid in pids.items()))
            path.start(actors, functools.partial(draw_problems, config, train_problems))
            trainer = Trainer(config, actors, path, out)
            if save is None:
                evaluation = {"before": trainer.evaluate(eval_problems)}
            else:
                evaluation = {"before": save.evaluation}
                trainer.load_state(save.folder, save.records)
                print(f"going on after step {save.step}, from {save.folder}")
            _print_evaluation("before GRPO", evaluation["before"], eval_problems)
            write = functools.partial(checkpoints.write, evaluation=evaluation["before"], reference=reference)

            lines = StepLines(config.grpo.steps)

            def on_step(record: dict[str, Any]) -> None:
                lines.show(record)
                path.mark_step(record["step"], record["loss"], record.get("staleness", 0))
                if config.saving.every and record["step"] % config.saving.every == 0:
                    print(f"saved to {write(trainer.records, write_state=trainer.save_state)}", flush=True)
                    path.saved(record["step"])

            trainer.run(on_step)
            evaluation["after"] = trainer.evaluate(eval_problems)
            path.saved(config.grpo.steps)  # nobody begins the last steps again
        finally:
            path.close()

    for moment in ("before", "after"):
        _print_evaluation(f"{moment} GRPO", evaluation[moment], eval_problems)
    title = f"GRPO over {path.name}, seed {config.seed}"
    plot_run(trainer.records, evaluation, title, out / "reward.png")
    summary = {
        "path": path.name,
        "seed": config.seed,
        "steps": config.grpo.steps,
        "evaluation": evaluation,
        "seconds": round(time.monotonic() - start, 1),
    }
    (out / "summary.json").write_text(json.dumps(summary, indent=2) + "\n", encoding="utf-8")
    if path.recording is not None:
        dataplane(["audit", str(path.recording), "--html", str(out / "run.html")])
        read = ["read", str(out / LAST_ROWS), "--tokenizer", "grpo.task:decode"]
        dataplane([*read, "--html", str(out / "answers.html")])
        print(
            f"What the model wrote in the last step: open {out / 'answers.html'} in a browser, or run\n"
            f"PYTHONPATH={os.path.relpath(_EXAMPLES)} dataplane {' '.join(read)} --sort reward"
        )
    if found.exists():
        print(FoundRollouts(found))
    print(f"{summary['seconds']:.0f} s in all; see {out / 'metrics.jsonl'} and {out / 'reward.png'}")


def _print_evaluation(when: str, shares: dict[str, float], problems: list[Problem]) -> None:
    print(
        f"{when}: exact answers on {len(problems)} fixed prompts: sampled {shares['sampled']:.3f}, "
        f"greedy {shares['greedy']:.3f}",
        flush=True,
    )


def _replayed(folder: Path, on_difference: str) -> dict[str, Any]:
    """The section ``data_plane`` of a run that replays another one."""
    return {"backend": "recording", "options": {"folder": str(folder.resolve()), "on_difference": on_difference}}


def _data_path(config: RunConfig, args: argparse.Namespace) -> DataPath:
    ahead, in_memory = config.rollouts.mode == "async", args.in_memory
    recording = None if args.record is None else Path(args.record or args.out / "recording").resolve()
    if in_memory and (recording is not None or args.replay is not None):
        raise UserError("a recording is made, and replayed, by the data plane. Leave out --in-memory.")
    going_on = args.resume or config.saving.resume
    if args.replay is not None and (ahead or config.dynamic_sampling.enabled or going_on):
        raise UserError("--replay is for synchronous runs from their start: leave out the other modes and --resume.")
    if recording is not None and is_recording(recording) and not going_on:
        raise UserError(f"--record: {recording} has a recording already. Name another folder, or remove it.")
    if in_memory and ahead:
        raise UserError("rollouts run ahead through the data plane. Leave out --in-memory or --mode async.")
    if in_memory and config.portions.per_step > 1:
        raise UserError("portions are read from the data plane. Leave out --in-memory, or set portions.per_step to 1.")
    if in_memory and config.dynamic_sampling.enabled:
        raise UserError("dynamic sampling filters rows in the data plane. Leave out --in-memory or --dynamic-sampling.")
    if in_memory:
        return InMemoryPath(config)
    kind = AsyncPath if ahead else SamplingPath if config.dynamic_sampling.enabled else DataPlanePath
    out = args.out.resolve()
    kind = kind if args.replay is None else ReplayPath
    return kind(config, recording or out / _EVENTS, "all" if recording else "none", FoundRollouts(out / _FOUND))


def _parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    here = Path(os.path.relpath(Path(__file__).resolve().parent))
    parser.add_argument("--config", type=Path, default=here / "config.yaml", help="YAML file (default: %(default)s)")
    parser.add_argument("--backend", help="data-plane backend; overrides the configuration")
    parser.add_argument("--in-memory", action="store_true", help="no data plane: batches go through the driver")
    parser.add_argument("--data", type=Path, help="JSONL file of prompts; overrides the configuration")
    parser.add_argument("--out", type=Path, default=Path("out"), help="where results go (default: %(default)s)")
    parser.add_argument("--seed", type=int, help="overrides the configuration")
    parser.add_argument("--steps", type=int, help="GRPO steps; overrides the configuration")
    parser.add_argument("--workers", choices=["fsdp2", "megatron"], help="engine of the policy workers")
    parser.add_argument("--tp", type=int, metavar="N", help="tensor parallelism: N policy workers share each forward")
    parser.add_argument("--packing", action="store_true", help="sequence packing: microbatches without padding")
    parser.add_argument("--dynamic-sampling", action="store_true", help="train only on groups whose rewards differ")
    parser.add_argument("--mode", choices=("sync", "async"), help="async: rollouts run ahead of training")
    parser.add_argument("--staleness", type=int, metavar="N", help="steps that they run ahead; with --mode async")
    parser.add_argument("--record", nargs="?", const="", metavar="FOLDER", help="record the run, in --out by default")
    parser.add_argument("--replay", type=Path, metavar="FOLDER", help="train on a recorded run's rows; generates none")
    parser.add_argument(
        "--on-difference",
        choices=("error", "warn"),
        default="error",
        help="with --replay, when a process writes something else than in the run (default: %(default)s)",
    )
    parser.add_argument("--save-every", type=int, metavar="N", help="save the run after every N steps")
    parser.add_argument("--resume", action="store_true", help="go on from the newest save in --out")
    return parser.parse_args(argv)


if __name__ == "__main__":
    sys.exit(main())
