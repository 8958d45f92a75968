"""Environment variables that the package reads, and the ones that were probably meant as one."""

import warnings
from collections.abc import Iterable

from .names import nearest

PREFIX = "TILEWRIGHT_"
KNOWN = ("TILEWRIGHT_API_KEY", "TILEWRIGHT_CACHE_DIR", "TILEWRIGHT_CHECK", "TILEWRIGHT_SHOW_PLANS")
VALUES = {"TILEWRIGHT_CHECK": ("1",), "TILEWRIGHT_SHOW_PLANS": ("1", "log")}  # that switch something on
ELSEWHERE = ("TILEWRIGHT_TEST_",)  # of tests


def warn_of_unknown(names: Iterable[str]) -> None:
    """One warning for all variables that begin like ours and are none, with the nearest ones."""
    unknown = sorted(name for name in names if name.upper().startswith(PREFIX) and name not in KNOWN and not name.startswith(ELSEWHERE))
    if not unknown:
        return
    said = []
    for name in unknown[:8]:
        near = nearest(name[len(PREFIX) :], [known.removeprefix(PREFIX) for known in KNOWN])
        said.append(f"{name[:80]} ({PREFIX}{near} is one)" if near else name[:80])
    told = ", ".join(said) + (", ..." if len(unknown) > 8 else "")
    warnings.warn(f"environment: no variable of tilewright is called {told}; they are {', '.join(KNOWN)}", RuntimeWarning, stacklevel=3)


def warn_of_value(name: str, value: str) -> None:
    """A warning if a value that switches something on is none of those that do: `off` did."""
    if value not in VALUES[name]:
        be = ", ".join(("0", *VALUES[name][:-1])) + f" or {VALUES[name][-1]}"
        warnings.warn(f"environment: {name} must be {be}, got {value!r:.80}, which counts as 1", RuntimeWarning, stacklevel=3)
