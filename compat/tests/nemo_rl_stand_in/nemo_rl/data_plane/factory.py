"""A factory that knows one ``impl``."""

from nemo_rl.data_plane import interfaces


def build_data_plane_client(cfg, *, bootstrap=True):
    if cfg is None or not cfg["enabled"]:
        raise ValueError("the data plane is disabled")
    if cfg["impl"] != "transfer_queue":
        raise ValueError(f"unknown impl {cfg['impl']!r}")
    return interfaces, cfg, bootstrap
