"""Rows that are gone are squeezed out of an extent, and the rest keeps its bytes."""

import numpy as np
from hypothesis import given, strategies as st

from dataplane_core.hosting.extents import Layout, offsets_at, squeeze


@st.composite
def puts(draw):
    num_rows = draw(st.integers(1, 12))
    columns = []
    for _ in range(draw(st.integers(1, 4))):
        step = draw(st.sampled_from([1, 4, 8, 200]))
        lengths = draw(st.none() | st.lists(st.integers(0, 40), min_size=num_rows, max_size=num_rows))
        columns.append((step, lengths))
    kept = draw(st.lists(st.integers(0, num_rows - 1), unique=True, min_size=1))
    return num_rows, columns, sorted(kept)


@given(puts())
def test_what_is_kept_keeps_its_bytes(put):
    num_rows, columns, kept = put
    draw = np.random.default_rng(0)
    layout, cells = Layout([]), []
    for step, lengths in columns:
        if lengths is None:
            layout.add_dense(num_rows, step)
            cells.append([draw.bytes(step) for _ in range(num_rows)])
        else:
            layout.add_ragged(num_rows, sum(lengths), step)
            cells.append([draw.bytes(step * length) for length in lengths])
    extent = np.full(layout.size_bytes + 10, 99, np.uint8)
    for column, (_, lengths), rows in zip(layout.columns, columns, cells, strict=True):
        if lengths is not None:
            offsets_at(extent, column, num_rows)[:] = np.cumsum([0, *lengths])
        data = np.frombuffer(b"".join(rows), np.uint8)
        extent[column.start : column.start + len(data)] = data

    squeezed = squeeze(extent, layout, num_rows, kept)

    assert squeezed.size_bytes <= layout.size_bytes
    assert (extent[layout.size_bytes :] == 99).all()
    for column, (step, lengths), rows in zip(squeezed.columns, columns, cells, strict=True):
        cuts = np.arange(len(kept) + 1) if lengths is None else offsets_at(extent, column, len(kept))
        for index, row in enumerate(kept):
            begin, end = (column.start + cuts[index : index + 2] * step).tolist()
            assert extent[begin:end].tobytes() == rows[row]
            assert column.start % 16 == 0
