"""Plug-ins for `nsys recipe`: Unified Memory over many reports, in the vendor's own framework.

Each folder `uvm_*` is a recipe as the framework wants it: `metadata.json`, a module and a notebook. The
module only names the recipe; the rest is here. The vendor's package is imported when it runs a recipe,
and of it nothing but the base class of recipes and its arguments: the data come from nsan's own reader.
"""
