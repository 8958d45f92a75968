"""Fixtures and settings of many test files."""

import gc

import pytest
import torch


def pytest_collection_finish():
    """Less garbage collection, which took a fifth of the time: cuda-tile's front end makes millions
    of objects.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, 20, 50)


@pytest.fixture
def inference():
    """No gradients, and the same random numbers on every run."""
    torch.manual_seed(11)
    with torch.inference_mode():
        yield
