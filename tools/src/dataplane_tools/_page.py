"""The page of `dataplane read --html`: one file with its data, its script and its styles. It loads nothing.

What a model wrote is data in it, never markup: JSON whose ``<`` is escaped, in elements that no browser runs, and the
script makes text nodes of it. The page's own policy allows this script only, and no request.
"""

from __future__ import annotations

import base64
import hashlib
import html
import json
import math
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from importlib.resources import files
from typing import Any

from dataplane_core.errors import printable
from dataplane_tools._images import describe_image, thumbnail
from dataplane_tools._sample import Sample, json_value
from dataplane_tools._tokenizer import Tokenizer

#: Names of the page's own columns. A field with one of these names shows as ``text (field)``, a tag as ``text (tag)``.
_OWN = ("id", "text")

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


def page(title: str, samples: Sequence[Sample], tokenizer: Tokenizer | None) -> str:
    """The page of samples, as HTML."""
    script, style = ((files("dataplane_tools") / "page" / name).read_text("utf-8") for name in ("page.js", "page.css"))
    rows = [_row(sample) for sample in samples]
    names = dict.fromkeys(name for row in rows for name in row["values"])
    # what all samples have alike is shown with each, and is no column
    columns = [name for name in names if len(rows) == 1 or len({row["values"].get(name) for row in rows}) > 1]
    tokens = dict.fromkeys(name for sample in samples for name in sample.per_token)
    data = {"columns": columns, "tokens": list(tokens), "rows": rows}
    return _PAGE.format(
        title=html.escape(printable(title)),
        digest=base64.b64encode(hashlib.sha256(script.encode()).digest()).decode(),
        style=style,
        script=script,
        rows=_text(json_value(data, exact_ints=True)),
        tokens="\n".join(_packed(sample, tokenizer) for sample in samples),
    )


def _named(values: Mapping[str, Any], kind: str) -> dict[str, Any]:
    return {f"{name} ({kind})" if name in _OWN else name: value for name, value in values.items()}


def _row(sample: Sample) -> dict[str, Any]:
    pictures = {name: thumbnail(cell) for name, cell in sample.images.items()}
    shapes = {name: describe_image(sample.images[name]) for name, picture in pictures.items() if picture is None}
    return {
        "id": sample.sample_id,
        "group": sample.group,
        "values": {**_named(sample.values, "field"), **_named(sample.tags, "tag")},
        "parts": [asdict(part) for part in sample.parts],
        "objects": sample.objects,
        "shapes": {**sample.shapes, **shapes},
        "images": {
            name: f"data:image/png;base64,{base64.b64encode(picture).decode()}"
            for name, picture in pictures.items()
            if picture is not None
        },
        "lacks": list(sample.lacks),
    }


def _packed(sample: Sample, tokenizer: Tokenizer | None) -> str:
    """The tokens of a sample with their numbers. They are most of a page, and a browser shows those of one sample."""
    pieces = [f"{each} " for each in sample.tokens] if tokenizer is None else tokenizer.pieces(sample.tokens)
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
