"""Judgement of a resumed run: comparison with the uninterrupted run, known omissions, and the report."""
