"""What `dataplane read` costs: a large store that is looked at, and pages that a Chromium opens and steps through.

Run:  python benchmarks/read.py [--rows 10000] [--tokens 8192] [--samples 2000] [--rounds 7]

The first part fills a `shm_store` with rows of token ids and a mask, sorts them by their reward, and reads the 20 that
are shown. It prints what was read of the store. The second opens a page in a real Chromium without a window, and prints
the time from the start of the navigation until a sample is shown, the median and the extremes of the rounds. The third
steps to the next sample in pages of long samples, and prints the time until it is drawn.
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
import tempfile
import time
from pathlib import Path

import torch

sys.path.append(str(Path(__file__).resolve().parents[1] / "tools" / "tests" / "engines"))
from chromium import Browser

from dataplane_core import connect
from dataplane_core.middleware import Metrics
from dataplane_tools._page import page
from dataplane_tools._rows import Rows
from dataplane_tools._sample import Sample, sample_of

#: The time at which the page shows its first sample.
_SHOWN = """new Promise((done) => {
    const look = () => document.querySelector("#sample h2") ? done(performance.now()) : requestAnimationFrame(look);
    look();
})"""


#: The time from a key until the next sample is drawn: the second frame begins after the first one is painted.
_STEP = """new Promise((done) => {
    const start = performance.now();
    document.dispatchEvent(new KeyboardEvent("keydown", {key: "j", bubbles: true}));
    requestAnimationFrame(() => requestAnimationFrame(() => done(performance.now() - start)));
})"""


def look(num_rows: int, num_tokens: int) -> None:
    """Prints what sorting all rows by their reward, and showing 20, reads of a store."""
    metrics = Metrics()
    capacity = num_rows * num_tokens * 12
    with connect({"backend": "shm_store", "options": {"capacity_bytes": capacity}, "middleware": [metrics]}) as client:
        client.register_partition("train", ["input_ids", "token_mask", "reward"], None, ["train"])
        for start in range(0, num_rows, 500):
            ids = [f"q{row // 8}_g{row % 8}" for row in range(start, min(start + 500, num_rows))]
            tokens = torch.randint(0, 50_000, (len(ids), num_tokens))
            columns = {"input_ids": tokens, "token_mask": torch.ones_like(tokens), "reward": torch.rand(len(ids))}
            client.put_samples(ids, "train", columns)
        held = client.describe("train").held_bytes
        rows = Rows(client, "train")
        start_s = time.perf_counter()
        samples = rows.read(rows.find(sort="reward", limit=20))
        passed_ms = 1000 * (time.perf_counter() - start_s)
        read = metrics.snapshot()["operations"]["get_samples"]["n_bytes"]
    print(f"{num_rows:,} rows of {num_tokens:,} tokens, {held / 1e6:,.0f} MB in the store: sorted by reward, ", end="")
    print(f"{len(samples)} shown after {passed_ms:.0f} ms, for which {read / 1e6:.2f} MB were read")


def samples_of(count: int, least: int = 150, most: int = 300) -> list[Sample]:
    """Samples in groups of 8, of so many tokens, with three columns of numbers for each token."""
    draw = random.Random(0)
    samples = []
    for number in range(count):
        length = draw.randint(least, most)
        cells = {
            "input_ids": torch.tensor([draw.randrange(97, 123) if draw.random() < 0.8 else 32 for _ in range(length)]),
            "token_mask": (torch.arange(length) >= 40).int(),
            "advantages": torch.full((length,), draw.gauss(0, 1)),
            "generation_logprobs": -(torch.rand(length) ** 3) * 5,
            "reward": torch.tensor(draw.random()),
        }
        tags = {"weight_version": number // 64}
        samples.append(sample_of(f"q{number // 8}_g{number % 8}", tags, cells, decode=_Letters().decode))
    return samples


class _Letters:
    """A tokenizer: ids are characters."""

    def decode(self, ids):
        return "".join(map(chr, ids))

    def pieces(self, ids):
        return list(map(chr, ids))


def open_page(count: int, rounds: int) -> None:
    """Prints how long a Chromium takes to open a page."""
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        file = Path(folder) / "page.html"
        file.write_text(page("benchmark", samples_of(count), _Letters()), encoding="utf-8")
        times = []
        with Browser(folder) as browser:
            for _ in range(rounds + 1):
                browser.open(file)
                times.append(browser.run(_SHOWN))
        size = file.stat().st_size / 1e6
    times = times[1:]  # the first one also starts the process of the page
    print(
        f"a page of {count:,} samples, {size:.1f} MB: shown after {statistics.median(times):.0f} ms "
        f"({min(times):.0f} to {max(times):.0f})"
    )


def step(count: int, num_tokens: int, rounds: int) -> None:
    """Prints how long a step to the next sample takes."""
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        file = Path(folder) / "page.html"
        file.write_text(page("benchmark", samples_of(count, num_tokens, num_tokens), _Letters()), encoding="utf-8")
        with Browser(folder) as browser:
            browser.open(file)
            browser.run(_SHOWN)
            times = [browser.run(_STEP) for _ in range(rounds + 1)][1:]
    print(
        f"a page of {count:,} samples of {num_tokens:,} tokens: the next one is drawn after "
        f"{statistics.median(times):.0f} ms ({min(times):.0f} to {max(times):.0f})"
    )


def main() -> None:
    """Runs the three parts."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=10_000)
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--samples", type=int, default=2000)
    parser.add_argument("--rounds", type=int, default=7)
    options = parser.parse_args()
    look(options.rows, options.tokens)
    open_page(options.samples, options.rounds)
    step(504, 4096, options.rounds)
    step(24, 32_768, options.rounds)


if __name__ == "__main__":
    main()
