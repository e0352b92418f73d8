"""docs/reference/api.md: the public names of purevk, from their signatures and docstrings."""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import re
import textwrap
from collections.abc import Callable, Iterator
from typing import Any

# Section -> what it is about, its module, and its names. A class has the members that are listed.
SECTIONS: dict[str, tuple[str, str, dict[str, tuple[str, ...]]]] = {
    "Load and compile": (
        "[Which of them do I want?](../start/which.md)",
        "purevk",
        {"load": (), "compile": (), "plan": (), "devices": (), "manual_seed": ()},
    ),
    "Programs": (
        "[calling.md](../calling.md) and [state.md](../state.md) explain calls and states.",
        "purevk",
        {
            "Program": (
                *("forward", "submit", "method", "inputs", "outputs", "state", "save_state"),
                *("load_state", "reset_state", "save", "refresh", "submissions", "settle"),
                *("graph", "device", "memory", "report", "report_html", "close"),
            ),
            "Method": (
                "__call__",
                "submit",
                "inputs",
                "outputs",
                "graph",
                "specializations",
                "close",
            ),
            "Replicas": ("forward", "submit", "method", "inputs", "outputs", "close"),
            "StagedProgram": (
                "forward",
                "submit",
                "method",
                "inputs",
                "outputs",
                "state",
                "reset_state",
                "save_state",
                "load_state",
                "describe",
                "close",
            ),
            "PlannedProgram": ("memory", "kernels", "graph", "costs", "report", "report_html"),
            "DeviceInfo": (),
        },
    ),
    "Your own operators": (
        "[extending.md](../extending.md) has examples.",
        "purevk.ops",
        {
            "register_executor": (),
            "unregister_executor": (),
            "register_pointwise": (),
            "register_kernel": (),
            "unregister": (),
            "list_registered_ops": (),
            "allow_operator": (),
            "disallow_operator": (),
            "RegisteredOp": (),
            "TensorType": ("rank", "numel", "with_dims", "with_dtype"),
        },
    ),
    "Tests": (
        "[testing.md](../testing.md) has examples, and the pytest plugin.",
        "purevk.testing",
        {"assert_close": (), "assert_same_as_eager": (), "tolerance_of": ()},
    ),
    "torch.compile": (
        "[torch_compile.md](../torch_compile.md) says what runs where.",
        "purevk.dynamo",
        {"make_backend": ()},
    ),
    "ExecuTorch": (
        "`purevk.export` needs the package executorch; `purevk.runtime` does not.",
        "purevk.export",
        {"PurevkPartitioner": ()},
    ),
    "The API of executorch.runtime": (
        "`from purevk import Runtime` in place of `from executorch.runtime import Runtime`.",
        "purevk.runtime",
        {"Runtime": ("get", "load_program")},
    ),
    "The API of executorch.extension.llm.runner": (
        "`from purevk.runtime.llm import TextLLMRunner`; [llm.md](../llm.md) has examples.",
        "purevk.runtime.llm",
        {
            "TextLLMRunner": ("generate", "prefill", "stop", "reset"),
            "MultimodalRunner": ("generate", "generate_text", "generate_hf", "prefill"),
            "GenerationConfig": ("resolve_max_new_tokens",),
            "Stats": ("to_json_string", "reset"),
            "make_image_input": (),
        },
    ),
}


def api_parts(prose: Callable[[str], str]) -> Iterator[str]:
    """The paragraphs, headings and lists of the page; `prose` wraps a paragraph."""
    yield prose(
        "This page is made from the docstrings. `import purevk` loads neither torch nor Vulkan: what"
        " a name needs is imported when it is first used."
    )
    for section, (about, module, names) in SECTIONS.items():
        home = importlib.import_module(module)
        yield f"## {section}"
        yield prose(about)
        for name, members in names.items():
            thing = getattr(home, name)
            yield f"### `{module}.{name}`"
            yield from _described(f"{module}.{name}", thing, prose)
            for member in members:
                yield f"#### `{name}.{member}`"
                yield from _described(f"{name}.{member}", _member(thing, member), prose)
    yield "## Errors"
    yield prose(
        "All errors derive from `purevk.PurevkError`. They have the attributes `what`, `where`, `why`"
        " and `next`, and can be pickled. [troubleshooting.md](../help/troubleshooting.md) says what"
        " to do about each."
    )
    yield "\n".join(prose(line) for line in _errors())


