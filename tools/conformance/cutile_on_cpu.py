"""A pytest plugin that runs cuTile's own test suite in the interpreter (see run.py)."""

import signal

import cpu_shim
import pytest

from tilewright.interpret import checking

cpu_shim.install()  # at import: a plugin named by -p is imported before the tests' conftest


def pytest_addoption(parser):
    group = parser.getgroup("cutile_on_cpu")
    group.addoption("--strict-memory", action="store_true", help="undefined reads of memory are errors, undetermined padding is poison")
    group.addoption("--races", action="store_true")
    group.addoption("--block-order", default="forward")
    group.addoption("--typed-only", action="store_true", help="run the IR as typed, before the front end's passes")
    group.addoption("--seconds", type=int, default=60, help="limit of one test")


class BenchmarkHooks:
    """The tests' conftest names it for a plugin that is not needed here."""

    def pytest_benchmark_update_json(self, config, benchmarks, output_json): ...
    def pytest_benchmark_update_machine_info(self, config, machine_info): ...
    def pytest_benchmark_group_stats(self, config, benchmarks, group_by): ...


def pytest_addhooks(pluginmanager):
    pluginmanager.add_hookspecs(BenchmarkHooks)


def pytest_configure(config):
    config.addinivalue_line("markers", "use_mlir: needs an extension this run does not have")
    config.addinivalue_line("markers", "benchmark: of pytest-benchmark")


class OutOfTime(Exception):
    pass


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_call(item):
    def stop(*args):
        raise OutOfTime

    signal.signal(signal.SIGALRM, stop)
    signal.alarm(item.config.getoption("--seconds"))
    order = item.config.getoption("--block-order")
    with checking(
        strict=item.config.getoption("--strict-memory"),
        races=item.config.getoption("--races"),
        order=int(order) if order.isdigit() else order,
        debug=item.config.getoption("--typed-only"),
    ):
        yield
    signal.alarm(0)
