"""Configs from dict, YAML and OmegaConf; errors that name the key."""

import os
import traceback

import pytest
from omegaconf import OmegaConf
from pydantic import model_validator

from dataplane_core import DataPlaneConfig, connect
from dataplane_core.backends import CapacityOptions
from dataplane_core.config import load_config, validate_model
from dataplane_core.errors import BackendError, ConfigError, InvalidTypeError, PluginSignatureError, UnknownBackendError
from dataplane_core.spec import hookimpl

TEXT = """
backend: noop
options: {capacity_bytes: 100}
middleware: [metrics]
op_timeout_s: 5
"""


def test_dict_yaml_and_omegaconf_give_the_same(tmp_path):
    path = tmp_path / "plane.yaml"
    path.write_text(TEXT)
    from_yaml = load_config(path)
    values = {"backend": "noop", "options": {"capacity_bytes": 100}, "middleware": ["metrics"], "op_timeout_s": 5}
    assert from_yaml == load_config(values) == load_config(OmegaConf.create(values)) == load_config(str(path))
    assert load_config(from_yaml) is from_yaml


@pytest.mark.parametrize(
    ("size", "size_bytes"),
    [
        *((100, 100), ("100", 100), (" 64 b ", 64), ("1e9", 10**9), ("1GB", 10**9), ("1.5 gb", 1_500_000_000)),
        *(("512MiB", 512 << 20), ("2Ki", 2048), ("3T", 3 * 10**12)),
    ],
)
def test_a_size_is_a_number_of_bytes_or_has_a_unit(size, size_bytes):
    assert CapacityOptions(capacity_bytes=size).capacity_bytes == size_bytes


@pytest.mark.parametrize("size", ["1 QB", "GB", "-1GB", "1,5GB", "0.1", "inf"])
def test_a_size_that_is_none_is_refused_with_an_example(size):
    with pytest.raises(
        ConfigError, match=r"key 'capacity_bytes': (expected a number of bytes.*'512MiB'|Input should be)"
    ):
        connect({"backend": "noop", "options": {"capacity_bytes": size}})


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"backend": "noop", "op_timeout": 5}, ["unknown key 'op_timeout'", "did you mean 'op_timeout_s'?"]),
        ({}, ["'backend' is missing"]),
        ({"backend": ""}, ["'backend'"]),
        ({"backend": "noop", "op_timeout_s": -1}, ["'op_timeout_s'", "greater than 0"]),
        ({"backend": "noop", "op_timeout_s": float("inf")}, ["'op_timeout_s'"]),
        ([1], ["must be a mapping"]),
    ],
)
def test_a_wrong_config_names_the_key_and_the_nearest(values, words):
    with pytest.raises(ConfigError) as refused:
        load_config(values)
    for word in words:
        assert word in str(refused.value)


def test_a_wrong_key_in_a_section_is_compared_with_the_keys_of_that_section():
    class Options(CapacityOptions):
        inner: CapacityOptions = CapacityOptions()
        several: tuple[CapacityOptions, ...] = ()

        @model_validator(mode="after")
        def check(self):
            if self.capacity_bytes == 1:
                raise ValueError
            return self

    for values, said in [
        ({"inner": {"capacity_byte": 1}}, "unknown key 'inner.capacity_byte'; did you mean 'capacity_bytes'?"),
        ({"inner": {"zzz": 1}}, "unknown key 'inner.zzz'; known keys: capacity_bytes, on_full."),
        ({"several": [{"zzz": 1}]}, "unknown key 'several.0.zzz'."),
        ({"capacity_bytes": 1}, "the options do not fit together."),
    ]:
        with pytest.raises(ConfigError) as refused:
            validate_model(Options, values, "options of backend 'x'")
        assert str(refused.value) == f"options of backend 'x' are refused: {said}"


def test_a_missing_or_broken_file_is_named(tmp_path):
    with pytest.raises(ConfigError, match=r"nowhere\.yaml"):
        load_config(tmp_path / "nowhere.yaml")
    broken = tmp_path / "broken.yaml"
    broken.write_text("backend: [noop")
    with pytest.raises(ConfigError, match=r"broken\.yaml.*not valid YAML"):
        load_config(broken)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ("{url: redis://:hunter2@h, x: [}", "line 2, column"),
        ("{url: *hunter2}", "found undefined alias"),
        ("{url: !hunter2!x a}", "found undefined tag handle"),
        ("{url: !hunter2 a}", "could not determine a constructor"),
        ("{capacity_bytes: !!int hunter2}", "a value is not what its tag says"),
        ("{url: hunter2\x07}", "special characters are not allowed"),
    ],
)
def test_what_is_no_yaml_is_placed_and_not_quoted(tmp_path, options, words):
    path = tmp_path / "config.yaml"
    path.write_text(f"backend: noop\noptions: {options}\n")
    with pytest.raises(ConfigError, match="not valid YAML") as refused:
        load_config(path)
    assert words in str(refused.value)
    assert "hunter2" not in "".join(traceback.format_exception(refused.value)) + repr(refused.value)


