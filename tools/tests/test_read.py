"""`dataplane read`: which samples it shows, how it takes them apart, and that it takes none from a task."""

import io
import json
import math
import re
import sys
from pathlib import Path

import pytest
import torch
from contents import run
from torch import tensor

from dataplane_core import connect
from dataplane_core.batch import split_message_logs, stack_or_nest
from dataplane_core.errors import (
    BackendUnavailableError,
    InvalidRequestError,
    LostSamplesError,
    UnknownPartitionError,
    UnsupportedOperationError,
)
from dataplane_tools import commands
from dataplane_tools._rows import Rows
from dataplane_tools._sample import sample_of
from dataplane_tools._tokenizer import Tokenizer
from dataplane_tools._where import parse_where


def read(*words):
    assert run(commands.read, *words) == 0


TOKENS = [list(b"2+2=4."), list(b"2+2=5"), list(b"7+1=8."), list(b"7+1=9.")]
IDS = ["q0_g0", "q0_g1", "q1_g0", "q1_g1"]


def fill(client):
    """The partition ``step-1``: two groups of two, one row without its reward, no row with ``later``."""
    client.register_partition("step-1", ["input_ids", "token_mask", "reward", "later"], 8, ["train"], 2)
    columns = {"input_ids": TOKENS, "token_mask": [[0] * 4 + [1] * (len(row) - 4) for row in TOKENS]}
    columns["pixels"] = torch.zeros(4, 5, 3, 14, 14)
    client.put_samples(IDS, "step-1", columns, tags=[{"weight_version": 6 + number} for number in range(4)])
    client.put_samples(IDS[:3], "step-1", {"reward": torch.tensor([1.0, 0.1, math.nan])})
    client.put_samples(IDS[:1], "step-1", {"info": [{"source": ["a", None]}]})


@pytest.fixture
def client(store):
    """A store that other clients can attach to."""
    fill(store)
    return store


@pytest.fixture
def local():
    """A store in this process."""
    with connect({"backend": "noop"}) as client:
        fill(client)
        yield client


@pytest.fixture
def characters(tmp_path, monkeypatch):
    """A module with functions that decode: ids are characters."""
    (tmp_path / "characters_of_ids.py").write_text(
        "def decode(ids):\n    return ''.join(map(chr, ids))\n"
        "def fails(ids):\n    raise KeyError('no such id')\n"
        "def numbers(ids):\n    return len(ids)\n"
        "nothing = 1\n"
    )
    monkeypatch.chdir(tmp_path)
    yield "characters_of_ids:decode"
    sys.modules.pop("characters_of_ids", None)


# --- which samples ----------------------------------------------------------------------------------------------------


def test_samples_as_text_and_a_group_that_shows_its_prompt_once(client, config, characters, capsys):
    read(config, "step-1", "--tokenizer", characters, "--where", "weight_version<=7")
    assert capsys.readouterr().out == (
        "step-1: 2 of 4 samples\n"
        "\n"
        "q0_g0\n"
        "  reward 1  weight_version 6  6 tokens (prompt 4, answer 2)\n"
        "  prompt: 2+2=\n"
        "  answer: 4.\n"
        '  info: {"source": ["a", null]}\n'
        "  pixels: float32 cells of shape (L, 3, 14, 14)\n"
        "  lacks: later\n"
        "\n"
        "q0_g1\n"
        "  reward 0.1  weight_version 7  5 tokens (prompt 4, answer 1)\n"
        "  prompt: 2+2=\n"
        "  answer: 5\n"
        "  pixels: float32 cells of shape (L, 3, 14, 14)\n"
        "  lacks: later\n"
    )
    read(config, "--group", "q1", "--tokenizer", characters, "--fields", "input_ids,token_mask,reward")
    assert capsys.readouterr().out == (
        "step-1: 2 of 4 samples\n\n  prompt: 7+1=\n\n"
        "q1_g0\n  reward nan  weight_version 8  6 tokens (prompt 4, answer 2)\n  answer: 8.\n\n"
        "q1_g1\n  weight_version 9  6 tokens (prompt 4, answer 2)\n  answer: 9.\n  lacks: reward\n"
    )


