"""What is inside exported files, read by executorch's own deserializers: `python -m
tests.models.census FILE...`.

Writes Markdown: size, delegates, inputs and outputs, operators inside the delegates and CPU kernels
between them with counts; with `--listing`, the whole program in order, each operator with its
arguments and shapes.
"""

from __future__ import annotations

import argparse
import importlib.resources
import json
import re
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

VK_TYPES = {
    0: "bool",
    1: "u8",
    2: "i8",
    3: "i32",
    4: "f16",
    5: "f32",
    6: "f64",
    7: "i64",
    127: "unset",
}


def _program(path: Path) -> Any:
    from executorch.exir._serialize._program import deserialize_pte_binary

    return deserialize_pte_binary(path.read_bytes()).program


def _vk_graph(blob: bytes) -> Any:
    """Return the graph of a delegate's blob, read around executorch's function, which stumbles over
    `-inf`."""
    from executorch.backends.vulkan.serialization import vulkan_graph_serialize as serialize
    from executorch.exir._serialize._dataclass import _json_to_dataclass

    with tempfile.TemporaryDirectory() as folder:
        scratch = Path(folder)
        schema = importlib.resources.files(serialize.serialization_package).joinpath("schema.fbs")
        (scratch / "schema.fbs").write_bytes(schema.read_bytes())
        (scratch / "graph.bin").write_bytes(serialize.extract_vk_flatbuffer(blob))
        serialize._flatc_decompile(
            folder, str(scratch / "schema.fbs"), str(scratch / "graph.bin"), ["--raw-binary"]
        )
        text = (scratch / "graph.json").read_text()
    text = re.sub(r"(?<=[:\[,\s])(-?)inf(?=[,\s\]}])", r"\1Infinity", text)
    text = re.sub(r"(?<=[:\[,\s])-?nan(?=[,\s\]}])", "NaN", text)
    return _json_to_dataclass(json.loads(text), serialize.VkGraph)


def _graphs(program: Any, plan: Any) -> list[Any]:
    blobs = [bytes(program.backend_delegate_data[d.processed.index].data) for d in plan.delegates]
    return [_vk_graph(blob) for blob in blobs]


def describe_plan_value(plan: Any, index: int) -> str:
    """Return a plan's value as text: `%3:FLOAT[1, 128]`, or a literal."""
    value = plan.values[index].val
    kind = type(value).__name__
    if kind == "Tensor":
        tag = "" if value.data_buffer_idx == 0 else " const"
        dynamic = "" if int(value.shape_dynamism) == 0 else " dyn"
        return f"%{index}:{value.scalar_type.name.lower()}{list(value.sizes)}{dynamic}{tag}"
    if kind == "IntList":
        items = []
        for boxed in value.items:
            inner = plan.values[boxed].val
            items.append(str(inner.int_val) if type(inner).__name__ == "Int" else f"%{boxed}")
        return f"[{', '.join(items)}]"
    if kind in ("TensorList", "OptionalTensorList"):
        return f"{kind}{list(value.items)}"
    fields = vars(value)
    if kind == "Int":
        return f"%{index}={value.int_val}"
    return str(next(iter(fields.values()))) if fields else "None"


def describe_vk_value(graph: Any, index: int) -> str:
    """Return a Vulkan graph's value as text, such as `%3:f32[1, 128]` or `C%4:f16[384, 384]` for a
    constant."""
    value = graph.values[index].value
    kind = type(value).__name__
    if kind == "VkTensor":
        constant = "C" if value.constant_id >= 0 else ""
        staging = int(value.staging_datatype)
        cast = "" if staging in (127, int(value.datatype)) else f"<-{VK_TYPES[staging]}"
        return f"{constant}%{index}:{VK_TYPES[int(value.datatype)]}{cast}{list(value.dims)}"
    if kind == "Null":
        return "None"
    if kind == "SymInt":
        return f"%{index}:symint"
    if kind == "ValueList":
        return "(" + ", ".join(describe_vk_value(graph, i) for i in value.items) + ")"
    return str(next(iter(vars(value).values())))


def instructions(plan: Any) -> list[tuple[str, Any]]:
    """Return the instructions of a plan's chains as (kind, instruction)."""
    return [
        (type(i.instr_args).__name__, i.instr_args)
        for chain in plan.chains
        for i in chain.instructions
    ]


def listing(plan: Any, graphs: list[Any]) -> list[str]:
    """Return one line for each CPU kernel and each delegated operator, in the order in which they
    run."""
    lines = []
    for kind, args in instructions(plan):
        if kind == "KernelCall":
            op = plan.operators[args.op_index]
            name = f"{op.name}.{op.overload}" if op.overload else op.name
            lines.append(
                f"cpu   {name}({', '.join(describe_plan_value(plan, a) for a in args.args)})"
            )
        elif kind == "DelegateCall":
            values = ", ".join(describe_plan_value(plan, a) for a in args.args)
            lines.append(f"call  delegate {args.delegate_index}({values})")
            graph = graphs[args.delegate_index]
            lines.append(
                f"        in  {', '.join(describe_vk_value(graph, i) for i in graph.input_ids)}"
            )
            for call in graph.chain:
                shown = [describe_vk_value(graph, a) for a in call.args]
                lines.append(f"        {call.name}({', '.join(shown[:-1])}) -> {shown[-1]}")
            lines.append(
                f"        out {', '.join(describe_vk_value(graph, i) for i in graph.output_ids)}"
            )
        else:
            lines.append(f"{kind}  {vars(args)}")
    return lines


def census(path: Path, with_listing: bool = False) -> str:
    """Return the Markdown section of one file."""
    program = _program(path)
    lines = [f"## {path.name}", "", f"{path.stat().st_size:,} bytes"]
    for plan in program.execution_plan:
        graphs = _graphs(program, plan)
        kinds = Counter(kind for kind, _ in instructions(plan))
        inside = Counter(call.name for graph in graphs for call in graph.chain)
        outside: Counter[str] = Counter()
        for kind, args in instructions(plan):
            if kind == "KernelCall":
                op = plan.operators[args.op_index]
                outside[f"{op.name}.{op.overload}" if op.overload else op.name] += 1
        lines += [
            f"- method `{plan.name}`: {len(plan.delegates)} delegates; instructions {dict(kinds)}",
            f"- inputs {', '.join(describe_plan_value(plan, i) for i in plan.inputs)}; "
            f"outputs {', '.join(describe_plan_value(plan, i) for i in plan.outputs)}",
            f"- inside delegates ({sum(inside.values())}): "
            + ", ".join(f"`{name}` {count}" for name, count in inside.most_common()),
            f"- CPU kernels ({sum(outside.values())}): "
            + (", ".join(f"`{name}` {count}" for name, count in outside.most_common()) or "none"),
        ]
        if with_listing:
            lines += ["", "```", *listing(plan, graphs), "```"]
    return "\n".join([*lines, ""])


def main(arguments: list[str] | None = None) -> int:
    """Print the census of the files."""
    parser = argparse.ArgumentParser(prog="python -m tests.models.census", description=main.__doc__)
    parser.add_argument("files", nargs="+", type=Path)
    parser.add_argument("--listing", action="store_true", help="every operator in order")
    options = parser.parse_args(arguments)
    for path in options.files:
        print(census(path, options.listing))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
