"""The examples in the client's docstrings, which continue each other, run in the order in which they stand."""

import doctest
import inspect

from dataplane_core import DataPlaneClient, connect, connect_async

#: What takes no part in the story: it needs middleware, or ends it.
UNTOLD = {"mark_step", "close"}


def test_the_examples_of_the_client_run_one_after_the_other(tmp_path):
    methods = [each for each in vars(DataPlaneClient).values() if inspect.isfunction(each)]
    documented = [each for each in methods if not each.__name__.startswith("_") and each.__name__ not in UNTOLD]
    docstrings = [inspect.getdoc(each) for each in [DataPlaneClient, *documented]]
    assert all(text and ">>> " in text for text in docstrings)
    story = doctest.DocTestParser().get_doctest("\n\n".join(docstrings), {"folder": tmp_path}, "client", None, None)
    runner = doctest.DocTestRunner()
    runner.run(story, clear_globs=False)
    story.globs["client"].close()
    skipped = sum(doctest.SKIP in each.options for each in story.examples)  # units and clients of a larger store
    assert runner.tries == len(story.examples) - skipped > 10
    assert runner.failures == 0


def test_the_examples_of_connect_run():
    for function in (connect, connect_async):
        example = doctest.DocTestFinder().find(function, function.__name__, globs={"connect_async": connect_async})
        results = [doctest.DocTestRunner().run(each) for each in example]
        assert sum(each.attempted for each in results) >= 3
        assert sum(each.failed for each in results) == 0


def test_a_notebook_shows_a_partition_with_what_users_named_escaped():
    with connect({"backend": "noop"}) as client:
        client.register_partition("p", ["<b>x</b>"], None, ["<i>t</i>"])
        client.put_samples(["a"], "p", {"<b>x</b>": [1.0]})
        shown = client.describe("p")._repr_html_()
    assert "&lt;b&gt;x&lt;/b&gt;" in shown
    assert "&lt;i&gt;t&lt;/i&gt;" in shown
    assert "<b>" not in shown
