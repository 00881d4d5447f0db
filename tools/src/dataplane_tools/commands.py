"""The commands of this package: the one place that spells their arguments.

Each adds its arguments to its parser. What a command needs is imported when it runs: a function of its module gets what
the parser found.
"""

from __future__ import annotations

import argparse
from importlib import import_module

from dataplane_core.cli import Command

__all__ = ["audit", "export", "metrics", "read", "top", "why"]

_CONFIG = "the config file that its processes use"
_OR_FOLDER = _CONFIG + ", or the folder of a save or of a recording"


def _runs(module: str, function: str = "run") -> Command:
    def run(chosen: argparse.Namespace) -> int:
        status: int = getattr(import_module(f"dataplane_tools.{module}"), function)(chosen)
        return status

    return run


def _json(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print JSON")


def _watch(parser: argparse._ActionsContainer) -> None:
    parser.add_argument(
        "--watch", action="store_true", help="print what changed, until a task is starved (status 1) or all are done"
    )


def _samples(parser: argparse._ActionsContainer) -> None:
    """Which samples to show, and how."""
    parser.add_argument(
        "--tokenizer",
        metavar="T",
        help="a folder, a tokenizer.json, a name of Hugging Face that is on disk, or module:function, which turns a "
        "list of ids into text; default: show ids",
    )
    parser.add_argument("--where", metavar="C", help="only these, such as 'reward<0.5 and weight_version>=7'")
    parser.add_argument("--sort", metavar="NAME", help="order by this tag or field; default: the order of writing")
    parser.add_argument("--descending", action="store_true", help="the greatest first; without --sort the newest")


def _names(text: str) -> list[str]:
    return text.split(",")


def top(parser: argparse.ArgumentParser) -> Command:
    """`dataplane top`."""
    parser.add_argument("config", metavar="CONFIG", help=_CONFIG)
    parser.add_argument("partition", nargs="?", metavar="PARTITION", help="this one, with its fields; default: all")
    printed = parser.add_argument_group("printed, as it also is in a pipe")
    printed.add_argument("--once", action="store_true", help="print, and end")
    printed.add_argument("--json", action="store_true", help="print JSON, and end")
    _watch(printed)
    printed.add_argument(
        "--interval", type=float, default=0.0, metavar="S", help="look again after S seconds, for rates"
    )
    printed.add_argument("--stacks", action="store_true", help="also what the clients on this host do, by py-spy")
    live = parser.add_argument_group("live")
    live.add_argument("--samples", action="store_true", help="also the samples, and what the model wrote (key t)")
    _samples(live)
    return _runs("_top")


def why(parser: argparse.ArgumentParser) -> Command:
    """`dataplane why`."""
    parser.add_argument("config", metavar="CONFIG", help=_CONFIG)
    parser.add_argument("task", nargs="?", metavar="TASK", help="a task; default: all")
    parser.add_argument("--partition", metavar="NAME", help="look at this partition only")
    parser.add_argument("--json", action="store_true", help="print JSON, one line for each look")
    _watch(parser)
    return _runs("_top", "why")


def read(parser: argparse.ArgumentParser) -> Command:
    """`dataplane read`."""
    parser.add_argument("config", metavar="CONFIG", help=_OR_FOLDER)
    parser.add_argument("partition", nargs="?", metavar="PARTITION", help="default: the only one")
    _samples(parser)
    parser.add_argument("--group", metavar="G", help="the answers to one prompt: G_g0, G_g1, ..., or their rows")
    parser.add_argument("--limit", type=int, metavar="N", help="at most N samples; default: 20, on a page 2000")
    parser.add_argument("--fields", metavar="A,B", type=_names, help="read these fields only")
    parser.add_argument("--images", metavar="DIR", help="write small pictures of images there (needs Pillow)")
    _json(parser)
    parser.add_argument("--html", metavar="FILE", help="write a page that needs no server and no network")
    return _runs("_read")


def audit(parser: argparse.ArgumentParser) -> Command:
    """`dataplane audit`."""
    parser.add_argument("folder", metavar="FOLDER", help="the folder of the middleware recorder")
    parser.add_argument("other", nargs="?", metavar="OTHER", help="another one: show where the runs differ")
    shown = parser.add_mutually_exclusive_group()
    shown.add_argument("--step", type=int, metavar="N", help="show the samples of step N")
    shown.add_argument("--steps", metavar="A:B", help="show these steps; default: the first and the last ones")
    parser.add_argument(
        "--task", metavar="NAME", help="the task that trains; default: that of the role that marks steps"
    )
    _json(parser)
    parser.add_argument("--html", metavar="FILE", help="write a page with a picture of how samples moved")
    return _runs("_audit")


def export(parser: argparse.ArgumentParser) -> Command:
    """`dataplane export`."""
    parser.add_argument("config", metavar="CONFIG", help=_OR_FOLDER)
    parser.add_argument("partition", metavar="PARTITION")
    parser.add_argument("folder", metavar="OUT", help="a new folder, which gets the shards")
    parser.add_argument("--fields", metavar="A,B", type=_names, help="these fields only")
    parser.add_argument("--where", metavar="C", help="only these, such as 'reward>0.5 and weight_version>=7'")
    parser.add_argument("--partial", action="store_true", help="also rows that lack fields, with nulls; not --follow")
    parser.add_argument(
        "--as", choices=["rows", "messages"], default="rows", dest="form", help="messages: chats for fine-tuning"
    )
    parser.add_argument("--tokenizer", metavar="T", help="for messages without kept turns; as for dataplane read")
    parser.add_argument(
        "--shard-bytes", default="256MiB", metavar="N", help="size of a shard before compression; default: 256MiB"
    )
    following = parser.add_argument_group("to go on with what is finished later")
    following.add_argument("--follow", action="store_true", help="until the partition is finished, or Ctrl-C")
    following.add_argument(
        "--task", metavar="NAME", help="the task that follows, for this folder alone; default: one of its own"
    )
    following.add_argument(
        "--every", type=float, default=60.0, metavar="S", help="a shard at least every S seconds; default: 60"
    )
    following.add_argument("--idle", type=float, metavar="S", help="end once no row came for S seconds")
    return _runs("_export")


def metrics(parser: argparse.ArgumentParser) -> Command:
    """`dataplane metrics`."""
    parser.add_argument("config", metavar="CONFIG", help=_CONFIG)
    parser.add_argument("--host", default="127.0.0.1", help="the address to listen on; default: 127.0.0.1")
    parser.add_argument("--port", type=int, default=0, help="its port; default: a free one, which is printed")
    return _runs("_metrics")
