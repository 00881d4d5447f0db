"""NeMo Gym's names are those that the adapter uses. See docs/trainers.md and `checkouts.py`."""

from checkouts import config_file, needs_checkout, run_program

NAMES = """
import asyncio, dataclasses, inspect
from nemo_gym import token_id_capture as theirs
from dataplane_compat.nemo_gym import DataPlaneTokenStore

assert theirs.TOKEN_ENTRY_RECORD_SCHEMA_VERSION == 1
assert list(theirs.TokenEntry.model_fields) == [
    "schema_version", "rollout_id", "model_call_id", "model", "prompt_token_ids", "generation_token_ids",
    "generation_log_probs", "routed_experts", "output_items", "token_item_index", "created_at",
]
names = [field.name for field in dataclasses.fields(theirs.TokenCaptureSnapshot)]
assert names == ["rollout_id", "entries", "incomplete", "snapshot_id", "version"]

def parameters(function):
    signature = inspect.signature(function)
    return [(parameter.name, parameter.kind, parameter.default) for parameter in signature.parameters.values()]

for protocol, methods in {theirs.TokenSink: {"put", "mark_incomplete", "close"},
                          theirs.TokenSource: {"freeze", "drop", "close"}}.items():
    assert {name for name in vars(protocol) if inspect.iscoroutinefunction(getattr(protocol, name))} == methods
    for name in methods:
        assert parameters(getattr(DataPlaneTokenStore, name)) == parameters(getattr(protocol, name)), name
begin_call = parameters(theirs.TokenCaptureStore.begin_call)
assert parameters(DataPlaneTokenStore.begin_call) == begin_call

import nemo_gym_suite  # before Python 3.12, protocols get what the config asks for

block = {
    "enabled": True, "rebuild_response": False, "sink": "dataplane_compat.nemo_gym:DataPlaneTokenStore",
    "sink_kwargs": {"config": {"backend": "noop"}, "bootstrap": True},
}
sink = theirs.TokenIdCaptureConfig.model_validate({"token_id_capture": block}).build_sink()
assert isinstance(sink, theirs.TokenSource)

async def main():
    message = {"type": "message", "role": "assistant", "content": [], "prompt_token_ids": [1, 2],
               "generation_token_ids": [3], "generation_log_probs": [-0.5]}
    theirs.set_token_sink(theirs.CaptureContext(rollout_id="r", model_call_id="c", token_sink=sink))
    await theirs.register_call_intent()
    await theirs.capture_tokens({"output": [message]})
    built = await theirs.trajectories_from_source("r", sink)
    await sink.close()
    return built["rebuilt_response"]["output"], built["mask_sample"]

((item,), masked) = asyncio.run(main())
assert (item["prompt_token_ids"], item["generation_token_ids"], masked) == ([1, 2], [3], False)
"""


@needs_checkout("NEMO_GYM")
def test_nemo_gyms_names_are_those_that_the_adapter_uses(tmp_path):
    """And its config makes our sink, into which its capture writes, and from which its builder reads."""
    run_program("NEMO_GYM", "-c", NAMES, DATAPLANE_CONFIG=config_file(tmp_path, "noop", "names"))
