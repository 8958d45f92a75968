"""Errors about a name that is none of those known: the nearest first."""

import difflib
from collections.abc import Collection, Iterable

ALIKE = 0.7  # of the characters: at 0.6 "all" is meant to be "llm"


def nearest(name: object, known: Iterable[str]) -> str | None:
    """The known name that is most like this one, in whichever case; None if none is.

    A beginning of at least three letters is meant to be the first name that begins so.
    """
    by_lower, word = {each.lower(): each for each in known}, str(name)[:100].lower()
    begun = [each for each in by_lower if each.startswith(word) and len(word) >= 3]
    found = begun or difflib.get_close_matches(word, by_lower, 1, ALIKE)
    return by_lower[found[0]] if found else None


def check_name(what: str, known: Collection[str], name: str) -> None:
    """Raises ValueError, which names the nearest known name, unless the name is known."""
    if not isinstance(name, str) or name not in known:
        raise ValueError(f"{what} must be {one_of(known, name)}, got {name!r:.80}")


def one_of(known: Iterable[str], name: object) -> str:
    """What a name must be."""
    known = list(known)
    near = nearest(name, known)
    return (f"{near} (did you mean that?) or " if near is not None else "") + f"one of {', '.join(known)}"
