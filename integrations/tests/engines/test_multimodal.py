"""Pixel values and image grids: from the rollout's first write through shards, and back as they went."""

import pytest
import torch
from bits import bits
from tiers import in_long

from dataplane_core import connect, kv_first_write, read_columns, shard_meta_for_dp
from dataplane_core.batch import BatchedDataDict, stack_or_nest
from dataplane_core.schema import GLOBAL_FORWARD_PAD_SEQLEN

IDS = [f"q{row // 2}_g{row % 2}" for row in range(8)]
LENGTHS = [6, 3, 8, 5, 7, 2, 4, 4]
#: Per sample the (height, width) in patches of its images; two samples have text only.
IMAGES = [[(2, 3)], [], [(1, 4), (2, 2)], [(3, 1)], [(2, 3)], [], [(1, 1), (1, 2), (2, 2)], [(2, 4)]]
CHANNELS, SIDE = 3, 2
KEYS = {"input_key": "input_ids", "input_lengths_key": "input_lengths"}


def rollout():
    generator = torch.Generator().manual_seed(5)
    inside = torch.arange(max(LENGTHS)) < torch.tensor(LENGTHS)[:, None]
    grids = [torch.tensor([(1, *image) for image in images], dtype=torch.int64).reshape(-1, 3) for images in IMAGES]
    pixels = [torch.randn(int(grid.prod(-1).sum()), CHANNELS, SIDE, SIDE, generator=generator) for grid in grids]
    return BatchedDataDict(
        input_ids=torch.randint(1, 99, inside.shape, generator=generator) * inside,
        input_lengths=torch.tensor(LENGTHS),
        token_mask=inside.float(),
        pixel_values=stack_or_nest([each.to(torch.bfloat16) for each in pixels]),
        image_grid_thw=stack_or_nest(grids),
        captions=[[f"caption {row}"] * len(images) for row, images in enumerate(IMAGES)],
    )


def test_a_worker_can_name_further_ragged_fields(toy_worker, client):
    class Worker(toy_worker):
        ragged_fields = frozenset({"audio_frames"})

    frames = [torch.full((length, 4), 1.0) for length in (3, 1)]  # as many frames as tokens, by chance
    client.register_partition("train", ["input_ids"], None, ["train"])
    batch = {
        "input_ids": torch.tensor([[1, 2, 3], [4, 0, 0]]),
        "input_lengths": torch.tensor([3, 1]),
        "audio_frames": torch.nested.as_nested_tensor(frames, layout=torch.jagged),
    }
    meta = kv_first_write(batch, sample_ids=["a", "b"], dp_client=client, partition_id="train")
    meta.extra_info[GLOBAL_FORWARD_PAD_SEQLEN] = 8
    for kind, is_ragged in ((Worker, True), (toy_worker, False)):
        worker = kind()
        worker.setup_data_plane(client)
        fetched = worker._fetch(meta)
        assert fetched["input_ids"].shape == (2, 8)
        assert fetched["audio_frames"].is_nested == is_ragged


@pytest.mark.timeout(600)
@pytest.mark.parametrize("backend", ["noop", "shm_store", "redis_store", *in_long("tq_simple", "tq_mooncake")])
@pytest.mark.parametrize("text_first", [True, False], ids=["text first", "images first"])
def test_samples_of_text_only_go_beside_those_with_images(config_of, backend, text_first):
    went = rollout()
    texts, images = [1, 5], [0, 2, 3, 4, 6, 7]
    media = ("pixel_values", "image_grid_thw")
    names = ["input_ids", "input_lengths", *media]
    with connect(config_of(backend)) as client:
        client.register_partition("train", names[:2], None, ["train"])
        for rows in (texts, images) if text_first else (images, texts):
            batch = {name: went[name][rows] for name in names[:2]}
            for name in media:
                cells = [went[name].unbind()[row] for row in rows]
                batch[name] = stack_or_nest([cell if len(cell) else None for cell in cells])  # of text: empty lists
            ids, tags = [IDS[row] for row in rows], [{"input_lengths": LENGTHS[row]} for row in rows]
            kv_first_write(batch, sample_ids=ids, dp_client=client, partition_id="train", tags=tags)
        claimed = client.claim_meta("train", "train", names, len(IDS))
        limits = {"max_tokens_per_microbatch": 10, "sequence_length_pad_multiple": 1}
        packing = {"algorithm": "modified_first_fit_decreasing", **KEYS, **limits}
        shards, _ = shard_meta_for_dp(claimed, dp_world=2, sequence_packing_args=packing)
        joined = BatchedDataDict.from_batches([read_columns(client, shard) for shard in shards])
        alone = read_columns(client, claimed.subset([claimed.sample_ids.index(IDS[row]) for row in texts]))
    order = [IDS.index(sample_id) for shard in shards for sample_id in shard.sample_ids]
    assert sorted(order) == list(range(len(IDS)))
    for name in media:
        cells = went[name].unbind()
        assert [bits(found) for found in joined[name].unbind()] == [bits(cells[row]) for row in order]
        assert [(each.dtype, each.shape) for each in alone[name].unbind()] == [
            (went[name].dtype, (0, *went[name].shape[2:]))
        ] * len(texts)
