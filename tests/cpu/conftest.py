"""Fixtures and settings of many test files."""

import gc
import signal

import pytest
import torch

from tilewright.interpret import front_end


def pytest_collection_modifyitems(items):
    """Slow tests first: at the end, one would leave the other processes of a run without work."""
    items.sort(key=lambda item: item.get_closest_marker("slow") is None)


def pytest_collection_finish():
    """Less garbage collection, which took a fifth of the time: cuda-tile's front end makes millions
    of objects. Kernels that are compiled are typed as quickly as those that are interpreted.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(200_000, 20, 100)
    front_end.remember()


@pytest.fixture(autouse=True)
def no_alarm_outlives_a_test():
    """It would end whatever test runs seconds later, and the process with it."""
    yield
    assert signal.alarm(0) == 0


@pytest.fixture
def inference():
    """No gradients, and the same random numbers on every run."""
    torch.manual_seed(11)
    with torch.inference_mode():
        yield
