"""Sends each request and each program to one of several workers, and answers for them."""
