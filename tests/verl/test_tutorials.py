"""TransferQueue's own tutorials and tests of its metadata, with one line changed: the import.

``TRANSFER_QUEUE_CHECKOUT`` names a checkout of TransferQueue. Without it they are not run.
"""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.timeout(400)

CHECKOUT = Path(os.environ["TRANSFER_QUEUE_CHECKOUT"])
TUTORIALS = sorted(path.name for path in CHECKOUT.glob("tutorial/*.py"))


def moved(source, folder):
    """A copy that imports our module in the place of TransferQueue."""
    text = (CHECKOUT / source).read_text()
    text = re.sub(r"^import transfer_queue as tq", "import dataplane_compat.transfer_queue as tq", text, flags=re.M)
    text = re.sub(r"^from transfer_queue", "from dataplane_compat.transfer_queue", text, flags=re.M)
    assert text.count("dataplane_compat") >= 1
    path = folder / Path(source).name
    path.write_text(text)
    return path


@pytest.mark.parametrize("backend", ["shm_store", "redis_store", "tq_simple"])
@pytest.mark.parametrize("name", TUTORIALS)
def test_tutorial(name, backend, tmp_path):
    config = tmp_path / "config.yaml"
    config.write_text(f"backend: {backend}\n")
    ran = subprocess.run(
        [sys.executable, "-W", "ignore", moved(f"tutorial/{name}", tmp_path)],
        env=os.environ | {"DATAPLANE_CONFIG": str(config)},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert ran.returncode == 0, ran.stdout[-3000:] + ran.stderr[-3000:]
    got = {}
    for worker, rank, ids in re.findall(r"Worker@(\d)\]: dp_rank (\d) retrieved samples: (\[.*?\])", ran.stdout):
        got.setdefault(rank, {}).setdefault(worker, []).append(ids)
    for workers in got.values():  # those of the streaming tutorial: processes of a rank got the same rows
        first, second = (sorted(ids) for ids in workers.values())
        assert first == second


@pytest.mark.parametrize("name", ["tests/test_metadata.py"])
def test_their_tests(name, tmp_path):
    ran = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-W", "ignore", "-p", "no:cacheprovider", moved(name, tmp_path)],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert ran.returncode == 0, ran.stdout[-3000:]
