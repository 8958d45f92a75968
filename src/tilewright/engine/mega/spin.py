"""How a wait of either kernel ends where nobody comes: in builds with a limit of looks."""

import cuda.tile as ct

RELAXED, DEVICE = ct.MemoryOrder.RELAXED, ct.MemoryScope.DEVICE


def looks_so_far(STUCK, LIMIT):
    """What a wait begins to count from: nobody waits long where one has given up."""
    looks = 0
    stuck = ct.atomic_max(STUCK, 0, 0, memory_order=RELAXED, memory_scope=DEVICE)
    if stuck > 0:
        looks = LIMIT - 1
    return looks


def give_up(STUCK, place, block):
    """Leaves place + 1 and the block in STUCK [2], if this is the first to give up."""
    if ct.atomic_cas(STUCK, 0, 0, place + 1, memory_order=RELAXED, memory_scope=DEVICE) == 0:
        ct.atomic_max(STUCK, 1, block, memory_order=RELAXED, memory_scope=DEVICE)
