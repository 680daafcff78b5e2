"""The main job on real input: train, be killed in the middle of a save, resume on other world sizes.

What lives here: a small training job, a launcher that can kill a rank, and the story that ties them together
(`python -m integration_tests.demo`, which `nox -s demo` runs). What does not: anything that a package needs.
"""
