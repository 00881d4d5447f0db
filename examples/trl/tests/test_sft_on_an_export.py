"""TRL's SFTTrainer trains on what `dataplane export --as messages` wrote."""

import pytest
import torch
import toy
from datasets import load_dataset
from tensordict import NonTensorStack
from tokenizers import AddedToken
from trl import SFTConfig, SFTTrainer

from dataplane_core import connect
from dataplane_tools import export_partition

TEMPLATE = "{% for message in messages %}<{{ message.role }}>{{ message.content }}<eos>{% endfor %}"


#: As the templates of Llama and Qwen take tool calls.
TOOLS_TEMPLATE = (
    "{% for message in messages %}<{{ message.role }}>"
    "{% if 'tool_calls' in message %}{% for call in message.tool_calls %}<{{ call.function.name }}>"
    "{% for name, value in call.function.arguments | items %}{{ value }}{% endfor %}{% endfor %}"
    "{% else %}{{ message.content }}{% endif %}<eos>{% endfor %}"
)

# TRL uses what transformers will remove
pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning")


@pytest.fixture(autouse=True)
def offline(monkeypatch):
    monkeypatch.setattr("datasets.config.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("tqdm.tqdm.monitor_interval", 0)  # no thread stays


def tokenizer_of(template, *words):
    tokenizer = toy.build_tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": [AddedToken(f"<{word}>") for word in words]})
    tokenizer.chat_template = template
    return tokenizer


def trainer_of(dataset, tokenizer, folder, **options):
    model = toy.build_model(seed=0)
    model.resize_token_embeddings(len(tokenizer))
    config = SFTConfig(
        output_dir=str(folder),
        learning_rate=3e-3,
        logging_steps=1,
        use_cpu=True,
        bf16=False,
        report_to=[],
        save_strategy="no",
        disable_tqdm=True,
        **options,
    )
    return SFTTrainer(model=model, args=config, train_dataset=dataset, processing_class=tokenizer)


def load(folder, cache):
    return load_dataset("parquet", data_dir=str(folder), cache_dir=str(cache), split="train")


def test_it_learns_the_answers_of_an_export(tmp_path):
    tokenizer = tokenizer_of(TEMPLATE, "user", "assistant")
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
    dataset = load(tmp_path / "sft", tmp_path / "cache")
    assert dataset.num_rows == 32
    assert dataset[0]["messages"] == [
        {"role": "user", "content": prompts[1]},
        {"role": "assistant", "content": answers[1]},
    ]
    trainer = trainer_of(dataset, tokenizer, tmp_path / "out", max_steps=20, per_device_train_batch_size=16)
    trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    assert len(losses) == 20
    assert losses[-1] < 0.7 * losses[0]


def test_it_trains_on_tool_calls(tmp_path):
    ask, answer = {"role": "user", "content": "1"}, {"role": "assistant", "content": "2"}
    call = {"role": "assistant", "tool_calls": [{"name": "add", "arguments": {"a": 3, "b": 4}}]}
    other = {"role": "assistant", "tool_calls": [{"name": "now", "arguments": {"zone": "5"}}]}
    told = {"role": "tool", "content": "6", "name": "add"}
    with connect({"backend": "noop"}) as client:
        client.register_partition("p", ["chat"], None, [])
        chats = NonTensorStack([ask, answer], [ask, call, told, answer], [ask, other])
        client.put_samples(["a", "b", "c"], "p", {"chat": chats})
        export_partition(client, "p", tmp_path / "sft", messages=True)
    tokenizer = tokenizer_of(TOOLS_TEMPLATE, "user", "assistant", "tool", "add", "now")
    dataset = load(tmp_path / "sft", tmp_path / "cache")
    trainer = trainer_of(dataset, tokenizer, tmp_path / "out", max_steps=1, per_device_train_batch_size=3)
    assert [tokenizer.decode(row["input_ids"]) for row in trainer.train_dataset] == [
        "<user>1<eos><assistant>2<eos>",
        "<user>1<eos><assistant><add>34<eos><tool>6<eos><assistant>2<eos>",
        "<user>1<eos><assistant><now>5<eos>",
    ]
    trainer.train()