def test_a_group_of_rollouts_shows_the_rows_of_each_side_by_side(local):
    local.register_partition("agents", ["text"], None, ["train"], 3, rollouts=True)
    for ids in (["q0_g0/0", "q0_g1/0", "q0_g2/0"], ["q1_g0/0", "q0_g1/1", "q0_g0/1"], ["q0_g0/2"]):
        local.put_samples(ids, "agents", {"text": [f"turn {sample_id}" for sample_id in ids]})
    local.seal({"q0_g0": 3, "q0_g1": 2}, "agents", ends_groups=True)
    found = Rows(local, "agents").find(group="q0")
    claimed = local.claim_meta("agents", "train", ["text"], 1)
    assert list(found.tags) == [*claimed.sample_ids, "q0_g2/0"]
    assert claimed.sample_ids == ["q0_g0/0", "q0_g0/1", "q0_g0/2", "q0_g1/0", "q0_g1/1"]
    assert found.tags["q0_g0/2"] == {"rollout_rows": 3, "group_rollouts": 2}


def test_a_group_shows_once_only_what_is_the_same(client, config, capsys):
    turns = [
        [{"role": "user", "content": "Where?"}, {"role": "assistant", "tool_calls": [{"city": city}]}]
        for city in ("Paris", "Rome")
    ]
    client.register_partition("chats", [], None, [])
    client.put_samples(["q0_g0", "q0_g1"], "chats", {"messages": turns})
    read(config, "chats", "--group", "q0")
    before, first, second = re.split("q0_g[01]\n", capsys.readouterr().out)
    assert "Where?" in before
    assert ("Paris" in before, "Paris" in first, "Rome" in second) == (False, True, True)


def test_a_conversation_beside_tokens_is_shown_too():
    chat = [{"role": "user", "content": "ask"}]
    sample = sample_of("a", {}, {"prompts": row("ask"), "responses": row("yes"), "raw_prompt": chat})
    assert [part.role for part in sample.parts] == ["prompt", "answer"]
    assert sample.objects == {"raw_prompt": chat}


def test_samples_as_json(client, config, capsys):
    read(config, "step-1", "--json", "--sort", "weight_version", "--descending", "--limit", "2")
    found = json.loads(capsys.readouterr().out)
    assert (found["num_samples"], found["num_matching"]) == (4, 4)
    last, third = found["samples"]
    assert (last["sample_id"], last["group"], last["lacks"]) == ("q1_g1", "q1", ["reward", "later"])
    assert last["parts"][1] == {"role": "answer", "text": "57 46", "start": 4, "stop": 6, "calls": None}
    assert last["tokens"] == TOKENS[3]
    assert last["per_token"] == {"token_mask": [0, 0, 0, 0, 1, 1]}
    assert third["values"] == {"reward": "nan"}
    assert third["tags"] == {"weight_version": 8}
    read(config, "step-1", "--json", "--limit", "1")
    assert [sample["sample_id"] for sample in json.loads(capsys.readouterr().out)["samples"]] == IDS[:1]


@pytest.mark.parametrize(
    ("asked", "expected"),
    [
        ({}, IDS),
        ({"descending": True}, IDS[::-1]),
        ({"limit": 3}, IDS[:3]),
        ({"sort": "reward"}, ["q0_g1", "q0_g0", "q1_g0", "q1_g1"]),  # no number and no value come last
        ({"sort": "reward", "descending": True}, ["q0_g0", "q0_g1", "q1_g0", "q1_g1"]),
        ({"sort": "reward", "group": "q0"}, ["q0_g1", "q0_g0"]),
        ({"where": parse_where("weight_version > 7")}, ["q1_g0", "q1_g1"]),
        ({"where": parse_where("weight_version > 7 and reward == nan")}, ["q1_g0"]),
        ({"where": parse_where("reward < 2 or weight_version == 9"), "limit": 2}, ["q0_g0", "q0_g1"]),
        ({"where": parse_where("reward == 0.1")}, ["q0_g1"]),  # as it is shown; float32 has no such number
        ({"where": parse_where("weight_version > 70")}, []),
        ({"where": parse_where("later < 1")}, []),  # registered, and not written
    ],
)
def test_samples_are_found(local, asked, expected):
    rows = Rows(local, "step-1")
    found = rows.find(**asked)
    assert list(found.tags) == expected
    assert found.num_samples == 4
    assert [sample.sample_id for sample in rows.read(found)] == expected


