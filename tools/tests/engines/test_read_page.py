"""The page of `dataplane read --html` in a real Chromium: what it shows, and that nothing in its data is obeyed."""

import json
import tempfile

import pytest
import torch
from chromium import PROGRAM, Browser

from dataplane_core import connect
from dataplane_core.cli import main

# `make test` installs Chromium where it may
pytestmark = pytest.mark.skipif(PROGRAM is None, reason="there is no Chromium: apt-get install chromium")

#: It would run if it were markup; would turn the direction of writing; and is no whole character.
EVIL = (
    "</script><script>window.hacked = 1</script><img src=x onerror='window.hacked = 2'>"
    "\x1b[2J\u202e\x00 שלום 👩‍💻 & \ud800"
)


@pytest.fixture(scope="module")
def browser():
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder, Browser(folder) as browser:
        yield browser


def written(folder, words, columns, ids, more=None, tags=None):
    """A page of samples, whose token ids number words."""
    names = dict.fromkeys([*columns, *(more or {})])
    with connect({"backend": "noop"}) as client, pytest.MonkeyPatch.context() as patch:
        client.register_partition("train", list(names), None, [])
        client.put_samples(ids, "train", columns, tags=tags)
        if more:
            client.put_samples(ids[:-1], "train", more)
        client.save(folder / "save")
        module = f"words_of_{folder.name}"
        (folder / f"{module}.py").write_text(
            f"WORDS = {words!r}\ndef decode(ids):\n    return ''.join(WORDS[each] for each in ids)\n"
        )
        patch.syspath_prepend(str(folder))
        path = str(folder / "page.html")
        assert main(["read", str(folder / "save"), "train", "--html", path, "--tokenizer", f"{module}:decode"]) == 0
    return path


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    """A page of 2,000 samples, 500 groups of 4. The first sample's prompt is evil, and the last lacks its reward."""
    rows = [[0, 1, 2, number % 4] for number in range(2000)]
    rows[0][0] = 4
    columns = {
        "input_ids": rows,
        "token_mask": [[False, False, True, True]] * 2000,
        "info": [{"evil": EVIL[:-1]}] * 2000,
        "advantages": [[0.0, 0.0, float(number % 3 - 1), 0.5] for number in range(2000)],
    }
    return written(
        tmp_path_factory.mktemp("page"),
        ["zero ", "one ", "two ", "three ", EVIL],
        columns,
        [f"q{number // 4}_g{number % 4}" for number in range(2000)],
        more={"reward": torch.arange(1999) % 7 / 4},
        tags=[{"seed": 2**62 + n, "time": 1_732_665_123 + n, "text": f"tag {n}"} for n in range(2000)],
    )


@pytest.fixture
def opened(browser, page):
    """The page, just opened."""
    browser.errors.clear()
    browser.open(page)
    shows(browser, "q0_g0")
    yield browser
    assert browser.errors == []


def texts(browser, selector):
    return browser.run(f"[...document.querySelectorAll({json.dumps(selector)})].map((each) => each.textContent)")


def shows(browser, sample_id):
    browser.wait(f"document.querySelector('#sample h2')?.textContent === {json.dumps(sample_id)}")


def first_ids(browser, count=3):
    return texts(browser, "#space .row > :first-child")[:count]


def test_it_shows_the_rows_in_view_and_a_sample(opened):
    assert texts(opened, "#count") == ["2000 of 2000"]
    assert first_ids(opened) == ["q0_g0", "q0_g1", "q0_g2"]
    names, values = texts(opened, "#head span"), texts(opened, "#space .row:first-child span")
    assert dict(zip(names, values, strict=True))["time"] == "1732665123"  # not rounded
    assert dict(zip(names, values, strict=True))["text (tag)"] == "tag 0"
    assert len(first_ids(opened, None)) < 100
    opened.run("document.getElementById('table').scrollTop = 1e9")
    opened.wait("document.getElementById('space').lastChild.firstChild.textContent === 'q499_g3'")
    opened.click("#space .row:last-child")
    shows(opened, "q499_g3")
    assert texts(opened, "#sample .lacks") == ["lacks: reward"]
    assert texts(opened, "#sample pre")[:2] == ["zero one ", "two three "]
    assert f"seed {2**62 + 1999}" in texts(opened, "#sample .facts span")  # exactly
    assert opened.run("location.hash") == "#q499_g3"


def test_what_a_model_wrote_is_never_obeyed(opened):
    assert opened.run("[window.hacked, document.images.length, document.scripts.length]") == [None, 0, 3]
    prompt = texts(opened, "#sample .prompt pre")[0]
    assert prompt.startswith("</script><script>window.hacked = 1</script><img src=x ")
    assert prompt.endswith(">\\u001b[2J\\u202e\\u0000 שלום 👩‍💻 & \\ud800one ")
    assert "</script><script>" in "".join(texts(opened, "#sample pre")[2:])  # the object column
    assert opened.run("performance.getEntriesByType('resource').length") == 0


