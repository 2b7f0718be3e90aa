"""`python -m threepass`."""

from .cli import main

raise SystemExit(main())
