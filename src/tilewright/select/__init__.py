"""Chooses the config of a call if no table has a row: one cost model for every op, with constants
fitted to measured times.

An op states `Choices`: candidates, what is legal, and the work of each; `ordered` does the rest. It
knows no op and launches nothing.
"""

from .choose import Choices as Choices, forget as forget, model_of as model_of, ordered as ordered
from .cost import us as us
from .rates import rates as rates
from .work import Work as Work