def errors() -> dict[str, type[Exception]]:
    """The public error classes, by name."""
    home = importlib.import_module("purevk")
    found = {name: getattr(home, name) for name in home.__all__}
    return {
        name: each
        for name, each in found.items()
        if inspect.isclass(each) and issubclass(each, Exception)
    }


def _errors() -> Iterator[str]:
    for name, each in errors().items():
        bases = ", ".join(f"`{base.__name__}`" for base in each.__bases__)
        about = " ".join((inspect.getdoc(each) or "").split("\n\n")[0].split())
        yield f"- `{name}` ({bases}): {about}"


def _member(thing: type, name: str) -> Any:
    found = inspect.getattr_static(thing, name)
    return found.__func__ if isinstance(found, (staticmethod, classmethod)) else found


def _described(name: str, thing: Any, prose: Callable[[str], str]) -> Iterator[str]:
    shown = _signature(name, thing)
    if shown:
        yield f"```text\n{shown}\n```"
    text = inspect.getdoc(thing)
    if not text:
        raise LookupError(f"{name} has no docstring: the API page needs one")
    if not (dataclasses.is_dataclass(thing) and text.startswith(f"{thing.__name__}(")):
        yield from _docstring(text, prose)


def _signature(name: str, thing: Any) -> str:
    """How a function is called; "" for what is not called."""
    if isinstance(thing, property) or not callable(thing):
        return ""
    signature = inspect.signature(thing)
    own = [each for each in signature.parameters.values() if each.name not in ("self", "cls")]
    if inspect.isclass(thing) and not dataclasses.is_dataclass(thing):
        return ""  # made by functions of the package, or as the docstring says
    arguments = []
    star = False
    for each in own:
        if each.kind is each.KEYWORD_ONLY and not star:
            arguments.append("*")
        star = star or each.kind in (each.KEYWORD_ONLY, each.VAR_POSITIONAL)
        stars: dict[Any, str] = {
            inspect.Parameter.VAR_POSITIONAL: "*",
            inspect.Parameter.VAR_KEYWORD: "**",
        }
        text = stars.get(each.kind, "") + each.name
        if each.annotation is not each.empty:
            text += f": {_type(each.annotation)}"
        if each.default is not each.empty:
            text += f" = {_default(each.default)}"
        arguments.append(text)
    result = signature.return_annotation
    end = f" -> {_type(result)}" if result not in (signature.empty, None) else ""
    line = f"{name}({', '.join(arguments)}){end}"
    if len(line) <= 96:
        return line
    inside = "".join(f"    {each},\n" for each in arguments)
    return f"{name}(\n{inside}){end}"


def _type(annotation: Any) -> str:
    text = annotation if isinstance(annotation, str) else inspect.formatannotation(annotation)
    return re.sub(r"\b(?:[a-z_]+\.)+(?=[A-Z])", "", text)


def _default(value: Any) -> str:
    return getattr(value, "__name__", None) or repr(value)


_SECTION = re.compile(r"^(Args|Attributes|Returns|Raises|Yields|Example|Note):$")


def _docstring(text: str, prose: Callable[[str], str]) -> Iterator[str]:
    """The Markdown of a docstring in the style of Google."""
    kind = ""
    lines: list[str] = []
    for line in [*text.splitlines(), "End:"]:
        found = _SECTION.match(line)
        ended = bool(kind and lines and line and not line.startswith(" "))
        if found or ended or line == "End:":
            yield from _part(kind, textwrap.dedent("\n".join(lines)).strip("\n"), prose)
            kind, lines = (found[1] if found else ""), []
        if not found:
            lines.append(line)


def _part(kind: str, text: str, prose: Callable[[str], str]) -> Iterator[str]:
    if not text:
        return
    if kind:
        yield f"**{kind}**"
    if kind in ("Args", "Attributes", "Raises"):
        entries = re.split(r"\n(?=\S)", text)
        yield "\n".join(prose(_entry(entry)) for entry in entries)
        return
    for paragraph in re.split(r"\n\s*\n", text):
        if paragraph.lstrip().startswith("- "):
            items = re.split(r"\n(?=- )", paragraph)
            yield "\n".join(prose(" ".join(item.split())) for item in items)
        elif paragraph.startswith("    "):
            yield f"```text\n{textwrap.dedent(paragraph)}\n```"
        else:
            yield prose(" ".join(paragraph.split()))


def _entry(text: str) -> str:
    name, _, about = text.partition(":")
    names = ", ".join(f"`{each.strip()}`" for each in name.split(","))
    return f"- {names}: {' '.join(about.split())}"
