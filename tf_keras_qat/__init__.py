"""Aliases of keras_qat's modules, for loading `.keras` files without importing keras_qat first.

tf-keras puts `tf_` in front of every module name that begins with `keras` when it saves a file,
and imports that name when it loads one. So the name has to exist at the top level.
"""

import sys

import keras_qat

for _name, _module in list(sys.modules.items()):
    if _name.startswith(f"{keras_qat.__name__}."):
        sys.modules[f"tf_{_name}"] = _module
