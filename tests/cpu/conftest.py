"""Fixtures and settings of many test files."""

import functools
import gc
import signal

import pytest
import torch
from cuda.tile._passes import hir2ir


def pytest_collection_finish():
    """Less garbage collection, which took a fifth of the time: cuda-tile's front end makes millions
    of objects.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, 20, 50)
    hir2ir.get_signature = functools.cache(hir2ir.get_signature)  # which it asks inspect for at every call of a kernel


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