def test_what_has_no_order_comes_last(local):
    local.register_partition("odd", [], None, [])
    tags = [{"a": math.nan}, {"a": 2}, {}, {"a": "x"}, {"a": math.nan}, {"a": 1.5}, {"a": None}, {"a": True}]
    local.put_samples([f"s{number}" for number in range(8)], "odd", tags=tags)
    rows = Rows(local, "odd")
    assert list(rows.find(sort="a").tags) == ["s7", "s5", "s1", "s3", "s0", "s2", "s4", "s6"]
    assert list(rows.find(sort="a", descending=True).tags) == ["s3", "s1", "s5", "s7", "s0", "s2", "s4", "s6"]


def test_names_and_limits_are_checked(client, config, nowhere):
    client.register_partition("step-2", ["x"], None, [])
    for words, named in (
        (["--fields", "reward,rewrad"], "has no field 'rewrad'"),
        (["--where", "weigth_version > 7"], "has no tag or field 'weigth_version'. It has: 'info', 'input_"),
        (["--where", "reward > 70", "--sort", "rewrad"], "has no tag or field 'rewrad'"),
        (["--sort", "input_ids"], "'input_ids' of sample 'q0_g0' is no single value"),
        (["--where", "info == 1"], "'info' of sample 'q0_g0' is no single value"),
        (["--group", "q"], "has no group 'q'. It has: 'q0', 'q1'."),
        (["--limit", "0"], "--limit 0"),
    ):
        with pytest.raises(InvalidRequestError, match=named):
            read(config, "step-1", *words)
    for words, error, named in (
        ([config, "step-3"], UnknownPartitionError, "step-3"),
        ([config], InvalidRequestError, "There are 2: 'step-1', 'step-2'"),
        ([nowhere, "step-1"], BackendUnavailableError, "shm_store"),
    ):
        with pytest.raises(error, match=named):
            read(*words)


def test_an_empty_partition_and_one_sample(client, config, capsys):
    client.register_partition("empty", ["x"], None, [])
    read(config, "empty", "--sort", "reward", "--where", "tag > 1", "--group", "q7")
    assert capsys.readouterr().out == "empty: 0 samples\n"
    client.put_samples(["only"], "empty", tags=[{}])
    read(config, "empty")
    assert capsys.readouterr().out == "empty: 1 sample\n\nonly\n  lacks: x\n"


def test_only_what_is_shown_is_read(local, monkeypatch):
    asked = []
    get = local.get_samples

    def spy(ids, partition_id, fields, **options):
        asked.append((list(ids), sorted(fields)))
        return get(ids, partition_id, fields, **options)

    monkeypatch.setattr(local, "get_samples", spy)
    rows = Rows(local, "step-1")
    found = rows.find(where=parse_where("reward < 2"), limit=1)
    assert asked == [(["q0_g0"], ["reward"]), (["q0_g1", "q1_g0"], ["reward"])]
    del asked[:]
    rows.read(found)
    assert asked == [(["q0_g0"], ["info", "input_ids", "reward", "token_mask"])]
    del asked[:]
    (sample,) = rows.read(found, fields=["pixels"])
    assert asked == [(["q0_g0"], ["pixels"])]
    assert sample.shapes == {"pixels": "float32 of shape (5, 3, 14, 14)"}


