"""What a terminal or a page obeys may be in names of a store. Commands, pages and logs show it by escapes."""

import pytest
import torch
from contents import run

from dataplane_core.cli import main
from dataplane_core.errors import UnknownPartitionError
from dataplane_core.spec import UnitInfo
from dataplane_testkit.chaos import Call, Finding, History
from dataplane_testkit.chaos.run import page
from dataplane_testkit.report import Report
from dataplane_tools._report import Screen, drawn
from dataplane_tools.commands import read

#: An escape sequence that clears a screen, a C1 control, a new line, NUL, an override of direction, markup.
EVIL = "\x1b[2J\x9b1m\nfaked: line\r\0\u202egnp.exe [bold]x[/bold] <b>&"
SHOWN = "\\x1b[2J\\x9b1m\\nfaked: line\\r\\x00\\u202egnp.exe [bold]x[/bold] <b>&"


@pytest.fixture
def client(store):
    store.register_partition(EVIL, [EVIL], None, [EVIL])
    store.put_samples([EVIL, "b"], EVIL, {EVIL: torch.zeros(2)})
    store.claim_meta(EVIL, EVIL, [EVIL], 1, lease_s=60.0)
    return store


def check(text):
    assert SHOWN in text
    assert all(line.isprintable() for line in text.split("\n")), text
    assert not any(line.startswith("faked") for line in text.split("\n"))


def test_top(client, config, capsys):
    assert main(["top", config, EVIL]) == 0
    said = capsys.readouterr().out
    check(said)
    assert (said.count(f"\n{SHOWN}"), said.count(f"→ {SHOWN}")) == (2, 1)  # the partition and the field; the task
    assert main(["top", config, f"{EVIL}2"]) == 1
    check(capsys.readouterr().err)


def test_top_names_what_is_not_there(nowhere, tmp_path, capsys):
    for path, named in ((nowhere, "shm_store"), (str(tmp_path / "none.yaml"), "none.yaml")):
        assert main(["top", path]) == 1
        assert named in capsys.readouterr().err


def test_storage_units():
    unit = UnitInfo(name=EVIL, state=EVIL, node=EVIL, address=EVIL, num_lost=1)
    empty = {"backend": "b", "held_bytes": 0, "capacity_bytes": None, "partitions": [], "clients": None}
    check(drawn(Screen({**empty, "units": [unit]})))


def test_read(client, config, tmp_path, capsys):
    columns = {
        "input_ids": [[1, 2]],
        "turn_roles": [[EVIL]],
        "turn_contents": [[EVIL]],
        "said": [EVIL],
        "seen": [[EVIL]],
    }
    client.put_samples([f"{EVIL}2_g0"], EVIL, columns, tags=[{EVIL: EVIL}])
    for more in ([], ["--group", f"{EVIL}2"], ["--html", str(tmp_path / "page.html")]):
        assert run(read, config, EVIL, *more) == 0
        check(capsys.readouterr().out)
    assert all(line.isprintable() for line in (tmp_path / "page.html").read_text().split("\n"))


def test_reports_pages_and_logs(client, caplog):
    header = dict.fromkeys(("backend", "distribution", "core_version", "contract_version", "wire"), EVIL)
    header |= {"scope": "host", "declared": [EVIL], "why_not_declared": {EVIL: EVIL}}
    test = dict.fromkeys(("name", "chapter", "reason", "rule", "check_first"), EVIL)
    test |= {"proves": "core", "outcome": "fail", "duration_s": 0.0}
    check(Report(header, [test]).to_markdown())
    names = {"process": "w0.1", "partition": EVIL, "samples": (EVIL,), "fields": (EVIL,), "error": EVIL}
    call = Call(number=1, operation="put", begin_s=0.0, **names)
    found = Finding(rule="puts", text=EVIL, partition=EVIL, samples=(EVIL,), calls=(call,))
    check(page(EVIL, EVIL, [(found, History(calls=(call,)))], EVIL))

    client.claim_meta(EVIL, EVIL, [f"{EVIL}2"], 1, blocking=False)  # of a field that nobody knows
    check("\n".join(caplog.messages))


def test_errors_and_metas(client):
    with pytest.raises(UnknownPartitionError) as caught:
        client.list_sample_ids(f"{EVIL}2")
    check(str(caught.value))
    meta = client.claim_meta(EVIL, EVIL, [EVIL], 1, lease_s=60.0)
    check(repr(meta))
    assert "\x1b" not in client.describe(EVIL)._repr_html_()
