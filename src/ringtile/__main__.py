"""`python -m ringtile` is the `ringtile` command."""

from ringtile.cli import main

raise SystemExit(main())
