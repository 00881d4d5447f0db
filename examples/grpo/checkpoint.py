"""Saves of a run. Each is a folder that exists completely or not at all.

A save is written beside its place, brought to the disk, and renamed into it: whenever the run is killed, the newest
folder under ``checkpoints`` is a whole one. It holds a manifest (``save.json``), the metrics so far, the weights of the
reference policy, a file of each policy worker (`training_state`), and what the data path keeps between steps.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from dataplane_core.durable_files import sync_path, write_file
from dataplane_integrations.errors import WorkerTimeoutError

from .config import RunConfig
from .errors import RunFailedError, UserError
from .weights import PackedWeights

__all__ = ["Checkpoints", "Save", "run_digest"]

#: Of the layout of a save; a program reads its own version only.
_FORMAT = 1
_MANIFEST = "save.json"
_METRICS = "metrics.jsonl"
_REFERENCE = "reference.npy"
#: Keys that may change when a run resumes: they affect the cost and the end of the run, not its results.
_FREE = {"ray": True, "data_plane": True, "saving": True, "data": {"file"}, "grpo": {"steps"}}


@dataclass(frozen=True)
class Save:
    """One save, checked.

    Attributes:
        folder: Where it lies.
        step: The last step that is in it.
        records: The metrics of all steps up to that.
        evaluation: Shares of exact answers before the first step.
    """

    folder: Path
    step: int
    records: list[dict[str, Any]]
    evaluation: dict[str, float]

    def reference_weights(self) -> PackedWeights:
        """The weights that the run started GRPO from, packed."""
        weights: PackedWeights = np.load(self.folder / _REFERENCE, allow_pickle=False)
        return weights


class Checkpoints:
    """The saves of one run.

    Args:
        out: The folder of the run; saves go to ``checkpoints`` in it. The driver and all policy workers must see it
            under this path: with workers on several hosts, a shared file system.
        config: Of the run. A save is only gone on with under the configuration that it was made with, but for what
            has no part in the results.

    Raises:
        UserError: The prompts cannot be read.
    """

    def __init__(self, out: Path, config: RunConfig) -> None:
        self._folder = out.resolve() / "checkpoints"
        self._keep = config.saving.keep
        self._identity = _identity(config)

    def write(
        self,
        records: Sequence[Mapping[str, Any]],
        evaluation: Mapping[str, float],
        reference: PackedWeights,
        write_state: Callable[[Path], None],
    ) -> Path:
        """Writes one save, and removes those beyond the newest ``saving.keep``.

        Args:
            records: The metrics so far; the last one says which step this is.
            evaluation: Shares of exact answers before the first step.
            reference: Weights of the reference policy.
            write_state: Writes everything else into the folder that it gets.

        Returns:
            The folder of the save.

        Raises:
            RunFailedError: The folder cannot be written. Earlier saves are as they were.
        """
        step = int(records[-1]["step"])
        place = self._folder / f"step_{step:06d}"
        unfinished = self._folder / f".{place.name}.unfinished"
        try:
            self._remove_unfinished()
            unfinished.mkdir(parents=True)
            write_state(unfinished)
            write_file(unfinished / _METRICS, [(json.dumps(record) + "\n").encode() for record in records])
            with (unfinished / _REFERENCE).open("wb") as file:
                np.save(file, reference, allow_pickle=False)
                file.flush()
                os.fsync(file.fileno())
            manifest = {
                "format": _FORMAT,
                "step": step,
                "run": self._identity,
                "evaluation": dict(evaluation),
                "files": _digests(unfinished),
            }
            write_file(unfinished / _MANIFEST, [(json.dumps(manifest, indent=2) + "\n").encode()])
            for folder in [*(path for path in unfinished.rglob("*") if path.is_dir()), unfinished]:
                sync_path(folder)
            unfinished.rename(place)
            sync_path(self._folder)
            for old in self._places()[: -self._keep]:
                self._discard(old)
        except WorkerTimeoutError:
            raise  # says what it is, although it is an OSError too
        except OSError as error:
            raise RunFailedError(
                f"the run cannot be saved to {place}: {error}. Earlier saves are untouched."
            ) from error
        return place

    def newest(self) -> Save:
        """The newest save, checked against its manifest.

        Raises:
            UserError: There is none; it is damaged, or of another format; or it was made under a configuration that
                gives other results.
        """
        places = self._places()
        if not places:
            raise UserError(
                f"--resume: {self._folder} holds no save. Give the --out of a run with --save-every N, or leave out "
                "--resume to start anew."
            )
        place = places[-1]
        try:
            manifest = json.loads((place / _MANIFEST).read_text(encoding="utf-8"))
            found = manifest.get("format") if isinstance(manifest, dict) else None
            if found != _FORMAT:
                raise UserError(
                    f"--resume: the save {place} has format {found!r}, this program reads {_FORMAT}. Go on with the "
                    "version that made it."
                )
            damaged = {name for name, digest in manifest["files"].items() if _digest(place / name) != digest}
            if damaged:
                raise UserError(
                    f"--resume: the save {place} is damaged: {', '.join(sorted(damaged))} is not what was written. "
                    "Remove that folder to go on from the save before it."
                )
            lines = (place / _METRICS).read_text(encoding="utf-8").splitlines()
        except (OSError, ValueError, KeyError) as error:
            raise UserError(
                f"--resume: the save {place} cannot be read: {error}. Remove that folder to go on from the save before "
                "it."
            ) from error
        self._check_identity(place, manifest["run"])
        return Save(place, manifest["step"], [json.loads(line) for line in lines], manifest["evaluation"])

    def exist(self) -> bool:
        """Whether there is a save."""
        return bool(self._places())

    def refuse_to_mix(self) -> None:
        """Refuses to start anew where saves lie: ``--resume`` could not tell them from this run's.

        Raises:
            UserError: There are some.
        """
        places = self._places()
        if places:
            raise UserError(
                f"{self._folder} holds saves of an earlier run, the newest is {places[-1].name}. Go on with it "
                "(--resume), give another --out, or remove that folder."
            )

    def _check_identity(self, place: Path, saved: Mapping[str, Any]) -> None:
        changed = [
            f"{key}: saved with {saved.get(key)!r}, now {self._identity.get(key)!r}"
            for key in sorted({*saved, *self._identity})
            if saved.get(key) != self._identity.get(key)
        ]
        if changed:
            raise UserError(
                f"--resume: the save {place} was made under another configuration:\n"
                + "\n".join(f"  {line}" for line in changed)
            )

    def _places(self) -> list[Path]:
        """All saves, the oldest first."""
        found = self._folder.glob("step_*") if self._folder.is_dir() else ()
        places = (path for path in found if re.fullmatch(r"step_\d+", path.name))
        return sorted(places, key=lambda path: int(path.name.removeprefix("step_")))

    def _discard(self, place: Path) -> None:
        """Removes a save; first its name, so that a half-removed one is never taken for a save."""
        doomed = place.rename(place.with_name(f".{place.name}.discarded"))
        shutil.rmtree(doomed)

    def _remove_unfinished(self) -> None:
        """Removes what a killed run left behind."""
        for pattern in (".step_*.unfinished", ".step_*.discarded"):
            for folder in self._folder.glob(pattern):
                shutil.rmtree(folder)


def _identity(config: RunConfig) -> dict[str, Any]:
    """What decides a run's results, by dotted key."""
    try:
        prompts = config.data.file.read_bytes()
    except OSError as error:
        raise UserError(f"prompts file {config.data.file} cannot be read: {error}.") from error
    flat = {"prompts sha256": hashlib.sha256(prompts).hexdigest()}
    for name, value in config.model_dump(mode="json", exclude=_FREE).items():
        if isinstance(value, dict):
            flat |= {f"{name}.{key}": item for key, item in value.items()}
        else:
            flat[name] = value
    return flat


def run_digest(config: RunConfig) -> str:
    """A name for the results of a run: two runs of equal digest have the same rows.

    Raises:
        UserError: The prompts cannot be read.
    """
    return hashlib.sha256(json.dumps(_identity(config), sort_keys=True).encode()).hexdigest()[:12]


def _digests(folder: Path) -> dict[str, str]:
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    return {str(path.relative_to(folder)): _digest(path) for path in files}


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
