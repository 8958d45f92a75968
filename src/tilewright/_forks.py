"""Locks that a forked child can take, whatever its parent's other threads did."""

import os
from typing import TypeVar

Lock = TypeVar("Lock")


def held_over_forks(lock: Lock) -> Lock:
    """The lock. A fork waits for it: in the child, nobody would release another thread's."""
    if hasattr(os, "register_at_fork"):
        acquire, release = getattr(lock, "acquire"), getattr(lock, "release")  # noqa: B009 locks have no common type
        os.register_at_fork(before=acquire, after_in_parent=release, after_in_child=release)
    return lock
