"""Device profiles: what the choice of kernels depends on, by device family.

- `profile.py`: `DeviceProfile`, the named numbers and capabilities of a family.
- `costs.py`, `tiles.py`: the cost models' coefficients, and the tiles among which they choose.
- `families/`: one file per family. Importing this package registers them all.
- `choices.py`: `Choices`, the kernels that `purevk tune` found to be faster than those of the models.
- `candidates.py`: `Candidate`, the form in which kernels are chosen.
- `registry.py`: `choose_profile`, which finds the profile of a device.
- `traits.py`: `DeviceTraits`, the limits and features of one device, with its profile.

Kernels and cost models ask a profile for what matters. Only this package knows vendors.
"""

from purevk.tuning import families  # noqa: F401
from purevk.tuning.choices import Choices, question
from purevk.tuning.families.default import DEFAULT
from purevk.tuning.families.software import SOFTWARE
from purevk.tuning.profile import DeviceProfile
from purevk.tuning.registry import (
    DeviceIdentity,
    Family,
    choose_profile,
    default_profile,
    register,
)
from purevk.tuning.traits import DeviceTraits

__all__ = [
    "DEFAULT",
    "SOFTWARE",
    "Choices",
    "DeviceIdentity",
    "DeviceProfile",
    "DeviceTraits",
    "Family",
    "choose_profile",
    "default_profile",
    "question",
    "register",
]
