"""What a library logs before it fails: our error says it, in one line."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def unsaid(name: str) -> Iterator[list[logging.LogRecord]]:
    """Keeps what the logger of this name gets while the block runs. It is lost if the block raises,
    and logged if it does not.
    """
    logger, kept = logging.getLogger(name), list[logging.LogRecord]()

    def keep(record: logging.LogRecord) -> bool:
        kept.append(record)
        return False

    logger.addFilter(keep)
    try:
        yield kept
    finally:
        logger.removeFilter(keep)
    for record in kept:
        logger.handle(record)
