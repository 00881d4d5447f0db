"""`dataplane read`: what the model wrote, as text, as JSON or as a page. It claims nothing and changes nothing.

A page is one file with its data, its script and its styles. It loads nothing. What a model wrote is data in it, never
markup: JSON whose ``<`` is escaped, in elements that no browser runs, and the script makes text nodes of it. The page's
own policy allows this script only, and no request.
"""

from __future__ import annotations

import argparse
import base64
import hashlib
import html
import json
import math
import re
import sys
import zlib
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from functools import partial
from importlib.resources import files
from itertools import takewhile
from pathlib import Path
from typing import Any, Final

from dataplane_core.errors import DataPlaneError, InvalidRequestError, printable
from dataplane_tools._rows import Found, Rows, opened
from dataplane_tools._sample import TEXT_FIELDS, Part, Sample, describe_image, json_value, thumbnail
from dataplane_tools._tokenizer import Tokenizer
from dataplane_tools._where import parse_where

#: Samples that are shown unless told otherwise: as text, and on a page.
_LIMIT, _LIMIT_OF_PAGE = 20, 2000
#: A longer text, or a longer value, gets lines of its own.
_MOST_INLINE: Final = 90


def run(chosen: argparse.Namespace) -> int:
    """Shows samples of a running store, of a save or of a recording."""
    limit, path, images = chosen.limit, chosen.html, chosen.images
    if limit is not None and limit < 1:
        raise InvalidRequestError(f"read refused: --limit {limit}. Expected a number of 1 or more.")
    where = None if chosen.where is None else parse_where(chosen.where)
    texts = None if chosen.tokenizer is None else Tokenizer(chosen.tokenizer)
    most = limit or (_LIMIT if path is None else _LIMIT_OF_PAGE)
    with opened(chosen.config, chosen.partition) as client:
        rows = Rows(client, chosen.partition)
        found = rows.find(where=where, sort=chosen.sort, descending=chosen.descending, group=chosen.group, limit=most)
        samples = rows.read(found, fields=chosen.fields, decode=None if texts is None else texts.decode)
    if gone := len(found.tags) - len(samples):
        print(f"dataplane: {gone} more were cleared meanwhile, or their payload is lost", file=sys.stderr)
    of = f" of {found.num_samples}" if len(samples) != found.num_samples else ""
    what = f"{rows.partition_id}: {len(samples)}{of} {'sample' if found.num_samples == 1 else 'samples'}"
    if found.num_matching not in (len(found.tags), found.num_samples):
        what += f"; {found.num_matching} match"
    try:
        paths = {} if images is None else _write_images(Path(images), samples)
        if path is not None:
            Path(path).write_text(_page_of(what, samples, texts), encoding="utf-8")
            print(printable(f"{path}: {what}"))
            return 0
    except OSError as error:
        raise DataPlaneError(f"read cannot write '{error.filename}': {error.strerror}.") from error
    if chosen.json:
        print(json.dumps(_report(rows.partition_id, found, samples, paths)))
    else:
        print("\n".join(printable(line) for line in _lines(what, samples, paths, shared=chosen.group is not None)))
    return 0


def _write_images(folder: Path, samples: Sequence[Sample]) -> dict[tuple[str, str], str]:
    """Writes pictures. Returns their paths by sample and field."""
    folder.mkdir(parents=True, exist_ok=True)
    paths: dict[tuple[str, str], str] = {}
    for sample in samples:
        for name, cell in sample.images.items():
            if (picture := thumbnail(cell)) is not None:
                safe = re.sub(r"[^\w.-]", "_", f"{sample.sample_id}.{name}")[:100]
                path = folder / f"{len(paths):04}_{safe}.png"
                path.write_bytes(picture)
                paths[sample.sample_id, name] = str(path)
    return paths


def _report(
    partition_id: str, found: Found, samples: Sequence[Sample], paths: Mapping[tuple[str, str], str]
) -> dict[str, Any]:
    rows = []
    for sample in samples:
        images = {name: _image_text(sample, name, paths) for name in sample.images}
        rows.append(json_value(asdict(replace(sample, images=images))))
    counts = {"num_samples": found.num_samples, "num_matching": found.num_matching}
    return {"partition_id": partition_id, **counts, "samples": rows}


# --- as text ----------------------------------------------------------------------------------------------------------


def _lines(
    what: str, samples: Sequence[Sample], paths: Mapping[tuple[str, str], str], *, shared: bool
) -> Iterator[str]:
    """The lines of all samples. ``shared``: what all begin with is shown once, above them."""
    yield what
    common = 0
    if shared and len(samples) > 1:
        columns = zip(*(map(partial(_said, sample), sample.parts) for sample in samples), strict=False)
        alike = [len(set(parts)) == 1 for parts in columns]
        common = min(len(list(takewhile(bool, alike))), *(len(sample.parts) - 1 for sample in samples))
        yield ""
        for part in samples[0].parts[: max(common, 0)]:
            yield from _part_lines(part)
    for sample in samples:
        yield ""
        yield from lines_of(sample, paths, max(common, 0))


