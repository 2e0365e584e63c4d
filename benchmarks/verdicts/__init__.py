"""Is `verify`'s verdict right? Models that are healthy, and models that were broken on purpose.

`python -m benchmarks.verdicts` runs them. Networks and tasks are in files by subject.
"""
