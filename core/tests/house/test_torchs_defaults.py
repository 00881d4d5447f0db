"""Nothing depends on torch's defaults: a trainer may have set them for its own model."""

import ast
import re
from pathlib import Path

_ROOT = Path(__file__).parents[3]
#: What makes a tensor on the default device, if no device is named.
_MAKERS = {
    *("arange", "as_tensor", "asarray", "empty", "empty_permuted", "empty_strided", "eye", "full", "linspace"),
    *("logspace", "nested_tensor", "ones", "rand", "randint", "randn", "randperm", "range", "scalar_tensor"),
    *("sparse_coo_tensor", "tensor", "tril_indices", "triu_indices", "zeros"),
}
#: Those of the default dtype, whatever they are given.
_OF_DEFAULT_DTYPE = {
    *("empty", "empty_permuted", "empty_strided", "eye", "linspace", "logspace", "ones", "rand", "randn", "zeros")
}


def _lacking(call):
    """What a call that makes a tensor leaves to torch's defaults."""
    function = call.func
    if not isinstance(function, ast.Attribute) or not ast.unparse(function.value).startswith("torch"):
        return set()
    needed = {"device"} if function.attr in _MAKERS else set()
    return (needed | ({"dtype"} if function.attr in _OF_DEFAULT_DTYPE else set())) - {
        each.arg for each in call.keywords
    }


def test_every_new_tensor_names_its_device():
    files = [
        file
        for folder in ("core", "observe", "tools", "plugins", "integrations", "compat")
        for file in (_ROOT / folder).rglob("src/**/*.py")
    ]
    assert len(files) > 100
    candidates = re.compile(rf"\btorch[\w.]*\.({'|'.join(_MAKERS)})\(")
    found = [
        f"{file.relative_to(_ROOT)}:{node.lineno}: {ast.unparse(node)} lacks {sorted(_lacking(node))}"
        for file in files
        if candidates.search(source := file.read_text())
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Call) and _lacking(node)
    ]
    assert not found, "\n".join(found)
