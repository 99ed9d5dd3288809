"""``python -m nsan`` is the command line."""

from nsan.cli import main

raise SystemExit(main())
