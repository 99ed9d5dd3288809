"""A fuzzer: exports, table folders, snapshots, nvprof files and truth tables, damaged and hostile.

An input is made of its kind and a seed alone, so that any can be made again. A worker process of its
own reads it as a user would, and compares every total with plain SQL, or a plain reading, of the same
file. ``PYTHONPATH=tests python -m fuzz --help`` says how to run it.
"""