def test_columns_sort_both_ways_with_what_lacks_them_last_and_search_looks_everywhere(opened):
    def row(which):
        return f"document.getElementById('space').{which}.firstChild.textContent"

    opened.click("#head [data-name=reward]")
    assert first_ids(opened) == ["q0_g0", "q1_g3", "q3_g2"]  # each seventh
    opened.click("#head [data-name=reward]")
    assert first_ids(opened, 2) == ["q1_g2", "q3_g1"]
    opened.run("document.getElementById('table').scrollTop = 1e9")
    opened.wait(f"{row('lastChild')} === 'q499_g3'")
    opened.click("#head [data-name=id]")
    opened.run("document.getElementById('table').scrollTop = 0")
    opened.wait(f"{row('firstChild')} === 'q0_g0'")
    assert first_ids(opened, 5) == ["q0_g0", "q0_g1", "q0_g2", "q0_g3", "q1_g0"]  # q1 before q10
    for letters, count in {"q49_": 4, "TWO THREE": 500, "window.HACKED": 1, "no such text": 0}.items():
        opened.press("/")
        opened.run("document.getElementById('search').select()")
        opened.send("Input.insertText", text=letters)
        opened.press("Enter")
        assert texts(opened, "#count") == [f"{count} of 2000"]
    opened.press("/", "Escape")
    assert texts(opened, "#count") == ["2000 of 2000"]


def test_tokens_are_colored_by_a_column_of_choice(opened):
    def colors():
        spans = "[...document.querySelectorAll('#sample .answer pre span')]"
        return opened.run(f"{spans}.map((each) => [each.dataset.value, each.style.background])")

    assert texts(opened, "#sample h3")[0] == "advantages: -1 to 0.5"
    (low, red), (high, green) = colors()
    assert (low, high) == ("-1", "0.5")
    assert "--down" in red
    assert "0.6" in red
    assert "--up" in green
    assert "0.3" in green
    opened.press("c")  # the one before it in the list comes after "no color"
    opened.wait("!document.querySelector('#sample .answer pre span')")
    opened.press("c")
    opened.wait("document.querySelector('#sample .answer pre span')?.dataset.value === '1'")


def test_the_answers_of_a_group_are_beside_each_other_with_their_differences(opened):
    assert texts(opened, ".group h3") == ["q0_g0", "q0_g1", "q0_g2", "q0_g3"]
    assert texts(opened, ".group pre") == ["two zero ", "two one ", "two two ", "two three "]
    assert texts(opened, ".group mark") == ["one", "two", "three"]
    opened.click(".group > section", 3)
    shows(opened, "q0_g3")
    assert texts(opened, ".group mark") == ["zero", "one", "two"]
    assert texts(opened, "#space .on > :first-child") == ["q0_g3"]


def test_keys_go_through_the_samples_and_links_lead_to_them(opened, page):
    opened.press("j", "j", "k")
    shows(opened, "q0_g1")
    opened.press("l", "l", "l", "l")
    shows(opened, "q0_g3")
    opened.press("h")
    shows(opened, "q0_g2")
    opened.press("Enter")
    assert opened.run("getComputedStyle(document.getElementById('table')).visibility") == "hidden"
    opened.press("Escape")
    assert opened.run("getComputedStyle(document.getElementById('table')).visibility") == "visible"
    opened.open(page, "#q321_g1")
    shows(opened, "q321_g1")
    assert texts(opened, "#space .on > :first-child") == ["q321_g1"]  # it is in view
    opened.press("/")
    opened.send("Input.insertText", text="q7_")
    opened.run("location.hash = '#q8_g0'")  # a link to a sample that the search leaves out
    shows(opened, "q8_g0")
    assert texts(opened, "#count") == ["2000 of 2000"]
    opened.run("location.hash = '#%'")
    opened.run("location.hash = '#none'")
    shows(opened, "q8_g0")


def test_of_a_long_sample_only_what_is_near_the_view_is_in_the_document(browser, tmp_path):
    tokens = 20_000
    ids = [[0, *([1] * 8000), *(2 + (number * (7 if row else 3)) % 5 for number in range(tokens))] for row in range(2)]
    mask = [[False] * 8001 + [True] * tokens] * 2
    columns = {"input_ids": ids, "token_mask": mask, "advantages": [[0.5] * len(ids[0])] * 2}
    path = written(
        tmp_path, ["a", "\U0001f600", "two ", "three ", "four\n", "five ", "six "], columns, ["q0_g0", "q0_g1"]
    )
    browser.errors.clear()
    browser.open(path)
    shows(browser, "q0_g0")
    spans = "document.querySelectorAll('#sample .answer span[data-value]').length"
    assert browser.run(spans) < tokens / 2
    assert texts(browser, ".group p") == ["too long to be compared: nothing is marked"]
    assert texts(browser, ".group mark") == []
    bottom = "(() => { const pane = document.getElementById('sample'); pane.scrollTop = pane.scrollHeight })()"
    browser.wait(f"{bottom}, {spans} === {tokens}")
    assert texts(browser, "#sample .prompt pre") == ["a" + "\U0001f600" * 8000], "no character is cut in two"
    assert browser.errors == []
