"""What `import sgl` costs a program, in milliseconds beyond the interpreter's own start: median and fastest of 15.

Bar: under 150 ms. Run by `make bench-import`.
"""

from __future__ import annotations

import statistics
import subprocess
import sys
import time

RUNS = 15


def seconds_to_run(code: str) -> float:
    """Wall seconds of a fresh interpreter that runs `code`."""
    start = time.perf_counter()
    subprocess.run([sys.executable, "-c", code], check=True)
    return time.perf_counter() - start


def main() -> None:
    """Time bare and importing interpreters in turns, so that a busy machine slows both alike."""
    seconds_to_run("import sgl")  # writes the byte code
    bare, importing = zip(
        *[(seconds_to_run("pass"), seconds_to_run("import sgl")) for _ in range(RUNS)], strict=True
    )
    median = 1e3 * (statistics.median(importing) - statistics.median(bare))
    fastest = 1e3 * (min(importing) - min(bare))
    print(f"import sgl: {median:.1f} ms median, {fastest:.1f} ms fastest of {RUNS} (bar: 150 ms)")


if __name__ == "__main__":
    main()
