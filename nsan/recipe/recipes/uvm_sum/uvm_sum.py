"""The recipe `uvm_sum`, as `nsys recipe` looks for it."""

import sys

try:
    from nsan.recipe.plugin import UmRecipe
    from nsan.recipe.um_sum import PLAN
except ImportError as error:
    msg = f"{error}. {sys.executable} runs this recipe: `pip install 'nsan[recipe]'` for it, or put the Python that has nsan first on PATH."
    raise ImportError(msg) from None
from nsys_recipe.lib import recipe


class UvmSum(UmRecipe, recipe.Recipe):
    """Unified Memory of each report, and of all."""

    plan = PLAN
