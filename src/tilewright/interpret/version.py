"""The cuda-tile releases whose typed IR this interpreter knows.

Imported before anything that uses a private name of cuda-tile.
"""

from importlib.metadata import version

SUPPORTED = ("1.7",)


def require_supported_cuda_tile() -> None:
    """Raises ImportError unless the installed cuda-tile is supported."""
    found = version("cuda-tile")
    if ".".join(found.split(".")[:2]) not in SUPPORTED:
        raise ImportError(
            f"tilewright reads the typed IR of cuda-tile {' or '.join(SUPPORTED)} to run kernels on a CPU, found {found}: "
            f"pip install 'cuda-tile=={SUPPORTED[-1]}.*'"
        )


require_supported_cuda_tile()