def lines_of(sample: Sample, paths: Mapping[tuple[str, str], str], skipped: int = 0) -> Iterator[str]:
    """The lines of a sample, without its first ``skipped`` parts. ``paths``: the pictures of it that were written."""
    yield sample.sample_id
    single = {**sample.values, **sample.tags}
    inline = {name: text for name, value in single.items() if len(text := _value_text(value)) <= _MOST_INLINE}
    by_role: Counter[str] = Counter()
    for part in sample.parts:
        by_role[part.role] += part.stop - part.start
    counts = [f"{role} {num_tokens}" for role, num_tokens in by_role.items()]
    facts = [f"{name} {text}" for name, text in inline.items()]
    if sample.tokens:
        plural = "" if len(sample.tokens) == 1 else "s"
        facts.append(f"{len(sample.tokens)} token{plural}" + (f" ({', '.join(counts)})" if len(counts) > 1 else ""))
    if facts:
        yield "  " + "  ".join(facts)
    for part in sample.parts[skipped:]:
        yield from _part_lines(part)
    for name in single.keys() - inline.keys():
        yield from _block(name, str(single[name]))
    written = [part for part in sample.parts if part.role != "prompt" and part.stop > part.start] or sample.parts
    places = [place for part in written for place in range(part.start, part.stop)]
    for name, numbers in sample.per_token.items():
        if name not in TEXT_FIELDS:  # the parts say what a mask says
            yield from _block(name, _numbers_text([numbers[place] for place in places]))
    for name, value in sample.objects.items():
        yield from _block(name, json.dumps(value, ensure_ascii=False))
    for name, text in sample.shapes.items():
        yield from _block(name, text)
    for name in sample.images:
        yield from _block(name, _image_text(sample, name, paths))
    if sample.lacks:
        yield f"  lacks: {', '.join(sample.lacks)}"


def _said(sample: Sample, part: Part) -> tuple[Any, ...]:
    """All that a part says, to compare it."""
    return part.role, part.text, json.dumps(part.calls), tuple(sample.tokens[part.start : part.stop])


def _part_lines(part: Part) -> Iterator[str]:
    yield from _block(part.role, part.text)
    if part.calls is not None:
        yield from _block(f"{part.role}, further", json.dumps(part.calls, ensure_ascii=False))


def _block(name: str, text: str) -> Iterator[str]:
    lines = text.split("\n")
    if len(lines) == 1 and len(text) <= _MOST_INLINE:
        yield f"  {name}: {text}"
        return
    yield f"  {name}:"
    yield from (f"    {line}" for line in lines)


def _value_text(value: Any) -> str:
    return f"{value:.6g}" if isinstance(value, float) else str(value)


def _numbers_text(numbers: Sequence[Any]) -> str:
    there = [number for number in numbers if number is not None and number == number]
    odd = f", {nans} of them nan" if (nans := sum(number != number for number in numbers)) else ""
    if not there:
        return f"{len(numbers)} tokens{odd}"
    low, high = min(there), max(there)
    text = f"{low:.4g}" if low == high else f"{low:.4g} to {high:.4g}, mean {sum(there) / len(there):.4g},"
    return f"{text} for {len(there) + nans} tokens{odd}"


def _image_text(sample: Sample, name: str, paths: Mapping[tuple[str, str], str]) -> str:
    return paths.get((sample.sample_id, name)) or describe_image(sample.images[name])


# --- as a page --------------------------------------------------------------------------------------------------------


_PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>{title}</title>
<meta http-equiv="Content-Security-Policy"
 content="default-src 'none'; style-src 'unsafe-inline'; img-src data:; script-src 'sha256-{digest}'">
<style>{style}</style></head>
<body><header><h1>{title}</h1><input id="search" type="search" placeholder="search" aria-label="search">
<span id="count"></span><label>color by <select id="color"></select></label></header>
<div id="table" tabindex="0"><div id="head" class="row"></div><div id="space"></div></div>
<article id="sample"></article>
<footer>j k: next, previous · h l: in the group · enter: read, escape: back · /: search · c: color</footer>
<script id="rows" type="application/json">{rows}</script>
<script id="tokens" type="text/plain">{tokens}</script>
<script>{script}</script></body></html>
"""


def _page_of(title: str, samples: Sequence[Sample], tokenizer: Tokenizer | None) -> str:
    """The page of samples, as HTML."""
    script, style = ((files("dataplane_tools") / "page" / name).read_text("utf-8") for name in ("page.js", "page.css"))
    rows = [asdict(replace(sample, images=_pictures(sample), tokens=[], per_token={})) for sample in samples]
    tokens = dict.fromkeys(name for sample in samples for name in sample.per_token)
    data = {"tokens": list(tokens), "rows": rows}
    return _PAGE.format(
        title=html.escape(printable(title)),
        digest=base64.b64encode(hashlib.sha256(script.encode()).digest()).decode(),
        style=style,
        script=script,
        rows=_text(json_value(data, exact_ints=True)),
        tokens="\n".join(_packed(sample, tokenizer) for sample in samples),
    )


def _pictures(sample: Sample) -> dict[str, str]:
    """The images of a sample, each as the address of a small one that the page holds, or in words."""
    pictures = {name: (cell, thumbnail(cell)) for name, cell in sample.images.items()}
    return {
        name: describe_image(cell) if picture is None else f"data:image/png;base64,{base64.b64encode(picture).decode()}"
        for name, (cell, picture) in pictures.items()
    }


def _packed(sample: Sample, tokenizer: Tokenizer | None) -> str:
    """The tokens of a sample with their numbers. They are most of a page, and a browser shows those of one sample."""
    pieces = [f"{token} " for token in sample.tokens] if tokenizer is None else tokenizer.pieces(sample.tokens)
    per_token = {name: list(map(_short, numbers)) for name, numbers in sample.per_token.items()}
    packed = zlib.compress(_text({"pieces": pieces, "per_token": per_token}).encode())
    return base64.b64encode(packed).decode()


def _short(number: Any) -> Any:
    if not isinstance(number, float):
        return int(number) if isinstance(number, bool) else number  # the colors of true and false
    return float(f"{number:.4g}") if math.isfinite(number) else str(number)


def _text(value: Any) -> str:
    """A value as JSON that is safe inside of an element."""
    return json.dumps(value, separators=(",", ":")).replace("<", "\\u003c")
