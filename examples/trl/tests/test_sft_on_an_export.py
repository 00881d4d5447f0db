"""TRL's SFTTrainer trains on what `dataplane export --as messages` wrote."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import toy
from datasets import load_dataset
from tokenizers import AddedToken
from trl import SFTConfig, SFTTrainer

from dataplane_core import connect
from dataplane_tools import export_partition

TEMPLATE = "{% for message in messages %}<{{ message.role }}>{{ message.content }}<eos>{% endfor %}"


@pytest.mark.filterwarnings("ignore::FutureWarning")  # TRL uses what transformers will remove
def test_it_learns_the_answers_of_an_export(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("datasets.config.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("tqdm.tqdm.monitor_interval", 0)  # no thread stays
    tokenizer = toy.build_tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": [AddedToken("<user>"), AddedToken("<assistant>")]})
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(tmp_path / "tokenizer")

    prompts = toy.draw_prompts(64, seed=0)
    answers = ["".join(str((int(prompt[-1]) + step) % 10) for step in range(1, 5)) for prompt in prompts]
    texts = map("".join, zip(prompts, answers, strict=True))
    rows = [[*tokenizer(text)["input_ids"], tokenizer.eos_token_id] for text in texts]
    with connect({"backend": "noop"}) as client:
        client.register_partition("p", ["input_ids", "token_mask", "reward"], None, [])
        columns = {"input_ids": rows, "token_mask": [[0] * 4 + [1] * 5] * 64, "reward": torch.arange(64) % 2.0}
        client.put_samples([f"q{row}" for row in range(64)], "p", columns, tags=[{"weight_version": 3}] * 64)
        export_partition(
            client, "p", tmp_path / "sft", where="reward > 0", messages=True, tokenizer=str(tmp_path / "tokenizer")
        )
    dataset = load_dataset("parquet", data_dir=str(tmp_path / "sft"), cache_dir=str(tmp_path / "cache"), split="train")
    assert dataset.num_rows == 32
    assert dataset[0]["messages"] == [
        {"role": "user", "content": prompts[1]},
        {"role": "assistant", "content": answers[1]},
    ]

    model = toy.build_model(seed=0)
    model.resize_token_embeddings(len(tokenizer))
    config = SFTConfig(
        output_dir=str(tmp_path / "out"),
        max_steps=20,
        per_device_train_batch_size=16,
        learning_rate=3e-3,
        logging_steps=1,
        use_cpu=True,
        bf16=False,
        report_to=[],
        save_strategy="no",
        disable_tqdm=True,
    )
    trainer = SFTTrainer(model=model, args=config, train_dataset=dataset, processing_class=tokenizer)
    trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    assert len(losses) == 20
    assert losses[-1] < 0.7 * losses[0]
