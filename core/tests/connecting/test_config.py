"""Configs from dict, YAML and OmegaConf; errors that name the key."""

import traceback

import pytest
from omegaconf import OmegaConf

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


def test_a_wrong_key_in_a_section_is_compared_with_the_keys_of_that_section():
    class Options(CapacityOptions):
        inner: CapacityOptions = CapacityOptions()
        several: tuple[CapacityOptions, ...] = ()

    for values, said in [
        ({"inner": {"capacity_byte": 1}}, "unknown key 'inner.capacity_byte'; did you mean 'capacity_bytes'?"),
        ({"inner": {"zzz": 1}}, "unknown key 'inner.zzz'; known keys: capacity_bytes, on_full."),
        ({"several": [{"zzz": 1}]}, "unknown key 'several.0.zzz'."),
    ]:
        with pytest.raises(ConfigError) as refused:
            validate_model(Options, values, "options of backend 'x'")
        assert str(refused.value).endswith(said)


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
    with pytest.raises(ConfigError, match=r"config\.yaml' is not valid YAML") as refused:
        load_config(path)
    assert words in str(refused.value)
    assert "hunter2" not in "".join(traceback.format_exception(refused.value)) + repr(refused.value)


def test_a_config_does_not_print_its_options():
    url = "redis://:hunter2@h"
    config = load_config({"backend": "noop", "options": {"url": url}})
    assert "hunter2" not in repr(config) + str(config)
    with pytest.raises(ValueError, match="options") as wrong:
        DataPlaneConfig(backend="noop", options=url)
    with pytest.raises(ConfigError) as size:
        connect(noop(options={"capacity_bytes": url}))
    for refused in (wrong, size):
        assert "hunter2" not in "".join(traceback.format_exception(refused.value)) + repr(refused.value)


class Misspelt:
    @hookimpl(wrapper=True)
    def put_sample(self, request):
        return (yield)


class Broken:
    def start(self, context):
        raise OSError("no such collector")

    @hookimpl(wrapper=True)
    def claim(self, request):
        return (yield)


BROKEN = Broken()


def noop(**more):
    return {"backend": "noop", **more}


@pytest.mark.parametrize(
    ("config", "error", "named"),
    [
        # the config itself
        *(
            (given, ConfigError, r"A config is a dict such as .*YAML file.*noop")
            for given in ("noop", {"noop": {}}, 5, None)
        ),
        ("nowhere.yaml", ConfigError, r"nowhere\.yaml' cannot be read"),
        ({}, ConfigError, "'backend' is missing"),
        ({"backend": ""}, ConfigError, "'backend'"),
        ({"backend": "nop"}, UnknownBackendError, "Did you mean 'noop'"),
        ({"backend": "Redis-Store"}, ConfigError, "Did you mean 'redis_store'"),
        ({"backend": "redis"}, ConfigError, "Did you mean 'redis_store'"),
        ({"backend": "tqsimple"}, ConfigError, "Did you mean 'tq_simple'"),
        (noop(op_timeout=5), ConfigError, "unknown key 'op_timeout'; did you mean 'op_timeout_s'"),
        (noop(op_timeout_s=-1), ConfigError, "'op_timeout_s'"),
        (noop(op_timeout_s=float("inf")), ConfigError, "'op_timeout_s'"),
        *((noop(share_above=size), ConfigError, "key 'share_above': ") for size in (-1, "much")),
        (noop(share_above={"image": -1}), ConfigError, r"key 'share_above\.image': "),
        *((noop(announce_s=period), ConfigError, "'announce_s'") for period in (0, -1.0, "often")),
        (OmegaConf.create({"backend": "${nowhere}"}), ConfigError, "'nowhere' not found"),
        # options of the backend
        (noop(options={"capacity_byte": 1}), ConfigError, "did you mean 'capacity_bytes'"),
        (noop(options={"attach_wait_s": 1}), ConfigError, "'attach_wait_s' is a key of the config itself"),
        *(
            (noop(options={"capacity_bytes": size}), ConfigError, "key 'capacity_bytes'")
            for size in ("1 QB", "GB", "-1GB", "1,5GB", "0.1", "inf")
        ),
        # middleware
        (noop(middleware=["metric"]), UnknownBackendError, "'metric' is not installed. Found: .*metrics"),
        (noop(middleware=[{"metrics": 5}]), ConfigError, "'metrics' must be a mapping, got int"),
        (noop(middleware=[{"metrics": {"on_evnt": 1}}]), ConfigError, "'on_evnt'; did you mean 'on_event'"),
        (noop(middleware=[Misspelt()]), PluginSignatureError, "Did you mean 'put_samples'"),
        (noop(middleware=[object()]), PluginSignatureError, "wraps no operation"),
        (noop(middleware=[BROKEN]), BackendError, "middleware Broken: OSError: no such collector"),
        (noop(middleware=[BROKEN, BROKEN]), ConfigError, "lists the same Broken object twice"),
    ],
)
def test_what_is_wrong_is_refused_and_named(config, error, named):
    with pytest.raises(error, match=f"(?s){named}"):
        connect(config)


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
