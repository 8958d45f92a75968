"""The entry points that other engines look for."""

from collections.abc import Callable
from importlib.metadata import entry_points

import pytest

from tilewright.models import sglang_plugin, vllm_plugin


@pytest.mark.parametrize(("group", "register"), [("vllm.general_plugins", vllm_plugin.register), ("sglang.srt.plugins", sglang_plugin.register)])
def test_the_entry_point_names_the_function(group: str, register: Callable[[], None]) -> None:
    found = [point for point in entry_points(group=group) if point.name == "tilewright"]
    if not found:
        pytest.skip("the package is run from its source folder, or was installed before it had this entry point")
    assert found[0].load() is register
