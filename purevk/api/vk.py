"""The raw Vulkan calls: types, constants, the loader library, and VkResult codes as typed errors.

Types come from the cffi definitions of the `vulkan` package. Only those are used: its Python
wrappers build every struct anew on each call, which costs ten times the call itself, and importing
them opens the loader. Here the loader is opened by `library()`, when the first instance is made.
"""

from __future__ import annotations

import functools
import importlib.util
import os
import sys
import threading
from typing import Any, NoReturn

from purevk import knobs
from purevk.api import declarations
from purevk.errors import DeviceError, DeviceLostError, OutOfDeviceMemoryError


def _load_ffi() -> Any:
    spec = importlib.util.find_spec("vulkan")
    for folder in (spec.submodule_search_locations if spec else None) or ():
        path = os.path.join(folder, "_vulkancache.py")
        if os.path.exists(path):
            own = importlib.util.spec_from_file_location("purevk.api._vulkan_types", path)
            assert own is not None and own.loader is not None  # so for every path to a .py file
            module = importlib.util.module_from_spec(own)
            own.loader.exec_module(module)
            declarations.build(module.ffi)
            return module.ffi
    raise DeviceError(
        "The Python package 'vulkan' is missing, or is one of another version",
        why="purevk takes its Vulkan types from it",
        next='pip install "vulkan>=1.3.275,<1.4"',
    )


ffi = _load_ffi()
const = ffi.integer_const
NULL = ffi.NULL
WHOLE_SIZE = 2**64 - 1

_LOADERS = {
    "win32": ("vulkan-1.dll",),
    "darwin": ("libvulkan.1.dylib", "libvulkan.dylib", "libMoltenVK.dylib"),
}
_LINUX_LOADERS = ("libvulkan.so.1", "libvulkan.so")
# Where Homebrew puts libraries. dlopen does not look there on Apple's own processors.
_HOMEBREW = ("/opt/homebrew/lib", "/usr/local/lib")
_HOW_TO_INSTALL = {
    "win32": "install the graphics driver from the maker of the GPU, which brings vulkan-1.dll",
    "darwin": "install MoltenVK and the loader: brew install molten-vk vulkan-loader",
}
_LOADER_NEXT = _HOW_TO_INSTALL.get(
    sys.platform,
    "install a Vulkan driver; on Debian or Ubuntu: apt-get install mesa-vulkan-drivers libvulkan1",
)
_lock = threading.Lock()
_opened: Any = None


def library() -> Any:
    """The Vulkan loader, opened once a process.

    Raises:
        DeviceError: no loader is installed.
    """
    global _opened
    with _lock:
        if _opened is None:
            names = loader_names(sys.platform, knobs.VULKAN_SDK())
            reasons = []
            for name in names:
                try:
                    _opened = ffi.dlopen(name)
                    break
                except OSError as error:
                    reasons.append(str(error))
            else:
                raise DeviceError(
                    "No Vulkan loader on this machine",
                    where=", ".join(names),
                    why="; ".join(reasons),
                    next=_LOADER_NEXT,
                )
        return _opened


def loader_names(platform: str, sdk: str) -> list[str]:
    """Where the Vulkan loader may be, the first first.

    Args:
        platform: `sys.platform`.
        sdk: the folder of the Vulkan SDK, or "".
    """
    names = list(_LOADERS.get(platform, _LINUX_LOADERS))
    folders = [f"{sdk}/lib"] if sdk and platform != "win32" else []
    if platform == "darwin":
        folders += _HOMEBREW
    return names + [f"{folder}/{names[0]}" for folder in folders]


class Functions:
    """Function pointers of one instance or device, looked up on first use:
    `functions.vkCmdDispatch(...)`."""

    def __init__(self, get_address: Any, owner: Any) -> None:
        self._get_address, self._owner = get_address, owner

    def close(self) -> None:
        """Forgets all functions, because what they belong to was destroyed. Each later use raises
        DeviceError: a driver that is asked with a destroyed handle crashes the process."""
        self.__dict__.clear()

    def __getattr__(self, name: str) -> Any:
        if not name.startswith("vk"):
            raise AttributeError(name)
        pointer = self.address(name)
        if pointer == NULL:
            raise DeviceError(f"The Vulkan driver has no {name}", next="update the driver")
        function = ffi.cast("PFN_" + name, pointer)
        setattr(self, name, function)
        return function

    def has(self, name: str) -> bool:
        """Whether the driver offers the function."""
        return bool(self.address(name) != NULL)

    def address(self, name: str) -> Any:
        """The address of a function, or NULL."""
        get_address, owner = (self.__dict__.get(key) for key in ("_get_address", "_owner"))
        if get_address is None or owner is None:
            raise DeviceError(
                f"{name} was called after its instance or device was closed",
                next="make a new instance or device",
            )
        return get_address(owner, name.encode())


@functools.cache
def _structure_types() -> dict[str, int]:
    elements = ffi.typeof("VkStructureType").relements
    return {
        name.removeprefix("VK_STRUCTURE_TYPE_").replace("_", ""): value
        for name, value in elements.items()
    }


