"""The registry of device families, and the choice of a profile for a device."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from purevk import knobs
from purevk.errors import PurevkError
from purevk.tuning.profile import DeviceProfile


@dataclass(frozen=True)
class DeviceIdentity:
    """What a family recognizes its devices by.

    Attributes:
        vendor_id, device_id: `vendorID` and `deviceID` of Vulkan.
        kind: "discrete", "integrated", "virtual", "cpu" or "other".
        name, driver: the names of the device and of its driver.
        subgroup_size, min_subgroup_size: invocations per subgroup, and the fewest that a kernel may
            ask for.
        features: names of the optional features that the device offers.
    """

    vendor_id: int = 0
    device_id: int = 0
    kind: str = "other"
    name: str = ""
    driver: str = ""
    subgroup_size: int = 32
    min_subgroup_size: int = 32
    features: frozenset[str] = frozenset()


@dataclass(frozen=True)
class Family:
    """Devices that share a profile.

    Attributes:
        profile: their profile; its name is that of the family.
        matches: whether a device belongs to it.
        priority: if several families match, the highest priority wins, and among equals the one
            that was registered last. Vendors have 0; an architecture of a vendor takes 1.
    """

    profile: DeviceProfile
    matches: Callable[[DeviceIdentity], bool]
    priority: int = 0


_FAMILIES: dict[str, Family] = {}


def register(family: Family) -> Family:
    """Adds a family.

    Raises:
        ValueError: another family has its name.
    """
    name = family.profile.name
    if name in _FAMILIES:
        raise ValueError(f"a device family {name!r} is already registered")
    _FAMILIES[name] = family
    return family


def unregister(name: str) -> None:
    """Removes a family, for tests."""
    del _FAMILIES[name]


def choose_profile(device: DeviceIdentity) -> DeviceProfile:
    """The profile that `PUREVK_PROFILE` names, or that of the device's family.

    Raises:
        PurevkError: there is no profile of the name that the variable gives.
    """
    forced = _forced()
    if forced is not None:
        return forced
    matching = [family for family in _FAMILIES.values() if family.matches(device)]
    return max(reversed(matching), key=lambda family: family.priority).profile


def default_profile() -> DeviceProfile:
    """The profile for work without a device: the forced one, or the default."""
    return _forced() or _FAMILIES["default"].profile


def _forced() -> DeviceProfile | None:
    name = knobs.PROFILE()
    if not name:
        return None
    if name not in _FAMILIES:
        raise PurevkError(
            f"there is no device profile {name!r}",
            where=knobs.PROFILE.name,
            why=f"the profiles are {', '.join(_FAMILIES)}",
            next="unset the variable, or name one of these",
        )
    return _FAMILIES[name].profile