def test_what_is_cleared_or_lost_meanwhile_is_left_out(client, local, config, capsys, monkeypatch):
    get = type(client).get_samples

    def gone_first(self, ids, partition_id, fields, **options):
        if self is local and "q0_g0" in ids:
            raise LostSamplesError.for_payload("get_samples", partition_id, [("q0_g0", fields)])
        client.clear_samples(cleared, "step-1")
        return get(self, ids, partition_id, fields, **options)

    cleared = ["q0_g1"]
    monkeypatch.setattr(type(client), "get_samples", gone_first)
    read(config, "step-1", "--json")
    out, err = capsys.readouterr()
    assert [each["sample_id"] for each in json.loads(out)["samples"]] == ["q0_g0", "q1_g0", "q1_g1"]
    assert err == "dataplane: 1 more were cleared meanwhile, or their payload is lost\n"
    rows = Rows(local, "step-1")
    assert [sample.sample_id for sample in rows.read(rows.find())] == IDS[1:]
    cleared = None
    with pytest.raises(UnknownPartitionError):
        read(config, "step-1")


def test_a_task_loses_no_sample(client, config):
    before = client.describe("step-1")
    read(config, "step-1", "--sort", "reward", "--where", "weight_version > 0")
    after = client.describe("step-1")
    assert (after.tasks, after.num_samples) == (before.tasks, before.num_samples)


def test_a_save_is_read_as_the_store_is(client, config, tmp_path, capsys):
    client.save(tmp_path / "save")
    read(config, "step-1", "--json", "--sort", "reward")
    expected = capsys.readouterr().out
    client.clear_samples(None, "step-1")
    read(str(tmp_path / "save"), "step-1", "--json", "--sort", "reward")
    assert capsys.readouterr().out == expected


# --- a sample's parts -------------------------------------------------------------------------------------------------


def decode(ids):
    return "".join(map(chr, ids))


def parts(cells, tags=None, texts=decode):
    return [(part.role, part.text) for part in sample_of("s", tags or {}, cells, decode=texts).parts]


def row(text):
    return torch.tensor(list(map(ord, text)), dtype=torch.int64)


ASK_YES = [("prompt", "ask"), ("answer", "yes")]
ASK, CHAT = [("text", "ask")], [("user", "ask"), ("tool", "[1]")]
MASKED = [("prompt", "ask"), ("answer", "A"), ("masked", "tool"), ("answer", "B"), ("masked", ".")]
#: Of a prompt and an answer that are padded, each on its side.
PADDED = {"prompts": row("..ask"), "responses": row("yes.."), "input_ids": row("..askyes..")}
PADDED |= {"attention_mask": tensor([0, 0, 1, 1, 1, 1, 1, 1, 0, 0]), "response_mask": tensor([1, 0, 1, 0, 0])}
APART = {"completion": [{"role": "assistant", "content": "yes"}], "prompt": [{"role": "user", "content": "ask"}]}
COUNTED = {"turn_roles": ["user"], "turn_contents": ["ask"]}


@pytest.mark.parametrize(
    ("cells", "expected"),
    [
        ({}, []),
        ({"input_ids": row("")}, []),
        ({"input_ids": row("ask")}, ASK),
        ({"input_ids": row("ask..."), "input_lengths": tensor([3])}, ASK),
        ({"input_ids": row("..ask."), "attention_mask": tensor([0, 0, 1, 1, 1, 0])}, ASK),
        ({"input_ids": row("askyes"), "token_mask": tensor([0, 0, 0, 1, 1, 1.0])}, ASK_YES),
        ({"input_ids": row("askAtoolB."), "token_mask": tensor([0, 0, 0, 1, 0, 0, 0, 0, 1, 0])}, MASKED),
        ({"input_ids": row("ask"), "token_mask": torch.zeros(3)}, [("prompt", "ask")]),
        # a mask of other tokens says nothing
        ({"input_ids": row("ask"), "token_mask": torch.zeros(7)}, ASK),
        ({"prompt_ids": row("ask"), "completion_ids": row("yes")}, ASK_YES),
        (PADDED, [("prompt", "ask"), ("answer", "y"), ("masked", "e"), ("answer", "s")]),
        # a conversation without tokens
        ({"messages": [{"role": "user", "content": "ask"}, {"role": "tool", "content": [1]}]}, CHAT),
        # a column of the two
        ({"prompt_ids": row("ask")}, [("prompt", "ask")]),
        ({"completion_ids": row("yes")}, [("answer", "yes")]),
        ({"input_ids": row("askyes"), "prompts": row("ask")}, [("text", "askyes")]),
        (
            {"prompt_ids": row("..ask"), "completion_ids": row("yes.."), "prompt_mask": tensor([0, 0, 1, 1, 1])},
            [("prompt", "ask"), ("answer", "yes..")],
        ),
        (APART, [("user", "ask"), ("assistant", "yes")]),
        ({"turn_contents": ["ask", "yes"]}, [("turn 1", "ask"), ("turn 2", "yes")]),
        *((COUNTED | {"turn_lengths": lengths}, [("user", "ask")]) for lengths in ([5], ["?"])),
        ({"messages": [{"role": "user", "token_ids": torch.zeros(3)}]}, [("user", "")]),
    ],
)
def test_prompt_and_answer_are_apart(cells, expected):
    assert parts(cells) == expected


