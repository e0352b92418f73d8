"""The Vulkan instance: loader, validation messages, and the devices that it lists."""

from __future__ import annotations

import atexit
import os
import weakref
from typing import Any

from purevk import knobs
from purevk.api import vk
from purevk.api.physical import PhysicalDevice
from purevk.closing import Closing
from purevk.errors import DeviceError, ValidationError

_LAYER = b"VK_LAYER_KHRONOS_validation"
_DEBUG_UTILS = "VK_EXT_debug_utils"
_PORTABILITY = "VK_KHR_portability_enumeration"
_VALIDATION_FEATURES = "VK_EXT_validation_features"
_RANK = {"discrete": 0, "integrated": 1, "virtual": 2, "cpu": 3, "other": 4}
_NO_DRIVER_NEXT = (
    "install a driver; on Debian or Ubuntu: apt-get install mesa-vulkan-drivers libvulkan1; "
    "check VK_ICD_FILENAMES and VK_DRIVER_FILES if they are set"
)
_API_VERSION = (
    1,
    3,
    0,
)  # what purevk knows how to use; older loaders and devices are used as what they are
# A layer older than the driver says these of structs and extensions that it does not know: no fault
# of the caller.
_LAYER_IS_OLD = (
    "is not supported by this layer",
    "an extension that was added to a later version of the Vulkan header",
)
_made = False  # whether this process, or the one that it was forked from, has made an instance
_forked = False  # whether it was forked after that
_abandoned: list[
    _InstanceCore
] = []  # their callbacks must stay, for as long as the driver may call them


def fork_error(name: str) -> DeviceError:
    """What every call raises in a process that was forked after Vulkan was used."""
    return DeviceError(
        f"{name} cannot be used in a forked process",
        why="the threads and the connection of its driver stayed in the parent process",
        next='start the process with multiprocessing.get_context("spawn") (DataLoader:'
        ' multiprocessing_context="spawn"), and load the program there; or fork before purevk is'
        " used",
    )


def check_fork() -> None:
    """Raises DeviceError in a process that was forked after Vulkan was used."""
    if _forked:
        raise fork_error("Vulkan")


def _after_fork() -> None:
    global _forked
    _forked = _made
    for core in list(_cores):
        core.handle = None


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)


class _InstanceCore:
    """What must outlive the Python object: the handle, the messenger and its callback."""

    def __init__(self, handle: Any, functions: vk.Functions, messages: list[str]) -> None:
        self.handle, self.functions, self.messages = handle, functions, messages
        self.messenger: Any = None
        self.callback: Any = None
        self.devices: weakref.WeakSet[Any] = weakref.WeakSet()
        _cores.add(self)

    def abandon(self) -> None:
        """Leaves the instance as it is for ever: a device of it did not finish."""
        _abandoned.append(self)

    def leave(self) -> None:
        """Closes the instance and its devices because the interpreter exits."""
        if self.handle is not None:
            for device in list(self.devices):
                device.leave()
            self.close()

    def close(self) -> None:
        if self.handle is None:
            return
        for device in list(self.devices):
            device.close()
        if self in _abandoned:
            return
        handle, self.handle = self.handle, None
        if self.messenger is not None:
            self.functions.vkDestroyDebugUtilsMessengerEXT(handle, self.messenger, vk.NULL)
        self.functions.vkDestroyInstance(handle, vk.NULL)
        self.functions.close()
        self.callback = None


_cores: weakref.WeakSet[_InstanceCore] = weakref.WeakSet()


@atexit.register
def _leave() -> None:
    for core in list(_cores):
        core.leave()


