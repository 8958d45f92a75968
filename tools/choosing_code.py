"""`python tools/choosing_code.py`: lines of code with which the ops state their configs, by module.

Counted are the functions inside ops/ that an op's `CHOICES` reaches. Choosing: candidates, what is
legal, families and buckets. Pricing: the work of a config, beyond what choosing reaches too. Blank
lines, comments, docstrings and tables are not code. The models of `select/` are counted whole.
"""

import inspect
import io
import tokenize
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from types import CodeType, FunctionType, ModuleType
from typing import Any

from tilewright import ops, select
from tilewright.select import Choices
from tilewright.tune.fit import choices_of

UNCOUNTED = tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER


def code_lines(source: str) -> int:
    """Without blank lines, comments and docstrings."""
    lines: set[int] = set()
    first = True
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type not in UNCOUNTED and not (first and token.type == tokenize.STRING):
            lines |= set(range(token.start[0], token.end[0] + 1))
        first = token.type in UNCOUNTED and (first or token.type != tokenize.COMMENT)
    return len(lines)


def called(function: FunctionType) -> Iterator[Any]:
    """What a function may call: globals that it names, and what of a module of ops."""
    codes, names = [function.__code__], set[str]()
    while codes:
        code = codes.pop()
        names |= set(code.co_names)
        codes += [constant for constant in code.co_consts if isinstance(constant, CodeType)]
    for found in filter(None, map(function.__globals__.get, sorted(names))):
        yield from (getattr(found, name, None) for name in names) if isinstance(found, ModuleType) else (found,)


def reached(start: Any, known: dict[tuple[str, str], int]) -> None:
    """Adds the functions of ops that are called from `start`, and their lines."""
    found = inspect.unwrap(getattr(start, "func", start))
    if isinstance(found, FunctionType) and found.__module__.startswith(ops.__name__):
        key = found.__module__, found.__qualname__
        if key not in known:
            known[key] = code_lines(inspect.getsource(found))
            for other in called(found):
                reached(other, known)


def main() -> None:
    stated: list[Choices[Any, Any]] = [choices for op in ops.ALL if (choices := choices_of(op))]
    choosing: dict[tuple[str, str], int] = {}
    for choices in stated:
        for start in (choices.candidates, choices.legal, choices.family, choices.bucket):
            reached(start, choosing)
    both = dict(choosing)
    for choices in stated:
        reached(choices.work, both)
    modules: dict[str, Counter[str]] = {}
    for key, lines in both.items():
        modules.setdefault(key[0].removeprefix(f"{ops.__name__}."), Counter())["choosing" if key in choosing else "pricing"] += lines
    print(f"{'module':32}{'choosing':>9}{'pricing':>9}")
    for name, of in sorted(modules.items()):
        print(f"{name:32}{of['choosing']:9}{of['pricing']:9}")
    parts = [sum(of[kind] for of in modules.values()) for kind in ("choosing", "pricing")]
    print(f"{'all ops':32}{parts[0]:9}{parts[1]:9}")
    print(f"{'select/':32}{sum(code_lines(path.read_text()) for path in Path(inspect.getfile(select)).parent.glob('*.py')):9}")


if __name__ == "__main__":
    main()
