"""``python -m loadtest``; see :mod:`loadtest.cli`."""

from loadtest.cli import main

raise SystemExit(main())
