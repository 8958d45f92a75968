"""Where commands print: texts stay as they are."""

from typing import Any

from rich.console import Console


def plain_console(**how: Any) -> Console:
    """A console that reads nothing into a text: to rich `[b]` in a path is a style, and `:b:` a
    picture.

    how: of `rich.console.Console`. By default a long line of stdout is the terminal's to wrap.
    """
    return Console(**{"soft_wrap": not how.get("stderr"), "highlight": False, "markup": False, "emoji": False, **how})


def write(console: Console, text: str, *, bold: bool = False) -> None:
    """Writes a text letter for letter: a console prints spaces for a tab."""
    if not console.quiet:
        console.file.write(f"\x1b[1m{text}\x1b[0m" if bold and console.color_system else text)
        console.file.flush()
