"""What `dataplane doctor` finds for a backend, without the command."""

import time


def findings(backend_class, level, **options):
    """The findings of a level: what and hint of each."""
    config = backend_class.Config(**options)
    everything = backend_class.diagnose(config, deadline=time.monotonic() + 60)
    return [(finding.what, finding.hint) for finding in everything if finding.level is level]
