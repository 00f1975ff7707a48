"""Imported first by the process that engines fork from: on Linux that ends with its parent at once. By itself it looks
whether there is one when it has imported all."""

import ctypes
import signal
import sys

_PR_SET_PDEATHSIG = 1

if sys.platform == "linux" and "multiprocessing.forkserver" in sys.orig_argv[-1]:
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
