"""Where Keras looks for keras_qat's classes when it loads a file and keras_qat is not imported.

tf-keras writes `tf_` before every module name that begins with `keras`, as it does for its own.
"""

import sys

import keras_qat

for _name, _module in list(sys.modules.items()):
    if _name.startswith(f"{keras_qat.__name__}."):
        sys.modules[f"tf_{_name}"] = _module
