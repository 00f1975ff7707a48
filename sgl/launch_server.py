"""`python -m sgl.launch_server`: `sgl serve` with the original's flags.

It imports nothing from the working folder but sgl itself."""

import sys

if not sys.flags.safe_path and __name__ == "__main__":
    here = sys.path.pop(0)
    if __file__.startswith(here):
        sys.path.append(here)

from sgl.cli.launch_server import main

if __name__ == "__main__":
    main()