@functools.cache
def structure_type(name: str) -> int:
    """The `sType` of a struct: `VkFooBarKHR` -> `VK_STRUCTURE_TYPE_FOO_BAR_KHR`."""
    return _structure_types()[name.removeprefix("Vk").upper()]


def struct(name: str, next: Any = NULL, **fields: Any) -> Any:
    """A new struct with its `sType` set. What its pointers point to must be kept alive by the
    caller."""
    fields["sType"] = structure_type(name)
    fields["pNext"] = next
    return ffi.new(name + " *", fields)


def words(structure: int, count: int, next: Any = NULL) -> Any:
    """A struct that the package does not know, as 32-bit words: `sType`, padding, `pNext`, `count`
    words from [4]."""
    data = ffi.new("uint32_t[]", 4 + count + (count & 1))
    data[0] = structure
    ffi.cast("uintptr_t *", data)[1] = int(ffi.cast("uintptr_t", next))
    return data


def enumerate_all(name: str, function: Any, kind: str, *arguments: Any) -> list[Any]:
    """The items that a Vulkan function lists: handles, or pointers to structs (each owns its
    bytes).

    The function is called twice, for the count and then for the items; structs get their `sType` if
    they have one.
    """
    element = ffi.typeof(kind)
    is_struct = element.kind == "struct"
    typed = is_struct and dict(element.fields).get("sType") is not None
    count = ffi.new("uint32_t *")
    while True:
        check(function(*arguments, count, NULL) or 0, name)
        array = ffi.new(kind + "[]", max(count[0], 1))
        if typed:
            for index in range(count[0]):
                array[index].sType = structure_type(kind)
        result = function(*arguments, count, array) or 0
        if result != INCOMPLETE:
            check(result, name)
            break
    if not is_struct:
        return [array[index] for index in range(count[0])]
    items = []
    for index in range(count[0]):
        item = ffi.new(kind + " *")
        ffi.memmove(item, array + index, ffi.sizeof(element))
        items.append(item)
    return items


def text(array: Any) -> str:
    """The text of a zero-terminated char array."""
    data: bytes = ffi.string(array)
    return data.decode("utf-8", "replace")


def version(number: int) -> tuple[int, int, int]:
    """(major, minor, patch) of a packed Vulkan version."""
    return number >> 22 & 0x7F, number >> 12 & 0x3FF, number & 0xFFF


INCOMPLETE = const("VK_INCOMPLETE")
_RESULTS: dict[
    int, str
] = {}  # the shortest name of each code: extensions that became core left longer ones behind
for _name, _value in sorted(
    ffi.typeof("VkResult").relements.items(), key=lambda item: -len(item[0])
):
    _RESULTS[_value] = _name
_MEMORY = {const("VK_ERROR_OUT_OF_DEVICE_MEMORY"), const("VK_ERROR_OUT_OF_HOST_MEMORY")}
_MEMORY |= {
    const("VK_ERROR_OUT_OF_POOL_MEMORY"),
    const("VK_ERROR_FRAGMENTED_POOL"),
    const("VK_ERROR_TOO_MANY_OBJECTS"),
}
_LOST = const("VK_ERROR_DEVICE_LOST")
_ADVICE = {
    const("VK_ERROR_INCOMPATIBLE_DRIVER"): _LOADER_NEXT,
    const(
        "VK_ERROR_INITIALIZATION_FAILED"
    ): "check that the driver is installed and that this user may open the device",
    const(
        "VK_ERROR_LAYER_NOT_PRESENT"
    ): "install the layer; on Debian or Ubuntu: apt-get install vulkan-validationlayers",
    const(
        "VK_ERROR_EXTENSION_NOT_PRESENT"
    ): "update the driver, or switch the feature off with PUREVK_DISABLE",
    const(
        "VK_ERROR_FEATURE_NOT_PRESENT"
    ): "update the driver, or switch the feature off with PUREVK_DISABLE",
}


def result_name(result: int) -> str:
    """The name of a VkResult."""
    return _RESULTS.get(result, f"VkResult {result}")


def check(result: int, call: str, where: str = "", next: str = "") -> None:
    """Raises the typed error of a VkResult other than success (0, or a positive status)."""
    if result < 0:
        fail(result, call, where, next)


def fail(result: int, call: str, where: str = "", next: str = "") -> NoReturn:
    """Raises the typed error of a failed call: OutOfDeviceMemoryError, DeviceLostError or
    DeviceError."""
    what = f"{call} failed with {result_name(result)}"
    if result in _MEMORY:
        advice = (
            next
            or "use a smaller batch or bound, half precision, or free other programs on the device"
        )
        raise OutOfDeviceMemoryError(
            what, where=where, why="the driver could not allocate", next=advice
        )
    if result == _LOST:
        why = "the driver was reset, or a kernel ran for too long or out of bounds"
        advice = (
            next or "make a new device; run once with PUREVK_VALIDATION=1 to find a faulty access"
        )
        raise DeviceLostError(what, where=where, why=why, next=advice)
    raise DeviceError(
        what,
        where=where,
        next=next or _ADVICE.get(result, "run with PUREVK_VALIDATION=1 for the reason"),
    )