def test_the_length_may_be_a_tag():
    for length, text in ((3, "ask"), (99, "ask...")):
        assert parts({"input_ids": row("ask...")}, {"input_lengths": length}) == [("text", text)]


def test_a_message_log_is_shown_turn_by_turn_with_its_tool_calls():
    calls = [{"name": "add", "arguments": {"a": 1, "b": 2}}]
    log = [
        {"role": "user", "content": "1+2?", "token_ids": row("<1+2?>")},
        {"role": "assistant", "content": {"content": "", "tool_calls": calls}, "token_ids": row("<add>")},
        {"role": "tool", "content": "3", "token_ids": row("<3>")},
        {"role": "assistant", "content": "It is 3."},
    ]
    with connect({"backend": "noop"}) as client:
        client.register_partition("p", [], None, [])
        columns = split_message_logs([log, log[:1]])
        columns["input_ids"] = stack_or_nest([row("<1+2?><add><3>."), row("<1+2?>")])
        client.put_samples(["a", "b"], "p", columns)
        rows = Rows(client)
        long, short = rows.read(rows.find(), decode=decode)
        (without, _) = rows.read(rows.find())
    assert [(part.role, part.text, part.calls) for part in long.parts] == [
        ("user", "<1+2?>", None),
        ("assistant", "<add>", {"tool_calls": calls}),
        ("tool", "<3>", None),
        ("assistant", "It is 3.", None),  # it has no tokens
        ("text", ".", None),  # tokens of no turn
    ]
    assert [(part.role, part.text) for part in short.parts] == [("user", "<1+2?>")]
    assert [part.text for part in without.parts][:3] == ["1+2?", "60 97 100 100 62", "3"]


def test_values_per_token_other_columns_and_what_is_lacking():
    cells = {
        "prompt_ids": row("ask"),
        "completion_ids": row("yes"),
        "logprobs": torch.tensor([-0.1, -2.0, math.nan]),
        "advantages": torch.tensor([0.5], dtype=torch.bfloat16),
        "weights": torch.arange(3000.0).view(30, 100),
        "grid": torch.tensor([[1, 2, 3]]),
        "answer": "yes",
        "picture": b"\x00\x01",
    }
    sample = sample_of("q17_g3", {}, cells, lacks=["reward"])
    assert sample.group == "q17"
    assert [str(number) for number in sample.per_token["logprobs"]] == ["None", "None", "None", "-0.1", "-2.0", "nan"]
    assert sample.values == {"advantages": 0.5, "answer": "yes"}
    assert sample.objects == {"grid": [[1, 2, 3]], "picture": "2 bytes"}
    assert sample.shapes == {"weights": "float32 of shape (30, 100)"}
    assert sample.lacks == ["reward"]


def test_a_long_row_without_a_tokenizer_is_shortened():
    cells = {"input_ids": torch.arange(8192), "token_mask": (torch.arange(8192) >= 4).int()}
    prompt, answer = sample_of("s", {}, cells).parts
    assert prompt.text == "0 1 2 3"
    assert answer.text.endswith(" 8190 8191 (8188 tokens)")
    assert len(answer.text) < 250


