"""`DataPlaneConfig`: backend name, options, middleware and limits, read from a dict, YAML or OmegaConf."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from decimal import Decimal
from pathlib import Path
from typing import Annotated, Any, Final, TypeAlias, TypeVar

import yaml
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

from dataplane_core.entry_points import find_plugins, nearest
from dataplane_core.errors import ConfigError

M = TypeVar("M", bound=BaseModel)

_SIZE: Final = re.compile(r"\s*(\d+(?:\.\d+)?(?:e\d{1,2})?)\s*(?:([kmgtp])(i?))?b?\s*", re.IGNORECASE | re.ASCII)


def size_bytes(value: Any) -> Any:
    """A size with a unit, such as ``1.5GB`` (1000 each) or ``512 MiB`` (1024 each), in bytes. No text: as it is."""
    if not isinstance(value, str):
        return value
    match = _SIZE.fullmatch(value)
    if match is None:
        raise ValueError("expected a number of bytes, or a size with a unit such as '1.5GB' or '512MiB'")
    number, unit, binary = match.groups()
    power = 0 if unit is None else "kmgtp".index(unit.lower()) + 1
    return int(Decimal(number) * (1024 if binary else 1000) ** power)


#: The type of every option that is a size: a number of bytes, or a text with a unit, see `size_bytes`.
SizeBytes: TypeAlias = Annotated[int, BeforeValidator(size_bytes)]
_NoneOrMore: TypeAlias = Annotated[SizeBytes, Field(ge=0)]


class DataPlaneConfig(BaseModel):
    """What `connect` needs.

    Attributes:
        backend: Entry-point name of the backend.
        options: The backend's own options, checked by its ``Config``. Not printed, since they may hold secrets.
        num_ledgers: Over how many stores of the backend the partitions are spread. Each has a ledger of its own, and
            all options are those of one store, also ``capacity_bytes``. Every client of them needs the same number.
        middleware: Outermost first. Each is a name, ``{name: options}``, or (in code) an object.
        op_timeout_s: Timeout of one operation in seconds. A blocking claim has its own.
        attach_wait_s: Seconds, within ``op_timeout_s``, that ``connect(config, bootstrap=False)`` waits for an owner
            that has not started yet. 0: it does not wait.
        open_partitions: Whether a put or a claim may name a partition or a task that is not registered. The first one
            then registers it, as ``if_exists="keep"`` does: a put its fields, a claim its task.
        strict_fields: Whether a put of a field that is not registered, and a claim of one that is neither registered
            nor written, is an error. If not, each such name is logged once, with the nearest one. A partition that was
            registered without fields takes all.
        narrow: Whether a put sends and stores integers in the narrowest dtype that holds them. Reads give the dtype
            that was put. For all fields, or field -> bool; a field that is not named is narrowed.
        share_above: Equal cells of a column are stored and moved once if its cells have at least so many bytes on
            average. None: they are not looked at. For all fields, or field -> size; a field that is not named has the
            default.
        read_cache_bytes: How many bytes of such cells a client keeps, so that it need not fetch them again, where the
            engine's bytes come over a wire. 0: none.
        allow_pickle: Lets object columns hold items outside the closed set. These are pickled.
        role: What this process does, for `DataPlaneClient.list_clients`. None: the name of its program.
        announce_s: Seconds between two announcements of a client (capability ``clients``). None: it does not announce
            itself.
        warn_after_s: Seconds after which a claim that waits logs why, and again each time that it has waited twice as
            long. A task that might be merely slow counts as starved after five times as long. None: it logs nothing,
            and counts with 60 s.
    """

    model_config = ConfigDict(extra="forbid", arbitrary_types_allowed=True, hide_input_in_errors=True)

    backend: str = Field(min_length=1)
    options: dict[str, Any] = Field(default_factory=dict, repr=False)
    num_ledgers: int = Field(default=1, ge=1, le=1024)
    middleware: list[Any] = Field(default_factory=list)
    op_timeout_s: float = Field(default=60.0, gt=0, allow_inf_nan=False)
    attach_wait_s: float = Field(default=10.0, ge=0, allow_inf_nan=False)
    open_partitions: bool = False
    strict_fields: bool = False
    narrow: bool | dict[str, bool] = True
    share_above: _NoneOrMore | dict[str, _NoneOrMore | None] | None = 64 << 10
    read_cache_bytes: _NoneOrMore = 256 << 20
    allow_pickle: bool = False
    role: str | None = Field(default=None, min_length=1)
    announce_s: float | None = Field(default=5.0, gt=0, allow_inf_nan=False)
    warn_after_s: float | None = Field(default=60.0, gt=0, allow_inf_nan=False)


#: What `load_config` reads: also an OmegaConf ``DictConfig``.
ConfigSource: TypeAlias = DataPlaneConfig | Mapping[str, Any] | str | os.PathLike[str] | Any


def load_config(source: ConfigSource) -> DataPlaneConfig:
    """Reads a config: a `DataPlaneConfig`, a dict, an OmegaConf ``DictConfig``, or the path of a YAML file.

    Raises:
        ConfigError: The file is missing or not YAML, a key is unknown, or a value is wrong.
    """
    if isinstance(source, DataPlaneConfig):
        return source
    label = "config"
    values: Any = source
    if isinstance(source, (str, os.PathLike)):
        path = Path(source)
        label = f"config file '{path}'"
        try:
            values = yaml.safe_load(path.read_bytes().decode())
        except OSError as error:
            message = f"{label} cannot be read: {error.strerror or error}."
            raise ConfigError(message, hint=_config_hint(str(source))) from error
        except (yaml.YAMLError, ValueError) as error:
            raise ConfigError(f"{label} is not valid YAML: {yaml_problem(error)}.") from None
    elif type(source).__module__.partition(".")[0] == "omegaconf":
        from omegaconf import OmegaConf
        from omegaconf.errors import OmegaConfBaseException

        try:
            values = OmegaConf.to_container(source, resolve=True)
        except OmegaConfBaseException as error:
            raise ConfigError(f"{label} cannot be resolved: {str(error).splitlines()[0]}.") from error
    if not isinstance(values, Mapping):
        message = f"{label} must be a mapping with the key 'backend', got {type(values).__name__}."
        raise ConfigError(message, hint=_config_hint())
    try:
        return validate_model(DataPlaneConfig, values, label)
    except ConfigError as error:
        if "backend" not in values:
            error.hint = _config_hint()
        raise


def _config_hint(name: str = "") -> str:
    """The hint where no usable config was given: what a config is, and which backends are installed."""
    installed = list(dict.fromkeys(record.name for record in find_plugins()))
    meant = nearest(name, installed) or ("noop" if "noop" in installed else next(iter(installed), "noop"))
    return (
        f"A config is a dict such as {{'backend': '{meant}'}}, an OmegaConf config, a DataPlaneConfig, or the path of "
        f"a YAML file. Installed backends: {', '.join(installed) or 'none'}."
    )


def yaml_problem(error: yaml.YAMLError | ValueError) -> str:
    """What is wrong with a YAML text, and where. Does not quote the text, which may hold secrets."""
    mark = getattr(error, "problem_mark", None)
    problem = getattr(error, "problem", None) or getattr(error, "reason", None) or "a value is not what its tag says"
    words = re.split(r""" ['"]""", problem)[0]  # what follows may quote the text
    return words if mark is None else f"{words} (line {mark.line + 1}, column {mark.column + 1})"


def validate_model(model: type[M], values: Mapping[str, Any], label: str) -> M:
    """Validates a mapping, turning pydantic's report into a `ConfigError` that names every wrong key, and the nearest
    known ones. ``label`` is what is being read."""
    try:
        return model.model_validate(dict(values))
    except ValidationError as error:
        problems: list[str] = []
        for item in error.errors():
            # without the type, such as `dict[str,int]`, that was tried of those that the key may have
            where = ".".join(part for part in map(str, item["loc"]) if not part.endswith("]"))
            if item["type"] == "extra_forbidden":
                problems.append(f"unknown key '{where}'{_advice(model, item['loc'])}")
            elif item["type"] == "missing":
                problems.append(f"key '{where}' is missing")
            else:
                # no input value here: it may be a secret
                message = item["msg"].removeprefix("Value error, ")
                problems.append(f"key '{where}': {message}" if where else message or "the options do not fit together")
        said = "; ".join(problems)
        end = "" if said[-1] in ".?" else "."
        raise ConfigError(f"{label} {'are' if label.startswith('options') else 'is'} refused: {said}{end}") from None


def _advice(model: Any, place: tuple[int | str, ...]) -> str:
    """What to write in place of an unknown key, which may be in a section of the model."""
    try:
        for section in place[:-1]:
            model = model.model_fields[section].annotation
        keys = list(model.model_fields)
    except (AttributeError, KeyError):  # in a list, say
        return ""
    near = nearest(str(place[-1]), keys)
    return f"; did you mean '{near}'?" if near else f"; known keys: {', '.join(keys) or 'none'}."
