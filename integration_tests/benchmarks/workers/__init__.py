"""What runs inside the processes that are measured, each in the environment of one library.

A module here imports the standard library, numpy, and what its own library brings; nothing of the harness.
"""
