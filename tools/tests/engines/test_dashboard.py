"""The dashboard of examples/grafana shows what `dataplane metrics` serves, and no other."""

import json
import re
import urllib.request
from pathlib import Path

from prometheus_client.parser import text_string_to_metric_families

from dataplane_testkit._timing import STARTS_S, eventually

FOLDER = Path(__file__).parents[3] / "examples/grafana"


def questions():
    dashboard = json.loads((FOLDER / "dataplane.json").read_text())
    return {target["expr"] for panel in dashboard["panels"] for target in panel["targets"]}


def test_it_shows_every_metric_and_no_other(gauges):
    shown = {name for question in questions() for name in re.findall(r"dataplane_\w+", question)}
    assert 'up{job="dataplane"}' in questions()  # Prometheus' own, for each process

    def served():
        pages = [metric.samples for metric in gauges.collect()]
        for target in gauges.targets():
            text = urllib.request.urlopen(f"http://{target['targets'][0]}/metrics", timeout=60).read().decode()
            pages += [metric.samples for metric in text_string_to_metric_families(text)]
        names = {sample.name for page in pages for sample in page}
        return {name for name in names if not name.endswith(("_created", "_count", "_sum"))}

    def shows_all():
        found = served()
        return "dataplane_starved_seconds" in found and found == shown

    eventually(shows_all, STARTS_S, f"a task that is starved, and nothing served but {shown}")
