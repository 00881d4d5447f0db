"""The commands of `dataplane` in an environment that has core and the kit, but not the tools."""

LOADED = """
import sys
from dataplane_core.cli import main
try:
    main(sys.argv[1:])
finally:
    print(sorted(name for name in ("dataplane_testkit", "torch") if name in sys.modules))
"""


def test_a_command_of_a_package_that_is_not_installed_says_which_to_install(clean):
    done = clean.run("dataplane", "top", "run.yaml")
    assert done.returncode == 1
    assert "Install 'top' with: pip install dataplane-tools" in done.stderr
    assert "(pip install dataplane-tools)" in " ".join(clean.run("dataplane", "--help").stdout.split())


def test_only_the_command_that_is_named_is_imported(clean):
    assert clean.run("python", "-c", LOADED, "--help").stdout.splitlines()[-1] == "[]"
    assert clean.run("python", "-c", LOADED, "doctor", "--help").stdout.splitlines()[-1] == "[]"
    assert clean.run("python", "-c", LOADED, "conformance", "--help").stdout.splitlines()[-1] == "['dataplane_testkit']"
