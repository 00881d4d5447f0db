"""Commands that are run, configs, clients that record, and what a folder of an export holds."""

import argparse
import json
from pathlib import Path

from pyarrow import parquet


def run(command, *words):
    """Runs a command of `dataplane_tools.commands`. Returns its status; its errors are raised."""
    parser = argparse.ArgumentParser()
    return command(parser)(parser.parse_args([str(word) for word in words]))


def recording(folder, payload="all", **options):
    """The config of a client that records."""
    return {"backend": "noop", "middleware": [{"recorder": {"folder": str(folder), "payload": payload, **options}}]}


def config_in(folder, **config):
    """The path of a config. Its backend is shm_store, unless it says another."""
    path = folder / "config.json"
    path.write_text(json.dumps({"backend": "shm_store", **config}))
    return str(path)


def rows(folder):
    """The rows of all shards of an export, in order."""
    paths = sorted(Path(folder).glob("*.parquet"))
    return [row for path in paths for row in parquet.read_table(path).to_pylist()]


def changed(path, **values):
    """Changes values of a manifest."""
    path.write_text(json.dumps(json.loads(path.read_text()) | values))
