"""The Vulkan types are built once, so that threads and the garbage collector cannot meet in cffi."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from pathlib import Path

import purevk
from purevk.api import FEATURES, declarations, vk

SOURCES = sorted(Path(purevk.__file__).parent.rglob("*.py"))
# Written as words of numbers, because the package `vulkan` lacks the declaration.
UNDECLARED = {"VkBytes", "VkGraph", "VkTensor", "VkValue"}  # of ExecuTorch's schema
UNDECLARED |= {"vkGetPhysicalDeviceCooperativeMatrixFlexibleDimensionsPropertiesNV"}

# Two threads ask for every type while each allocation may start the garbage collector, whose
# finalizers let the other thread run.
STORM = """
import gc, sys, threading
from purevk.api import declarations
from purevk.api.vk import ffi
names = ["Vk" + name for name in (*declarations.STRUCTS, *declarations.HANDLES)]
names += ["PFN_vk" + name for name in declarations.FUNCTIONS]

class Cycle:
    def __init__(self):
        self.itself = self
    def __del__(self):
        for _ in range(50):
            pass

def run():
    start.wait()
    for name in names:
        Cycle()
        try:
            ffi.new(name + " *")
        except ffi.error:
            pass

sys.setswitchinterval(1e-6)
gc.set_threshold(1)
start = threading.Barrier(2)
threads = [threading.Thread(target=run) for _ in range(2)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
print("done")
"""


def words_of_the_code() -> set[str]:
    """The Vulkan names in strings and attributes of the package, without docstrings."""
    found = {row.struct for row in FEATURES if isinstance(row.struct, str)} - {""}
    for source in SOURCES:
        for node in ast.walk(ast.parse(source.read_text())):
            if isinstance(node, ast.Attribute) and re.fullmatch(r"vk[A-Z]\w+", node.attr):
                found.add(node.attr)
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                if match := re.fullmatch(
                    r"(?:PFN_)?(vk[A-Z]\w+|Vk[A-Z]\w+)( \*|\[\])?", node.value
                ):
                    found.add(match[1])
    return found


def test_every_type_of_the_code_is_listed_and_none_else() -> None:
    listed = {"vk" + name for name in declarations.FUNCTIONS}
    listed |= {
        "Vk" + name for name in (*declarations.HANDLES, *declarations.ENUMS, *declarations.STRUCTS)
    }
    assert words_of_the_code() - UNDECLARED == listed


def test_plain_types_of_the_code_are_listed() -> None:
    written = set()
    for source in SOURCES:
        for match in re.finditer(r'ffi\.(?:new|cast)\(\s*"([a-z][^"]*)"', source.read_text()):
            written.add(match[1])
    assert written and written <= set(declarations.OTHER)


def test_every_listed_type_exists() -> None:
    for name in (*declarations.HANDLES, *declarations.ENUMS, *declarations.STRUCTS):
        assert vk.ffi.typeof("Vk" + name)
    for name in declarations.FUNCTIONS:
        assert vk.ffi.typeof("PFN_vk" + name)


def test_threads_and_the_garbage_collector_do_not_meet_in_cffi() -> None:
    for _ in range(2):
        command = [sys.executable, "-c", STORM]
        made = subprocess.run(command, capture_output=True, text=True, timeout=120)
        assert made.returncode == 0 and made.stdout == "done\n", made.stderr
