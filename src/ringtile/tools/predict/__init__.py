"""What attention over many ranks will cost: traffic, balance, memory and time, and the cheapest layout."""

from ringtile.tools.predict.cheapest import ModelCost as ModelCost
from ringtile.tools.predict.cheapest import cheapest_for_model as cheapest_for_model
from ringtile.tools.predict.cheapest import cheapest_layout as cheapest_layout
from ringtile.tools.predict.hardware import Hardware as Hardware
from ringtile.tools.predict.hardware import Sizes as Sizes
