"""Fixtures and settings of many test files."""

import atexit
import gc
import os
import shutil
import signal
import tempfile
import types
from pathlib import Path

import binaries
import pytest

# torch and tilewright are imported below: pytest-xdist's first process, which runs no test, needs
# neither, and its workers start only when it has read this file.
os.environ["TORCH_DYNAMO_RUN_GC_AFTER_COMPILE"] = "0"  # 12 s of the suite; before torch._dynamo is imported
gc.disable()  # until all tests are collected: what is imported stays
atexit.register(gc.freeze)  # what is left at the end goes with the process


def pytest_configure(config):
    """A cache folder that holds the record of binaries, and nothing of the user's. The workers of
    pytest-xdist inherit it.
    """
    if not os.environ.get("TILEWRIGHT_CACHE_DIR"):
        os.environ["TILEWRIGHT_CACHE_DIR"] = folder = tempfile.mkdtemp(prefix="tilewright-tests-")
        config.add_cleanup(lambda: shutil.rmtree(folder, ignore_errors=True))
        config.add_cleanup(lambda: os.environ.pop("TILEWRIGHT_CACHE_DIR"))
        binaries.seed(Path(folder))


def pytest_collection_modifyitems(items):
    """Slow tests first: at the end, one would leave the other processes of a run without work. Then
    tests of models: they run the same kernels, which the process that has most of them types once.
    For the same reason a file's tests of one op stand together.
    """
    of_models = {item.module: _of_models(item.module) for item in items}
    first: dict[object, int] = {}
    places = {item: first.setdefault(_op_of(item) or item, place) for place, item in enumerate(items)}
    items.sort(key=lambda item: (item.get_closest_marker("slow") is None, not of_models[item.module], places[item]))


def _op_of(item):
    call = getattr(item, "callspec", None)
    return (item.module, call.params["op"]) if call is not None and isinstance(call.params.get("op"), types.ModuleType) else None


def _of_models(module):
    owners = {getattr(value, "__module__", None) or "" for value in vars(module).values()}
    return any(owner.startswith(("tilewright.engine", "tilewright.models")) for owner in owners)


def pytest_collection_finish():
    """Less garbage collection, which took a fifth of the time: cuda-tile's front end makes millions
    of objects. What outlives a full collection, of which each server that stops asks for several,
    is not looked at again. Kernels that are compiled are typed as quickly as those that are
    interpreted.
    """
    from tilewright.interpret import front_end

    gc.freeze()  # with little garbage: to find it takes 0.8 s
    gc.enable()
    gc.set_threshold(1_000_000, 20, 100)
    gc.callbacks.append(lambda phase, info: gc.freeze() if phase == "stop" and info["generation"] == 2 else None)
    front_end.remember()


@pytest.fixture(autouse=True)
def no_alarm_outlives_a_test():
    """It would end whatever test runs seconds later, and the process with it."""
    yield
    assert signal.alarm(0) == 0


@pytest.fixture
def inference():
    """No gradients, and the same random numbers on every run."""
    import torch

    torch.default_generator.manual_seed(11)  # torch.manual_seed asks for every other device: 0.2 ms a test
    with torch.inference_mode():
        yield
