"""A run that is started again: which of its rollouts the store still holds, and how many that was in all.

It needs a store that outlives the processes, and ids that follow from the step and the prompt.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from dataplane_core.client import DataPlaneClient
from dataplane_core.errors import UnknownPartitionError
from dataplane_core.ledger import group_of
from dataplane_integrations.rollout.first_write import mint_sample_ids


def missing_groups(client: DataPlaneClient, partition_id: str, uids: Sequence[str], group_size: int) -> list[str]:
    """The prompts that must be generated: those of which not all generations are committed. Blocks for one request.

    Args:
        client: A client of this process.
        partition_id: The partition of the rows. If nobody has registered it, nothing is committed.
        uids: One per prompt, as `mint_sample_ids` takes them.
        group_size: Generations per prompt.

    Returns:
        Their uids, in the order given.

    Raises:
        InvalidRequestError: As `mint_sample_ids`.

    Examples:
        >>> client = connect({"backend": "noop"})
        >>> client.register_partition("step-7", ["input_ids"], None, ["train"])
        >>> _ = client.put_samples(["p0_g0", "p0_g1", "p1_g0"], "step-7", {"input_ids": [[5], [6, 7], [8]]})
        >>> missing_groups(client, "step-7", ["p0", "p1", "p2"], 2)
        ['p1', 'p2']
    """
    wanted = mint_sample_ids(uids, group_size)
    try:
        there = Counter(map(group_of, client.list_samples(partition_id, sample_ids=wanted).sample_ids))
    except UnknownPartitionError:
        there = Counter()
    return [uid for uid in uids if there[uid] < group_size]


class FoundRollouts:
    """Counts, over all starts of a run, the rollouts that a start found committed. ``str()`` gives the share.

    Args:
        path: A file, which gets a line for each step that a start begins again. Its folder exists.

    Examples:
        >>> found = FoundRollouts(tmp_path / "found.jsonl")
        >>> found.add(step=7, wanted=256, found=224)
        >>> print(FoundRollouts(tmp_path / "found.jsonl"))
        224 of 256 rollouts of interrupted steps were found committed: 88 % of generation saved
    """

    def __init__(self, path: Path) -> None:
        self._path = path

    def add(self, step: int, wanted: int, found: int) -> None:
        """Notes how many of the rollouts of a step were there when it was begun again.

        Raises:
            OSError: The file cannot be written.
        """
        with self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps({"step": step, "wanted": wanted, "found": found}) + "\n")

    def __str__(self) -> str:
        lines = self._path.read_text(encoding="utf-8").splitlines() if self._path.exists() else []
        steps = [json.loads(line) for line in lines]
        wanted, found = (sum(step[name] for step in steps) for name in ("wanted", "found"))
        if not wanted:
            return "no step was interrupted"
        return (
            f"{found:,} of {wanted:,} rollouts of interrupted steps were found committed: {found / wanted:.0%} of "
            "generation saved"
        ).replace("%", " %")
