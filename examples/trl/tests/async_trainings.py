"""Run as a program: trains with AsyncGRPOTrainer on samples that are there, and prints what was acked, and when.

A program of its own, since the trainer starts a thread that never ends.
"""

import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from cpu import without_a_gpu
from datasets import Dataset
from toy import build_model, build_tokenizer
from trl.experimental.async_grpo import AsyncGRPOConfig, AsyncGRPOTrainer

from dataplane_core import connect
from dataplane_integrations.trl_async import SAMPLE_FIELDS, StoreRolloutWorker, StoreWeightTransfer

GROUPS, ANSWERS, STEPS = 40, 4, 6
#: Of these groups, the trainer drops all samples as too stale.
STALE = (3, 9)
#: What is trained, by name.
CASES = {
    "fixed count": {},
    "token budget": {"token_budget": 40},
    "accumulation": {"token_budget": 16, "gradient_accumulation_steps": 3},
    "rare syncs": {"gradient_accumulation_steps": 2, "weight_sync_steps": 2},
}


class Trainer(AsyncGRPOTrainer):
    """Notes the numbers of the samples that it was trained on: those of `logprob_of`."""

    trained: set[int]

    def training_step(self, model, inputs, *how):
        loss = super().training_step(model, inputs, *how)
        self.trained |= {round(-1000 * each) for each in inputs["old_log_probs"].flatten().tolist()}
        return loss


def logprob_of(number):
    return -number / 1000


def write(client):
    client.register_partition("answers", SAMPLE_FIELDS, None, ["train"], grpo_group_size=ANSWERS)
    for group in range(GROUPS):
        numbers = range(group * ANSWERS, (group + 1) * ANSWERS)
        columns = {
            "input_ids": [[2 + number % 7, 3, 4, 5 + number % 5] for number in numbers],
            "token_mask": [[0, 0, 1, 1]] * ANSWERS,
            "generation_logprobs": [[logprob_of(number)] * 4 for number in numbers],
            "advantage": [1.0, -1.0, 0.5, -0.5],
            "metrics": [{"reward": float(number)} for number in numbers],
        }
        tags = [{"weight_version": -9 if group in STALE else 1}] * ANSWERS
        client.put_samples([f"p{group}_g{answer}" for answer in range(ANSWERS)], "answers", columns, tags=tags)


def train(folder, **options):
    with connect({"backend": "noop"}) as client:
        write(client)
        weights = StoreWeightTransfer(client)
        worker = StoreRolloutWorker(client, "answers", "train", claim_size=ANSWERS, weights=weights, buffer_size=12)
        arguments = {"token_budget": 0, "per_device_train_batch_size": 6} | options
        trainer = Trainer(
            model=str(folder / "model"),
            args=AsyncGRPOConfig(
                str(folder / "out"),
                max_steps=STEPS,
                max_staleness=8,
                heartbeat_stale_after_s=60,
                use_cpu=True,
                bf16=False,
                report_to=[],
                save_strategy="no",
                disable_tqdm=True,
                **arguments,
            ),
            train_dataset=Dataset.from_dict({"prompt": ["1"]}),
            processing_class=build_tokenizer(),
            rollout_worker=worker,
            weight_transfer=weights,
        )
        trainer.trained, early, acked = set(), [], []
        ack = client.ack

        def noted(meta):
            for sample_id in meta.sample_ids:
                group, answer = map(int, sample_id.removeprefix("p").split("_g"))
                acked.append(group * ANSWERS + answer)
                if acked[-1] not in trainer.trained and group not in STALE:
                    early.append(sample_id)
            ack(meta)

        client.ack = noted  # type: ignore[method-assign]
        trainer.train()
        task = client.describe("answers").tasks["train"]
        newest = max(trainer.trained)
        return {
            "trained": sorted(trainer.trained),
            "acked": acked,
            "early": early,
            "late": sorted({*range(newest + 1)} - {*acked}),
            "leased": task.num_leased,
            "ready": task.num_ready,
            "versions": [weights.version, trainer.model_version],
            "logged": trainer.state.log_history,
        }


def main(folder):
    without_a_gpu()
    build_model(seed=0).save_pretrained(folder / "model")
    for name, options in CASES.items():
        print(json.dumps([name, train(folder, **options)]), flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
