"""What attention over many ranks will cost: traffic, balance, memory and time, and the cheapest layout."""

from ringtile.tools.predict.cheapest import (
    ModelCost as ModelCost,
    cheapest_for_model as cheapest_for_model,
    cheapest_layout as cheapest_layout,
)
from ringtile.tools.predict.hardware import Hardware as Hardware, Sizes as Sizes
