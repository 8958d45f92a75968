"""What both kernels say of their arrays."""

from typing import Annotated, Any

import cuda.tile as ct

# Arrays whose shapes and strides are known when compiling: a tile is then one address and constant offsets from it.
Vector = Annotated[Any, ct.ArrayAnnotation(static_shape_dims=(0,), static_stride_dims=(0,))]
Matrix = Annotated[Any, ct.ArrayAnnotation(static_shape_dims=(0, 1), static_stride_dims=(0, 1))]
Stack = Annotated[Any, ct.ArrayAnnotation(static_shape_dims=(0, 1, 2), static_stride_dims=(0, 1, 2))]
Stacks = Annotated[Any, ct.ArrayAnnotation(static_shape_dims=(0, 1, 2, 3), static_stride_dims=(0, 1, 2, 3))]


def store_inside(array, index, tile):
    """A tile that lies inside its array, by the threads that have it."""
    ct.store(array, index, tile, check_bounds=False, allow_tma=False)