class Instance(Closing):
    """A Vulkan instance.

    Args:
        validation: switches the Khronos validation layer on, with synchronization validation; None
            reads PUREVK_VALIDATION. Messages are collected, and raised by `check()`, which the
            other classes call.

    Attributes:
        api_version: (major, minor, patch) in use.
        validation: whether the layer is on.
        messages: what the layer said since the last `check()`.
        physical_devices: list of `PhysicalDevice`.

    Raises:
        DeviceError: no loader, no driver, no device, or no validation layer.
    """

    def __init__(self, validation: bool | None = None) -> None:
        global _made
        check_fork()
        _made = True
        self.validation = knobs.VALIDATION() if validation is None else validation
        self.messages: list[str] = []
        knobs.set_driver_cache()
        self._library = library = vk.library()
        get_address = library.vkGetInstanceProcAddr
        loader_version = vk.ffi.new("uint32_t *")
        pointer = get_address(vk.NULL, b"vkEnumerateInstanceVersion")
        if pointer != vk.NULL:
            vk.ffi.cast("PFN_vkEnumerateInstanceVersion", pointer)(loader_version)
        if vk.version(loader_version[0])[:2] < (1, 1):
            raise DeviceError(
                "The Vulkan loader is older than 1.1",
                why="it reports 1.0; 1.1 is the oldest that works",
                next="update libvulkan1 (or the Vulkan SDK)",
            )
        self.api_version = min(vk.version(loader_version[0]), _API_VERSION)

        names = self._extension_names(vk.NULL)
        enabled: list[Any] = []
        layers: list[Any] = []
        flags, chain = 0, vk.NULL
        kept: list[Any] = []
        if _PORTABILITY in names:
            enabled.append(_PORTABILITY)
            flags = 1  # VK_INSTANCE_CREATE_ENUMERATE_PORTABILITY_BIT_KHR
        if self.validation:
            layers, chain = self._validation_setup(names, enabled, kept)
        major, minor, patch = self.api_version
        label = vk.ffi.new("char[]", b"purevk")
        application = vk.struct(
            "VkApplicationInfo",
            pApplicationName=label,
            pEngineName=label,
            apiVersion=major << 22 | minor << 12 | patch,
        )
        layer_names, extension_names = (
            _strings(layers, kept),
            _strings([name.encode() for name in enabled], kept),
        )
        info = vk.struct(
            "VkInstanceCreateInfo",
            chain,
            flags=flags,
            pApplicationInfo=application,
            enabledLayerCount=len(layers),
            ppEnabledLayerNames=layer_names,
            enabledExtensionCount=len(enabled),
            ppEnabledExtensionNames=extension_names,
        )
        handle = vk.ffi.new("VkInstance *")
        result = library.vkCreateInstance(info, vk.NULL, handle)
        if result == vk.const("VK_ERROR_INCOMPATIBLE_DRIVER"):
            raise DeviceError(
                "No Vulkan driver on this machine",
                where="vkCreateInstance",
                why="the loader found no usable installable client driver (ICD)",
                next=_NO_DRIVER_NEXT,
            )
        vk.check(result, "vkCreateInstance")
        self.handle = handle[0]
        self.functions = vk.Functions(get_address, self.handle)
        self._core = _InstanceCore(self.handle, self.functions, self.messages)
        self._finalizer = weakref.finalize(self, self._core.close)
        self._finalizer.atexit = False  # `_leave` closes it then
        try:
            if self.validation:
                self._make_messenger()
            self.physical_devices = self._list_devices()
        except BaseException:
            self.close()
            raise

    def _extension_names(self, layer: Any) -> set[str]:
        listing = self._library.vkEnumerateInstanceExtensionProperties
        rows = vk.enumerate_all(
            "vkEnumerateInstanceExtensionProperties",
            lambda count, array: listing(layer, count, array),
            "VkExtensionProperties",
        )
        return {vk.text(row.extensionName) for row in rows}

    def _validation_setup(
        self, names: set[str], enabled: list[str], kept: list[Any]
    ) -> tuple[list[bytes], Any]:
        rows = vk.enumerate_all(
            "vkEnumerateInstanceLayerProperties",
            self._library.vkEnumerateInstanceLayerProperties,
            "VkLayerProperties",
        )
        if _LAYER.decode() not in {vk.text(row.layerName) for row in rows}:
            raise DeviceError(
                "The Vulkan validation layer is not installed",
                where="PUREVK_VALIDATION",
                why=f"no {_LAYER.decode()} among {len(rows)} layers",
                next="apt-get install vulkan-validationlayers, or unset PUREVK_VALIDATION",
            )
        layer_names = self._extension_names(_LAYER)
        if _DEBUG_UTILS not in names | layer_names:
            raise DeviceError(f"The Vulkan loader has no {_DEBUG_UTILS}", next="update libvulkan1")
        enabled.append(_DEBUG_UTILS)
        if _VALIDATION_FEATURES not in layer_names:
            return [_LAYER], vk.NULL
        enabled.append(_VALIDATION_FEATURES)
        wanted = vk.ffi.new(
            "VkValidationFeatureEnableEXT[]",
            [vk.const("VK_VALIDATION_FEATURE_ENABLE_SYNCHRONIZATION_VALIDATION_EXT")],
        )
        features = vk.struct(
            "VkValidationFeaturesEXT",
            enabledValidationFeatureCount=1,
            pEnabledValidationFeatures=wanted,
        )
        kept += [wanted, features]
        return [_LAYER], features

    def _make_messenger(self) -> None:
        messages = self.messages

        def collect(severity: int, kind: int, data: Any, user: Any) -> int:
            name = vk.text(data.pMessageIdName) if data.pMessageIdName != vk.NULL else ""
            message = vk.text(data.pMessage) if data.pMessage != vk.NULL else ""
            if not any(sign in message for sign in _LAYER_IS_OLD):
                messages.append(f"{name}: {message}")
            return 0

        callback = vk.ffi.callback("PFN_vkDebugUtilsMessengerCallbackEXT", collect)
        warning, error, validation = 0x100, 0x1000, 0x2
        info = vk.struct(
            "VkDebugUtilsMessengerCreateInfoEXT",
            messageSeverity=warning | error,
            messageType=validation,
            pfnUserCallback=callback,
        )
        messenger = vk.ffi.new("VkDebugUtilsMessengerEXT *")
        self._core.callback = callback
        result = self.functions.vkCreateDebugUtilsMessengerEXT(
            self.handle, info, vk.NULL, messenger
        )
        vk.check(result, "vkCreateDebugUtilsMessengerEXT")
        self._core.messenger = messenger[0]

    def _list_devices(self) -> list[PhysicalDevice]:
        handles = vk.enumerate_all(
            "vkEnumeratePhysicalDevices",
            self.functions.vkEnumeratePhysicalDevices,
            "VkPhysicalDevice",
            self.handle,
        )
        found: list[PhysicalDevice] = []
        old: list[str] = []
        properties = vk.ffi.new("VkPhysicalDeviceProperties *")
        for handle in handles:
            self.functions.vkGetPhysicalDeviceProperties(handle, properties)
            if vk.version(properties.apiVersion)[:2] < (1, 1):
                old.append(vk.text(properties.deviceName))
                continue
            device = PhysicalDevice(self, handle, len(found))
            if device.queue_family is not None:
                found.append(device)
            else:
                old.append(device.name)
        if not found:
            raise DeviceError(
                "No usable Vulkan device on this machine",
                where="vkEnumeratePhysicalDevices",
                why=f"{', '.join(old)} lacks Vulkan 1.1 or a compute queue"
                if old
                else "the drivers list no device",
                next=_NO_DRIVER_NEXT,
            )
        return self._visible(found)

    @staticmethod
    def _visible(found: list[PhysicalDevice]) -> list[PhysicalDevice]:
        """The devices of PUREVK_VISIBLE_DEVICES, numbered anew; all without it."""
        wanted = knobs.VISIBLE_DEVICES()
        if not wanted:
            return found
        chosen: list[PhysicalDevice] = []
        for selector in wanted:
            fitting = _fitting(found, selector)
            if not fitting:
                raise _no_device(found, selector, knobs.VISIBLE_DEVICES.name)
            chosen += [device for device in fitting if device not in chosen]
        for index, device in enumerate(chosen):
            device.index = index
        return chosen

    def pick(self, selector: str | int | None = None) -> PhysicalDevice:
        """The device that `selector` names: an index, a part of its name (any case), or its kind. None
        reads PUREVK_DEVICE; empty takes the best: discrete, then integrated, virtual, CPU.

        Raises:
            DeviceError: nothing fits, with the list of devices.
        """
        chosen = knobs.DEVICE() if selector is None else selector
        devices = self.physical_devices
        fitting = _fitting(devices, chosen)
        if fitting:
            return min(fitting, key=lambda device: (_RANK[device.kind], device.index))
        raise _no_device(devices, chosen, knobs.DEVICE.name if selector is None else "device")

    def check(self) -> None:
        """Raises ValidationError if the validation layer said something since the last call."""
        if not self.messages:
            return
        messages = self.messages[:]
        del self.messages[: len(messages)]
        unique = list(dict.fromkeys(messages))
        raise ValidationError(
            f"The Vulkan validation layer reported {len(unique)} message{'s' * (len(unique) > 1)}",
            where="\n         ".join(unique[:8])
            + (f"\n         and {len(unique) - 8} more" * (len(unique) > 8)),
            next="this is a bug of purevk or of a registered kernel; unset PUREVK_VALIDATION to go on without checks",
        )

    def close(self) -> None:
        """Destroys the instance, and first every device made from it. Safe to call twice."""
        self._finalizer()


def _fitting(devices: list[PhysicalDevice], selector: str | int) -> list[PhysicalDevice]:
    """The devices that a selector names: an index, a part of a name, or a kind if no name has it.
    All, if it is empty."""
    text = str(selector).strip()
    # Longer numbers are parts of names.
    if isinstance(selector, int) or (text.isdecimal() and len(text) < 3):
        return [device for device in devices if device.index == int(selector)]
    named = [device for device in devices if text.lower() in device.name.lower()]
    return named or [device for device in devices if text.lower() == device.kind]


def _no_device(devices: list[PhysicalDevice], selector: str | int, where: str) -> DeviceError:
    listed = "; ".join(f"{device.index}: {device.name} ({device.kind})" for device in devices)
    return DeviceError(
        f"No Vulkan device fits {str(selector).strip()!r}",
        where=where,
        why=f"the devices are {listed}",
        next="give an index, a part of a name or a kind from that list, or nothing for the best device",
    )


def _strings(items: list[bytes], kept: list[Any]) -> Any:
    """A C array of C strings, held by `kept`."""
    if not items:
        return vk.NULL
    texts = [vk.ffi.new("char[]", item) for item in items]
    array = vk.ffi.new("char *[]", texts)
    kept += [texts, array]
    return array
