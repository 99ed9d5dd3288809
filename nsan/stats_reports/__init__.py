"""Reports for `nsys stats`: what its own `um_*` reports should say of Unified Memory.

The folder is what ``NSYS_STATS_REPORT_PATH`` or ``nsys stats --report-dir`` points at. Each ``nsan_um_*.py``
is one report, a script for the interface that comes with nsys (``nsysstats``), which is imported where
it runs and of which nothing is kept here. nsys runs scripts in a Python 3.8 of its own that has no other
packages: these files use the standard library only, in the words of 3.8. The rules are those of
:mod:`nsan.analysis`, so the figures are the same.
"""
