"""Chooses the config of a call if no table has a row: one cost model for every op, with constants
fitted to measured times.

An op states `Choices`: candidates, what is legal, and the work of each; `ordered` does the rest. It
knows no op and launches nothing.
"""

from .choose import Choices, Model, Ordered, forget, model_of, ordered
from .cost import us
from .rates import Rates, rates
from .work import Work

__all__ = ["Choices", "Model", "Ordered", "Rates", "Work", "forget", "model_of", "ordered", "rates", "us"]
