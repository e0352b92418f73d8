"""Reader of ExecuTorch files: bytes -> plain immutable types. Needs neither Vulkan nor torch.

    program = read_program("model.pte", data_files=["weights.ptd"])
    print(describe(program))

`program` has the methods, values, instructions and lookups of their data; `vkgraph` the graph of a
Vulkan delegate; `ptd` the data files; `values` what the first two have in common.
"""

from purevk.pte.load import read_program
from purevk.pte.program import Program
from purevk.pte.ptd import DataFile, read_data_file
from purevk.pte.summary import describe
from purevk.pte.vkgraph import VkGraph, read_vulkan_graph

__all__ = [
    "DataFile",
    "Program",
    "VkGraph",
    "describe",
    "read_data_file",
    "read_program",
    "read_vulkan_graph",
]
