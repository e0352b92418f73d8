"""The device families, one file each. Importing this package imports every file here, and each file
registers its family."""

import importlib
import pkgutil

for _module in pkgutil.iter_modules(__path__, f"{__name__}."):
    importlib.import_module(_module.name)
