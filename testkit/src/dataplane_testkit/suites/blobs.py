"""The methods of a `BlobStore` called directly: what its docstrings ask of `put`, `get` and `delete`.

Core builds everything else of a `BlobStore` on these methods. A fault in one of them can make any other test fail.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any, Final

import pytest

from dataplane_core.backends import BlobStore
from dataplane_core.errors import preview
from dataplane_testkit import _workers
from dataplane_testkit._base import Suite
from dataplane_testkit._blobs import new_keys, of_all
from dataplane_testkit._hooks import backend_of
from dataplane_testkit._store import Store
from dataplane_testkit._timing import in_threads

_MANY: Final = 300
_THREADS: Final = 8

#: Contents that a conversion to text, a C string, stripped whitespace or compression would change.
_CONTENTS: Final[dict[str, bytes]] = {
    "one_byte": b"\0",
    "every_byte": bytes(range(256)),
    "no_text": b"\xff\xfe\xc3\x28\x80",
    "ends_in_zeros": b"data\0\0\0",
    "ends_in_newlines": b" \tdata\r\n\n",
    "looks_like_a_number": b"007",
    "looks_like_nothing": b"None",
    "64_kb": bytes(range(256)) * 256,
    "16_mb": random.Random(7).randbytes((16 << 20) + 3),
}


def _same(found: Any, data: bytes) -> bool:
    return found is not None and bytes(found) == data


class BlobSuite(Suite, chapter="blobs"):
    """The methods of a `BlobStore`. Other backends do not have them, so these tests are skipped for them."""

    # --- one blob -----------------------------------------------------------------------------------------------------

    @pytest.mark.parametrize("content", list(_CONTENTS))
    def test_a_blob_comes_back_byte_for_byte(self, store: Store, content: str) -> None:
        blobs = store.blobs()
        (key,), data = new_keys(1), _CONTENTS[content]
        blobs.put(key, data)
        found = blobs.get(key)
        assert _same(found, data), f"get returned {found!r:.80}. Expected {data!r:.80}"
        assert _same(blobs.get(key), data), "the second get of a blob returned other bytes than the first"

    def test_a_missing_blob_reads_as_none(self, store: Store) -> None:
        blobs = store.blobs()
        (key,) = new_keys(1)
        try:
            found = blobs.get(key)
        except Exception as error:
            pytest.fail(f"get of a missing key raised {error!r}. Expected None.")
        assert found is None, f"get of a missing key returned {found!r:.80}. Expected None."

    def test_an_empty_blob_is_told_from_a_missing_one(self, store: Store) -> None:
        blobs = store.blobs()
        empty, missing = new_keys(2)
        blobs.put(empty, b"")
        found = blobs.get_many([empty, missing])
        assert _same(blobs.get(empty), b""), f"get of an empty blob returned {blobs.get(empty)!r}. Expected b''."
        assert _same(found[0], b""), f"get_many returned {found[0]!r} for an empty blob. Expected b''."
        assert found[1] is None, f"get_many returned {found[1]!r} for a missing blob. Expected None."
        blobs.delete(empty)
        assert blobs.get(empty) is None, "an empty blob can still be read after delete"

    def test_a_deleted_blob_is_gone(self, store: Store) -> None:
        blobs = store.blobs()
        gone, stays = new_keys(2)
        for key in (gone, stays):
            blobs.put(key, key.encode())
        assert _same(blobs.get(gone), gone.encode())
        blobs.delete(gone)
        found = blobs.get(gone)
        assert found is None, f"get of a deleted blob returned {found!r:.80}. Expected None."
        assert _same(blobs.get(stays), stays.encode()), "delete of one blob changed or deleted another blob"

    def test_deleting_what_is_not_there_is_ignored(self, store: Store) -> None:
        blobs = store.blobs()
        key, never = new_keys(2)
        blobs.put(key, b"data")
        try:
            blobs.delete(never)
            blobs.delete(key)
            blobs.delete(key)
        except Exception as error:
            pytest.fail(f"delete of a missing key raised {error!r}. Expected no error.")
        assert blobs.get(key) is None

    def test_keys_do_not_clash(self, store: Store) -> None:
        blobs = store.blobs()
        (base,) = new_keys(1)
        ends = ["", "0", "00", "1", "01", "10", "100", "9007199254740992", "9007199254740993", "18446744073709551615"]
        keys = [f"{base}{end}" for end in ends]
        for key in keys:
            blobs.put(key, key.encode())
        wrong = [key for key in keys if not _same(blobs.get(key), key.encode())]
        assert not wrong, f"{of_all(wrong, keys)} do not hold the bytes that were put under their key"
        blobs.delete(keys[0])
        wrong = [key for key in keys[1:] if not _same(blobs.get(key), key.encode())]
        assert not wrong, f"{of_all(wrong, keys)} are missing or changed after delete('{keys[0]}')"

    # --- many at once -------------------------------------------------------------------------------------------------

    def test_put_many_stores_as_put_does(self, store: Store) -> None:
        blobs = store.blobs()
        batch = {key: key.encode() * (index % 4) for index, key in enumerate(new_keys(_MANY))}
        blobs.put_many(batch)
        wrong = [key for key, data in batch.items() if not _same(blobs.get(key), data)]
        assert not wrong, f"{of_all(wrong, batch)} of one put_many are missing or changed"

    def test_get_many_replies_as_get_does(self, store: Store) -> None:
        blobs = store.blobs()
        keys = new_keys(_MANY)
        there = {key for index, key in enumerate(keys) if index % 5}
        for key in there:
            blobs.put(key, key.encode())
        random.Random(11).shuffle(keys)
        found = list(blobs.get_many(keys))
        assert len(found) == len(keys), f"get_many returned {len(found)} replies for {len(keys)} keys"
        for key, data in zip(keys, found, strict=True):
            if key in there:
                assert _same(data, key.encode()), f"get_many returned {data!r:.80} for '{key}'. Expected the key itself"
            else:
                assert data is None, f"get_many returned {data!r:.80} for a missing key. Expected None."

    def test_delete_many_deletes_as_delete_does(self, store: Store) -> None:
        blobs = store.blobs()
        keys = new_keys(_MANY)
        missing, gone, stays = keys[::3], keys[1::3], keys[2::3]
        for key in (*gone, *stays):
            blobs.put(key, b"data")
        try:
            blobs.delete_many([*missing, *gone])
            left = [key for key in gone if blobs.get(key) is not None]
            blobs.delete_many(gone)
        except Exception as error:
            pytest.fail(f"delete_many with missing keys raised {error!r}. Expected no error.")
        assert not left, f"{of_all(left, gone)} are still there after delete_many"
        lost = [key for key in stays if blobs.get(key) is None]
        assert not lost, f"{of_all(lost, stays)} are gone, although delete_many did not name them"

    # --- several at once ----------------------------------------------------------------------------------------------

    def test_blobs_from_several_threads(self, store: Store) -> None:
        blobs = store.blobs()

        def work(number: int) -> Callable[[], list[str]]:
            keys = new_keys(20)

            def run() -> list[str]:
                wrong = []
                for key in keys:
                    data = f"{number} {key}".encode() * 50
                    blobs.put(key, data)
                    if not _same(blobs.get(key), data):
                        wrong.append(key)
                    blobs.delete(key)
                    if blobs.get(key) is not None:
                        wrong.append(key)
                return wrong

            return run

        wrong = [key for found in in_threads(*(work(number) for number in range(_THREADS))) for key in found]
        assert not wrong, (
            f"with {_THREADS} threads, blobs were read wrong or were still there after delete: {preview(wrong)}"
        )

    def test_blobs_are_seen_by_every_client(self, store: Store) -> None:
        blobs = store.blobs()
        other = backend_of(store.attached_client())
        assert isinstance(other, BlobStore)
        for key in new_keys(10):
            for writer, reader in ((blobs, other), (other, blobs)):
                writer.put(key, key.encode())
                assert _same(reader.get(key), key.encode()), "another client does not see a blob that was put"
                reader.delete(key)
                assert writer.get(key) is None, "a blob that another client deleted can still be read"
                key += "x"
        (worker,) = store.deployment.workers(1)
        here, there = new_keys(2)
        blobs.put(here, here.encode())
        found = worker.run(_workers.call_backend, "get_many", [here, there])
        assert _same(found[0], here.encode()), "another process does not see a blob that this client put"
        assert found[1] is None
        worker.run(_workers.call_backend, "put_many", {there: there.encode()})
        assert _same(blobs.get(there), there.encode()), "this client does not see a blob that another process put"
        worker.run(_workers.call_backend, "delete", here)
        assert blobs.get(here) is None, "a blob that another process deleted can still be read"
