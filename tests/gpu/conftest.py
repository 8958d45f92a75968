import fcntl
import os
import sys
import tempfile

import pytest
import torch

KEPT_BYTES = 2 << 30
LOCK = f"{tempfile.gettempdir()}/tilewright-{os.getuid()}"


class Told:
    """Tells a failure of another process at once: a run that is cut off has no summary."""

    def __init__(self, reporter):
        self.reporter = reporter

    def pytest_runtest_logreport(self, report):
        if report.failed and hasattr(report, "node"):  # as xdist hands it on
            self.reporter.write_line(f"{report.nodeid}, {report.duration:.1f} s:\n{report.longreprtext[-2000:]}")


@pytest.hookimpl(trylast=True)  # behind the terminal's
def pytest_configure(config):
    if "PYTEST_XDIST_WORKER" not in os.environ:
        config.pluginmanager.register(Told(config.pluginmanager.getplugin("terminalreporter")))


def pytest_collection_modifyitems(items):
    if torch.cuda.is_available():
        return
    skip = pytest.mark.skip(reason="no CUDA GPU")
    for item in items:
        if "tests/gpu" in item.nodeid or "gpu" in str(item.path):
            item.add_marker(skip)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item):
    """A fault of a GPU fails every later test of its process, so that process ends here.

    One of several (`-n`) ends as a crash in this test, and another process takes the rest.
    """
    report = yield
    if not faulted():
        return report
    what = f"{item.nodeid}: a fault of a GPU, after which this process can run nothing\n{report.longreprtext}"
    if "PYTEST_XDIST_WORKER" not in os.environ:
        pytest.exit(what, returncode=1)
    with item.config.pluginmanager.getplugin("capturemanager").global_and_fixture_disabled():
        print(what, file=sys.stderr, flush=True)
    os._exit(1)


def faulted() -> bool:
    """Whether a GPU met one. Waits for all, so that it is this test's."""
    try:
        for index in range(torch.cuda.device_count() if torch.cuda.is_initialized() else 0):
            torch.cuda.synchronize(index)
    except RuntimeError:
        return True
    return False


@pytest.fixture
def gpu() -> torch.device:
    return torch.device("cuda", torch.cuda.current_device())


@pytest.fixture(autouse=True)
def no_grad():
    with torch.inference_mode():
        yield


@pytest.fixture(autouse=True)
def give_back():
    """Memory that a test took goes back: several processes share the GPU."""
    yield
    if torch.cuda.is_available() and torch.cuda.memory_reserved() > KEPT_BYTES:
        torch.cuda.empty_cache()


@pytest.fixture(autouse=True)
def turn(request):
    """A test marked `alone` times something: the tests of other processes end first, and wait.

    Two locks, so that those that come later cannot keep it waiting.
    """
    kind = fcntl.LOCK_EX if request.node.get_closest_marker("alone") else fcntl.LOCK_SH
    with open(f"{LOCK}-queue", "w") as queue, open(f"{LOCK}-turn", "w") as turn:
        fcntl.flock(queue, kind)
        fcntl.flock(turn, kind)
        if kind == fcntl.LOCK_SH:
            fcntl.flock(queue, fcntl.LOCK_UN)
        yield


@pytest.fixture
def compilations(monkeypatch):
    """A list that grows by one name for every kernel compiled while the test runs."""
    import cuda.tile as ct

    names: list[str] = []
    compile_ = ct.kernel._compile

    def counting(self, *args, **kwargs):
        names.append(self._pyfunc.__name__)
        return compile_(self, *args, **kwargs)

    monkeypatch.setattr(ct.kernel, "_compile", counting)
    return names
