"""The module of the test class that a fork of `run` makes. Its import brings the kit."""

import dataplane_testkit.suites.machine
import dataplane_testkit.report
from dataplane_testkit import BackendConformance as _
