"""`python -m sgl` is the `sgl` command."""

from sgl.cli import main

if __name__ == "__main__":
    main()
