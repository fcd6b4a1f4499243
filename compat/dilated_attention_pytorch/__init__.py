"""The old import path of what is now `ringtile.compat`."""

from ringtile.compat import *  # noqa: F403
