"""The examples in the client's docstrings, which continue each other, run in the order in which they stand."""

import doctest
import inspect

from dataplane_core import DataPlaneClient
from dataplane_core.client.claims import Claims
from dataplane_core.client.overview import Overview


def test_the_examples_of_the_client_run_one_after_the_other(tmp_path):
    own = list(vars(DataPlaneClient).values())
    cleared_at = own.index(DataPlaneClient.clear_samples)  # samples are claimed before they are cleared
    members = [*own[:cleared_at], *vars(Claims).values(), *own[cleared_at:], *vars(Overview).values()]
    documented = [DataPlaneClient, *(each for each in members if inspect.isfunction(each))]
    docstrings = [inspect.getdoc(each) for each in documented if not each.__name__.startswith("_")]
    assert all(text and ">>> " in text for text in docstrings)
    story = doctest.DocTestParser().get_doctest("\n\n".join(docstrings), {"folder": tmp_path}, "client", None, None)
    runner = doctest.DocTestRunner()
    runner.run(story, clear_globs=False)
    story.globs["client"].close()
    assert runner.tries == len(story.examples) > 10
    assert runner.failures == 0
