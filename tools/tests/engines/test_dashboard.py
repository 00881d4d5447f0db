"""The dashboard of examples/grafana shows what `dataplane metrics` serves, and no other."""

import json
import re
from pathlib import Path

from dataplane_testkit._timing import STARTS_S, eventually

FOLDER = Path(__file__).parents[3] / "examples/grafana"


def questions():
    dashboard = json.loads((FOLDER / "dataplane.json").read_text())
    return {target["expr"] for panel in dashboard["panels"] for target in panel["targets"]}


def test_it_shows_every_metric_and_no_other(federation):
    shown = {name for question in questions() for name in re.findall(r"dataplane_\w+", question)}

    def served():
        names = {sample.name for metric in federation.collect() for sample in metric.samples}
        return {name for name in names if not name.endswith(("_created", "_count", "_sum"))}

    def shows_all():
        found = served()
        return "dataplane_starved_seconds" in found and found == shown

    eventually(shows_all, STARTS_S, f"a task that is starved, and nothing served but {shown}")