def test_images_are_written_small_or_described(client, config, tmp_path, capsys, monkeypatch):
    from PIL import Image

    file = io.BytesIO()
    Image.new("RGB", (900, 300), "red").save(file, "JPEG")
    client.register_partition("images", [], None, [])
    pixels = torch.zeros(1, 3, 40, 30, dtype=torch.uint8)
    pictures = {"photo": [file.getvalue()], "pixels": pixels, "broken": [b"\x89PNG"]}
    client.put_samples(["../a b"], "images", pictures)
    read(config, "images", "--images", str(tmp_path / "out"), "--json")
    found = json.loads(capsys.readouterr().out)["samples"][0]["images"]
    sizes = [Image.open(io.BytesIO(Path(found[name]).read_bytes())).size for name in ("photo", "pixels")]
    assert sizes == [(256, 85), (30, 40)]
    assert found["broken"] == "an image of 4 bytes"
    assert sorted(each.name for each in (tmp_path / "out").iterdir()) == [
        "0000_.._a_b.photo.png",
        "0001_.._a_b.pixels.png",
    ]
    monkeypatch.setitem(sys.modules, "PIL", None)
    read(config, "images", "--images", str(tmp_path / "none"))
    assert "  pixels: an image, uint8 of shape (3, 40, 30)\n" in capsys.readouterr().out


# --- tokenizers -------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder with a tokenizer whose ids are bytes, as those of byte-level BPE are."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({letter: number for number, letter in enumerate(letters)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<|end|>"])
    folder = tmp_path_factory.mktemp("tokenizer")
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder


def test_a_tokenizer_is_a_folder_a_file_or_a_name_in_the_cache(folder, tmp_path, monkeypatch):
    from huggingface_hub import constants
    from tokenizers import Tokenizer as Original

    ids = Original.from_file(str(folder / "tokenizer.json")).encode("Grüße 👩‍💻<|end|>").ids
    snapshot = tmp_path / "models--org--small" / "snapshots" / "0123"
    snapshot.mkdir(parents=True)
    (snapshot / "tokenizer.json").write_bytes((folder / "tokenizer.json").read_bytes())
    (tmp_path / "models--org--small" / "refs").mkdir()
    (tmp_path / "models--org--small" / "refs" / "main").write_text("0123")
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    for name in (str(folder), str(folder / "tokenizer.json"), "org/small"):
        tokenizer = Tokenizer(name)
        assert tokenizer.decode(ids) == "Grüße 👩‍💻<|end|>"
        pieces = tokenizer.pieces(ids)
        assert len(pieces) == len(ids)
        assert "".join(pieces) == "Grüße 👩‍💻<|end|>"
        assert pieces[:5] == ["G", "r", "üß", "", ""]


def test_the_space_before_a_word_is_kept(characters, tmp_path):
    (tmp_path / "characters_of_ids.py").write_text("def decode(ids):\n    return ' '.join(map(str, ids))\n")
    assert Tokenizer(characters).pieces([7, 8]) == [" 7", " 8"]


def test_a_tokenizer_that_is_none_is_refused(folder, tmp_path, characters, monkeypatch):
    (tmp_path / "broken.json").write_text('{"model": 1}')
    for name, said in {
        str(tmp_path): "the folder has no tokenizer.json",
        str(tmp_path / "broken.json"): "is no tokenizer",
        "org/none": "Nothing is downloaded",
        "no name: at all": "No module named",
        "../etc": "Nothing is downloaded",
        "characters_of_ids:none": "no attribute 'none'",
        "characters_of_ids:nothing": "it is no function",
    }.items():
        with pytest.raises(InvalidRequestError) as caught:
            Tokenizer(name)
        assert said in str(caught.value), name
    with pytest.raises(InvalidRequestError, match=r"cannot decode \[1, 2, 3, 4, 5, ...\]: KeyError: 'no such id'"):
        Tokenizer("characters_of_ids:fails").decode(range(1, 9))
    with pytest.raises(InvalidRequestError, match="returned int"):
        Tokenizer("characters_of_ids:numbers").decode([1])
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    with pytest.raises(UnsupportedOperationError, match="pip install 'dataplane-tools"):
        Tokenizer(str(folder))
