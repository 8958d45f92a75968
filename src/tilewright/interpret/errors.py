"""The errors that show a kernel's bug to its author."""

import linecache

Place = tuple[str, int, str]  # file, line, function


class KernelError(Exception):
    """A bug found by running the kernel: an access out of bounds, a race, a read of unwritten
    memory, undefined arithmetic.

    what: the bug itself, with the values involved.
    kernel: name of the kernel.
    places: (file, line, function), from the statement at fault out to the kernel's own line.
    block, grid: the block that was running and the number of blocks.
    """

    what: str = ""
    kernel: str = ""
    places: tuple[Place, ...] = ()
    block: tuple[int, ...] | None = None
    grid: tuple[int, ...] | None = None

    def __init__(self, what: str):
        super().__init__(what)
        self.what = what

    def place(self, kernel: str, places: tuple[Place, ...], block: tuple[int, ...], grid: tuple[int, ...]) -> None:
        """Adds a place to the message."""
        if self.block is None:
            self.kernel, self.places, self.block, self.grid = kernel, places, block, grid

    def __str__(self) -> str:
        if self.block is None:
            return self.what
        lines = [self.what, f"  in {self.kernel}, block {self.block} of {self.grid}"]
        for file, line, function in self.places:
            lines.append(f'  File "{file}", line {line}, in {function}')
            source = linecache.getline(file, line).strip()
            if source:
                lines.append(f"    {source}")
        return "\n".join(lines)


class Deadlock(KernelError):
    """Blocks wait for one another and none can continue, or a block never ends."""
