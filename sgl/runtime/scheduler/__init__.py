"""Decides what each step computes. Plain ints and NumPy; whatever touches the device is the runner's."""
