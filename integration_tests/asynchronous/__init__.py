"""Asynchronous saving on real ranks, over real folders: overlap, death of workers and trainers, leaks."""