def test_a_config_does_not_print_its_options():
    url = "redis://:hunter2@h"
    config = load_config({"backend": "noop", "options": {"url": url}})
    assert "hunter2" not in repr(config) + str(config)
    with pytest.raises(ValueError, match="options") as refused:
        DataPlaneConfig(backend="noop", options=url)
    assert "hunter2" not in "".join(traceback.format_exception(refused.value)) + repr(refused.value)


def test_backend_options_are_checked_and_secrets_are_not_shown():
    with pytest.raises(ConfigError, match="did you mean 'capacity_bytes'"):
        connect({"backend": "noop", "options": {"capacity_byte": 1}})
    with pytest.raises(ConfigError) as refused:
        connect({"backend": "noop", "options": {"capacity_bytes": "hunter2"}})
    assert "hunter2" not in str(refused.value)


def test_an_unknown_backend_says_what_is_installed():
    with pytest.raises(UnknownBackendError, match="Did you mean 'noop'"):
        connect({"backend": "nop"})


def test_an_unknown_middleware_says_what_is_installed():
    with pytest.raises(UnknownBackendError, match=r"middleware 'metric' is not installed. Found: .*metrics"):
        connect({"backend": "noop", "middleware": ["metric"]})


class Unmarked:
    def put_samples(self, request): ...


class NotAWrapper:
    @hookimpl
    def put_samples(self, request): ...


class Misspelt:
    @hookimpl(wrapper=True)
    def put_sample(self, request):
        return (yield)


class WrongArgument:
    @hookimpl(wrapper=True)
    def put_samples(self, req):
        return (yield)


@pytest.mark.parametrize(
    ("plugin", "words"),
    [
        (Unmarked(), "'put_samples' is not marked"),
        (NotAWrapper(), r"not @hookimpl\(wrapper=True\)"),
        (Misspelt(), "Did you mean 'put_samples'"),
        (WrongArgument(), r"takes \(self, req\)"),
        (object(), "wraps no operation"),
    ],
)
def test_middleware_that_would_silently_do_nothing_is_refused(plugin, words):
    with pytest.raises(PluginSignatureError, match=words):
        connect({"backend": "noop", "middleware": [plugin]})


def test_wrappers_nest_outermost_first_and_may_change_the_request():
    calls = []

    def tracing(name):
        class Traced:
            @hookimpl(wrapper=True)
            def clear_samples(self, request):
                calls.append(f"{name} in")
                request.sample_ids = [each.lower() for each in request.sample_ids]
                reply = yield
                calls.append(f"{name} out")
                return reply

        return Traced()

    with connect({"backend": "noop", "middleware": [tracing("outer"), tracing("inner")]}) as client:
        client.register_partition("p", ["x"], None, ["t"])
        client.put_samples(["a"], "p", tags=[{}])
        client.clear_samples(["A"], "p")
        assert client.list_samples("p").sample_ids == []
    assert calls == ["outer in", "inner in", "inner out", "outer out"]


def test_a_client_is_not_pickled_and_a_config_is():
    import pickle

    with connect({"backend": "noop"}) as client:
        with pytest.raises(InvalidTypeError, match="cannot be pickled"):
            pickle.dumps(client)
        assert pickle.loads(pickle.dumps(client.config)) == DataPlaneConfig(backend="noop")


def test_a_value_of_omegaconf_that_cannot_be_resolved_is_an_error_of_the_config():
    with pytest.raises(ConfigError, match=r"config cannot be resolved: .*'nowhere' not found"):
        load_config(OmegaConf.create({"backend": "${nowhere}"}))


class Broken:
    def start(self, context):
        raise OSError("no such collector")

    @hookimpl(wrapper=True)
    def claim(self, request):
        return (yield)


def test_middleware_that_cannot_start_is_named():
    with pytest.raises(BackendError, match="while starting middleware Broken: OSError: no such collector"):
        connect({"backend": "noop", "middleware": [Broken()]})


def test_a_middleware_object_is_listed_once():
    one = Broken()
    with pytest.raises(ConfigError, match="lists the same Broken object twice"):
        connect({"backend": "noop", "middleware": [one, one]})


@pytest.mark.timeout(60)
def test_a_config_that_is_a_pipe_is_refused_at_once(tmp_path):
    os.mkfifo(tmp_path / "config.yaml")
    with pytest.raises(ConfigError, match="no regular file"):
        connect(str(tmp_path / "config.yaml"))
