"""Writes the generated pages under docs/ from the tables that they describe.

python scripts/make_docs.py            writes them
python scripts/make_docs.py --check    exits with 1 if a page differs from what would be written
"""

from __future__ import annotations

import argparse
import ast
import csv
import inspect
import json
import re
import sys
import textwrap
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "scripts")]

from api_page import api_parts  # noqa: E402
from error_page import error_parts  # noqa: E402

from bench.drivers.page import page as devices_page  # noqa: E402
from purevk import knob_values, knobs  # noqa: E402
from purevk.cli.ops import operators  # noqa: E402
from purevk.frontends.executorch.names import INTEGER_OPERATORS  # noqa: E402
from purevk.frontends.torch import higher_order, nodes  # noqa: E402
from purevk.frontends.torch.decompose import PYTHON  # noqa: E402
from purevk.ops import registry  # noqa: E402

ETVK = ROOT / "docs" / "data" / "etvk-op-support.csv"
SAMPLES = ROOT / "docs" / "data" / "opinfo.json"
TYPES = ROOT / "docs" / "data" / "operator_dtypes.json"
MODELS = ROOT / "docs" / "data" / "models.json"
_MADE = "<!-- Made by scripts/make_docs.py; do not edit. -->\n\n"
# The front ends handle these operators, so that they need no operator definition.
_NO_DEFINITION = ("operator.", "aten._assert_scalar", "aten.sym_")


def _prose(text: str) -> str:
    """One paragraph or list item, in lines of at most 100 columns; code and links stay whole."""
    depth = len(text) - len(text.lstrip(" "))
    indent = " " * (depth + 2) if text.lstrip().startswith("- ") else ""
    whole = re.sub(r"`[^`]+`|\[[^\]]+\]\(", lambda found: found[0].replace(" ", "\0"), text)
    filled = textwrap.fill(
        whole, 100, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False
    )
    return filled.replace("\0", " ")


def _page(title: str, *parts: str) -> str:
    """A generated page: parts are paragraphs, lists, headings and tables."""
    return f"# {title}\n{_MADE}" + "\n\n".join(part.strip("\n") for part in parts if part) + "\n"


def _table(header: str, rows: list[str]) -> str:
    columns = header.count(" | ") + 1
    return "\n".join([f"| {header} |", f"|{'---|' * columns}", *rows])


def knobs_page() -> str:
    """The environment variables, as Markdown."""
    return _page(
        "Environment variables",
        _prose(
            "purevk reads a variable when it uses it, so you may set it at any time. `1`, `true`,"
            " `yes` and `on` mean yes. `0`, `false`, `no`, `off` and the empty text mean no. For a"
            " number, the empty text means the default. A value that cannot be read raises an error"
            " when the device is opened. A `RuntimeWarning` names a `PUREVK_` variable that is not in these tables."
        ),
        "```sh\nPUREVK_DEVICE=llvmpipe PUREVK_VERIFY=1 purevk run model.pte\n```",
        _table(
            "variable | default | what it does",
            [
                f"| `{knob.name}` | {_default(knob.default)} | {_cell(knob.doc)} |"
                for knob in knobs.ALL
            ],
        ),
        "## Old names",
        _prose(
            "The next release does not read these names. Until then they work, and a"
            " `RuntimeWarning` says what to write instead."
        ),
        _table(
            "old name | new spelling",
            [f"| `{old}` | {_new_spelling(old)} |" for old in knob_values.RENAMED],
        ),
    )


def _new_spelling(old: str) -> str:
    new, spell = knob_values.RENAMED[old]
    if not new:
        return "none: it has no effect"
    return f"`{new}={spell('0') if new == knobs.DISABLE.name else spell('...').removeprefix('./')}`"


def _default(value: object) -> str:
    if value in ("", ()):
        return ""
    return f"`{int(value) if isinstance(value, bool) else value}`"


def read_etvk() -> dict[str, str]:
    """For each operator of ExecuTorch's Vulkan backend, "namespace.name" or with overload: its
    limit there, or ""."""
    with open(ETVK, encoding="utf-8", newline="") as file:
        return {
            f"{row['namespace']}.{row['operator']}": row["limit_in_etvk"]
            for row in csv.DictReader(file)
        }


def etvk_names(names: list[str], table: dict[str, str]) -> list[str]:
    """The entries of the table for the names "namespace.name.overload" of one operator. An entry names
    the overload, the operator, or its variant that copies ("aten.view_copy")."""
    found: dict[str, None] = {}
    for name in names:
        if name in table:
            found[name] = None
            continue
        base = name.rpartition(".")[0]
        found.update(dict.fromkeys(each for each in (base, f"{base}_copy") if each in table))
    return list(found)


# The families of docs/ops.md: the heading, what is in it, and the modules of its operators (those of
# the shape functions): a module or a package of purevk.ops, or a module of one of its packages.
FAMILIES: dict[str, tuple[str, str]] = {
    "Elementwise": (
        "arithmetic, comparisons, activations, casts, losses",
        "elementwise pointwise special functions",
    ),
    "Movement": (
        "views, permutations, concatenation, padding, flips, pixel shuffle",
        "movement views rearrange pointwise_kernel elementwise.kernels",
    ),
    "Creation": ("tensors of constants, ranges and grids", "creation fill"),
    "Reductions": ("sums, means, extremes, norms, variances", "reduction statistics"),
    "Softmax and normalization": (
        "softmax, batch, layer, group, instance and RMS normalization",
        "softmax normalization group_norm",
    ),
    "Scans": ("cumulative sums, products and extremes", "scan"),
    "Sorting and selection": ("sort, top k, medians, quantiles, searches", "sort selection"),
    "Indexing": (
        "gather, scatter, embedding, masks, assertions",
        "gather indexing embedding scatter masked check",
    ),
    "Data-dependent sizes": (
        "results whose sizes depend on the elements of a tensor",
        "data_dependent",
    ),
    "Histograms and segments": (
        "histograms, modes, segment reductions",
        "sort.histogram reduce.segment_reduce",
    ),
    "Complex numbers": (
        "parts, conjugates, polar forms; most other operators take complex tensors too",
        "complex",
    ),
    "Fourier transforms": ("torch.fft, torch.stft, torch.istft", "fft"),
    "Matrix multiplication": ("linear, matmul, outer products, distances", "matmul linalg"),
    "Factorizations": (
        "LU, Cholesky, QR, singular values and what follows from them",
        "linalg.lu linalg.triangular linalg.cholesky linalg.qr linalg.spectra",
    ),
    "Convolution": (
        "1-D to 3-D, transposed, grouped, depthwise",
        "conv convolution convolution_nd",
    ),
    "Pooling": ("average, maximum and adaptive pooling", "pooling pool_nd fractional_pool"),
    "Resampling": ("upsampling, grid sampling", "resample"),
    "Attention": ("scaled dot product attention, KV caches, rotary embeddings", "attention rotary"),
    "Recurrent": ("RNN, LSTM, GRU", "recurrent matmul.recurrent"),
    "Quantized": (
        "quantize, dequantize, int8 and 4-bit linear, convolution and embedding",
        "quantized quantize quantize_parameters quantized_convolution quantized_embedding"
        " quantized_linear quantized_pointwise",
    ),
    "Random": ("random numbers, distributions, sampling, dropout", "random"),
    "Training": ("ExecuTorch's operators for training on a device", "training"),
    "Older ExecuTorch releases": (
        "operators that only files of older releases have",
        "legacy",
    ),
}

# Operators that are in another family than the others of their module.
OTHER_FAMILIES = {
    "et_vk.grid_priors.default": "Creation",
    **{f"aten._fft_{kind}.default": "Fourier transforms" for kind in ("c2c", "c2r", "r2c")},
}


def family_of(name: str) -> str:
    """The family of docs/ops.md that an operator is in: that of its module, else of its package,
    else of its module's own name."""
    if name in OTHER_FAMILIES:
        return OTHER_FAMILIES[name]
    definition = registry.find(name)
    if isinstance(definition.form, registry.View):
        return "Movement"
    form = definition.form
    function = getattr(form, "expand", None) or getattr(form, "lower", definition.shape)
    module = function.__module__.removeprefix("purevk.ops.")
    homes = {key: family for family, (_, keys) in FAMILIES.items() for key in keys.split()}
    for key in (module, module.split(".")[0], module.split(".")[-1]):
        if key in homes:
            return homes[key]
    raise LookupError(f"{name}: add the module {module!r} to FAMILIES in {__file__}")


def ops_page() -> str:
    """The operators, as Markdown."""
    table = read_etvk()
    types = json.loads(TYPES.read_text(encoding="utf-8"))["rows"]
    refused = read_refusals()
    found = [each for each in operators() if not each["operator"].startswith("purevk.")]
    seen: set[str] = set()
    families: dict[str, list[str]] = {family: [] for family in FAMILIES}
    for each in found:
        names = etvk_names([each["operator"], *each["names"]], table)
        seen.update(names)
        limits = [(name, table[name]) for name in names if table[name]]
        shown = "; ".join(
            f"`{name}`: {limit}" if len(names) > 1 else limit for name, limit in limits
        )
        etvk = (shown or "yes") if names else "no"
        others = ", ".join(f"`{name}`" for name in each["names"])
        entry = types.get(each["operator"])
        limit = limits_here(
            entry,
            [why for name in (each["operator"], *each["names"]) for why in refused.get(name, ())],
        )
        families[family_of(each["operator"])].append(
            f"| `{each['operator']}` | {others} | {each['form']} | {dtypes_here(entry)} |"
            f" {_cell(limit)} | {_cell(etvk)} |"
        )
    missing = [name for name in table if name not in seen and not name.startswith(_NO_DEFINITION)]
    count = sum(each["form"] != "cpu" for each in found)
    overview = [
        f"| [{family}](#{_anchor(family)}) | {len(families[family])} | {text} |"
        for family, (text, _) in FAMILIES.items()
    ]
    sections = [
        part
        for family, rows in families.items()
        if rows
        for part in (
            f"## {family}",
            _table(
                "operator | other names | form | dtypes on the GPU | runs on the CPU | ET-VK", rows
            ),
        )
    ]
    return _page(
        "Operators",
        _prose(
            f"purevk runs {count} operators on the GPU. Every other ATen operator runs on the CPU"
            " through torch. To see where each operator of a model runs, and why:"
        ),
        "```sh\npurevk ops --check model.pte\n```",
        "## Families",
        _table("family | operators | what it has", overview),
        _prose(
            "Some operators need neither a kernel nor torch:"
            " [handled without a kernel](#handled-without-a-kernel). Your own operators:"
            " [extending.md](extending.md)."
        ),
        "## How to read the tables",
        "\n".join(map(_prose, _COLUMNS)),
        *sections,
        *_without_kernel(),
        *(
            (
                "## In ExecuTorch's Vulkan backend, without a kernel here",
                _table(
                    "operator | limit there",
                    [f"| `{name}` | {_cell(table[name])} |" for name in sorted(missing)],
                ),
            )
            if missing
            else ()
        ),
        *samples_summary(),
    )


_COLUMNS = (
    "- *operator*, *other names*: names as `namespace.operator.overload`. All names of a line share"
    " one operator definition.",
    "- *form*: how the operator runs.",
    "  - *pointwise*: a GLSL expression for one element. A chain of these becomes one kernel.",
    "  - *view*: new strides over the same bytes. Nothing runs.",
    "  - *rewrite*: a graph of other operators.",
    "  - *kernel*: GLSL templates of its own.",
    "- *dtypes on the GPU*: dtypes of the first argument that run on the device. *floats* are"
    " float32, float16 and bfloat16. *integers* are int64, int32, int16, int8 and uint8. The cell is"
    " empty for operators that torch decomposes before export, and for formats with dtypes of their"
    " own. `python scripts/operator_dtypes.py --update` measures this column.",
    "- *runs on the CPU*: dtypes and cases that have no kernel, and why.",
    "- *ET-VK*: whether ExecuTorch's own Vulkan backend (1.5.1) supports the operator, and its limit"
    " there.",
)


def _anchor(heading: str) -> str:
    return heading.lower().replace(" ", "-")


# What the reader of exported programs does with the operators that its source names. The test of
# stale pages fails if the source names one that is missing here.
_READER = {
    "aten.sym_size.int": "becomes a size expression",
    "aten.sym_numel.default": "becomes a size expression",
    "aten.sym_stride.int": "becomes the number that torch traced",
    "aten.sym_storage_offset.default": "the same",
    "aten.item.default": "an integer becomes a symbol, unbacked if it is known only during the call; a"
    " float stays a tensor on the device",
    "aten._local_scalar_dense.default": "the same",
    "aten._assert_scalar.default": "checked at each call: of sizes by the host, of other numbers by"
    " `aten._assert_async`",
    "aten._assert_tensor_metadata.default": "dropped, since types are known",
    "aten.sym_constrain_range.default": "dropped, since the exported program states the range of each"
    " symbol",
    "aten.sym_constrain_range_for_size.default": "the same",
    "aten._to_copy.default": "of a Python number, as torch writes scalars: `aten.scalar_tensor`",
    "aten.scalar_tensor.default": "an operator as any other",
    "aten.copy_.default": "in a branch or a loop body: writes a buffer of the module",
}


def _without_kernel() -> tuple[str, ...]:
    """What front ends handle themselves: operators on sizes, assertions, control flow."""
    source = ast.parse(inspect.getsource(nodes))
    named = {
        node.value
        for node in ast.walk(source)
        if isinstance(node, ast.Constant)
        and isinstance(node.value, str)
        and re.fullmatch(r"aten\.\w+(\.\w+)?", node.value)
    }
    if named != set(_READER):
        raise LookupError(f"update _READER in {__file__}: {sorted(named ^ set(_READER))}")
    python = ", ".join(f"`operator.{function.__name__}`" for function in PYTHON)
    prims = ", ".join(f"`{name}`" for name in INTEGER_OPERATORS)
    control = ", ".join(f"`{name}`" for name in higher_order.NAMES)
    rows = [
        f"| {python} | arithmetic and comparisons of sizes are computed on the host. With a number"
        " that is known only during a call, they run on the GPU |",
        "| `operator.getitem` | picks one result of an operator that has several |",
        "| `torch.sym_max`, `torch.sym_min`, `torch.sym_not`, `torch.sym_int`, `torch.sym_float` |"
        " computed on the host |",
        "| `torch.ops.higher_order.flex_attention` |"
        " [attention with functions of the user](torch_compile.md#flex_attention) |",
        *(f"| `{name}` | {_cell(text)} |" for name, text in _READER.items()),
        f"| {control} (`torch.ops.higher_order`) | [control flow](control_flow.md) |",
        "| `auto_functionalized`, `auto_functionalized_v2`, `with_effects` | the operator inside"
        " runs as any other |",
        f"| `.pte` files: {prims} | arithmetic and comparisons of sizes, as above |",
        "| `.pte` files: `et_vk.prepack`, `et_vk.select_as_symint` | a weight or a buffer; an"
        " element of a tensor that is used as a number |",
    ]
    return (
        "## Handled without a kernel",
        _prose(
            "The front ends handle these operators while they build the graph. No operator"
            " definition and no kernel is needed."
        ),
        _table("operator | what purevk does", rows),
    )


_KINDS = {
    "floats": {"float32", "float16", "bfloat16"},
    "integers": {"int64", "int32", "int16", "int8", "uint8"},
}


def dtypes_here(entry: dict | None) -> str:
    """The dtypes that run on the device, briefly: "floats" are float32, float16 and bfloat16,
    "integers" all five."""
    if entry is None:
        return ""
    left, shown = set(entry["device"]), []
    for name, kind in _KINDS.items():
        if kind <= left:
            shown.append(name)
            left -= kind
    return ", ".join([*shown, *(dtype for dtype in DTYPES if dtype in left)])


def limits_here(entry: dict | None, refused: list[str]) -> str:
    """What of an operator runs on the CPU: dtypes, then what PyTorch's samples came upon."""
    found: dict[str, None] = {}
    for dtype, why in (entry or {}).get("cpu", {}).items():
        if why == "no kernel for complex numbers":
            found["complex numbers"] = None
            continue
        found[
            dtype if why.endswith(dtype) and why.startswith("no kernel for") else f"{dtype}: {why}"
        ] = None
    for why in refused:
        dtype = why.removeprefix("no kernel for ")
        if not any(each.endswith(why) for each in found) and dtype not in found:
            found[why] = None
    return "; ".join(found)


def read_refusals() -> dict[str, list[str]]:
    """Why nodes of PyTorch's samples ran on the CPU although their operator has a definition, by
    operator."""
    found: dict[str, dict[str, None]] = {}
    for entry in json.loads(SAMPLES.read_text(encoding="utf-8"))["operators"].values():
        for outcome, reasons, _ in entry.get("why", []):
            for reason in re.split(r", (?=[a-z_]+\.)", reasons) if outcome == "fallback" else ():
                name, _, why = reason.partition(": ")
                if why:
                    found.setdefault(name, {})[why] = None
    return {name: list(reasons) for name, reasons in found.items()}


def samples_summary(path: Path = SAMPLES) -> tuple[str, ...]:
    """What scripts/opinfo.py counted, by dtype; nothing without its file."""
    if not path.is_file():
        return ()
    table = json.loads(path.read_text(encoding="utf-8"))
    rows = []
    for dtype in _sample_dtypes(table):
        counts = [
            sum(column)
            for column in zip(
                *(_four(entry[dtype]) for entry in table["operators"].values() if dtype in entry),
                strict=True,
            )
        ]
        limit = table["limits"].get(dtype)
        rows.append(
            f"| {dtype} | {sum(counts)} | {' | '.join(map(str, counts))} |"
            f" {f'at most {limit}' if limit else 'all'} |"
        )
    return (
        "## PyTorch's samples",
        _prose(
            f"PyTorch {table['torch']} has sample inputs for its operators (`op_db` in"
            " `torch.testing`). Each sample was exported with `torch.export` and ran like a model,"
            " on lavapipe. The results were compared with eager torch, with the tolerances of"
            " `torch.testing.assert_close` or of the operator's OpInfo."
            " [op_samples.md](reference/op_samples.md) has the counts of each operator."
        ),
        "\n".join(
            map(
                _prose,
                (
                    "- *on the GPU*: samples that agree, with no node on the CPU.",
                    "- *on the CPU*: samples that agree, with at least one node on the CPU.",
                    "- *skipped*: samples without a result to compare, such as random numbers,"
                    " sparse tensors, and what `torch.export` refuses.",
                ),
            )
        ),
        _table(
            "dtype | samples | on the GPU | on the CPU | failed | skipped | samples per operator",
            rows,
        ),
        _prose(
            "`python scripts/opinfo.py --update` runs new samples. Add `--again --ops REGEX` to run"
            " some again. `python scripts/make_docs.py` then writes this page again."
        ),
    )


def samples_page(path: Path = SAMPLES) -> str:
    """What scripts/opinfo.py counted, by operator, as Markdown."""
    table = json.loads(path.read_text(encoding="utf-8"))
    # Kernels written for float32 are replaced by slower operators in float64: it is left out.
    dtypes = [dtype for dtype in _sample_dtypes(table) if dtype != "float64"]
    done, rest = [], []
    for name, entry in sorted(table["operators"].items()):
        total = sum(sum(entry[dtype]) for dtype in dtypes if dtype in entry)
        passed = sum(_four(entry[dtype])[0] for dtype in dtypes if dtype in entry)
        if total == passed:
            done.append(f"| `{name}` | {total} |")
            continue
        shown = [
            "" if dtype not in entry else f"{_four(entry[dtype])[0]}/{sum(entry[dtype])}"
            for dtype in dtypes
        ]
        why = "; ".join(
            dict.fromkeys(
                f"{'on the CPU' if outcome == 'fallback' else outcome}: {_brief(reason)}"
                for outcome, reason, of in entry.get("why", [])
                if of != ["float64"]
            )
        )
        rest.append(f"| `{name}` | {' | '.join(shown)} | {_cell(why)} |")
    return _page(
        "PyTorch's operator samples",
        _prose(
            "[ops.md](../ops.md#pytorchs-samples) says what a sample is and how it is run. The counts"
            " below leave out float64: where a kernel is written for float32, float64 uses other,"
            " slower operators."
        ),
        f"## Operators with samples that do not pass on the GPU ({len(rest)})",
        _prose("Each cell has the samples that pass on the GPU, of all samples."),
        _table(f"operator | {' | '.join(dtypes)} | why", rest),
        f"## Operators whose samples all pass on the GPU ({len(done)})",
        _table("operator | samples", done),
    )


def _sample_dtypes(table: dict) -> list[str]:
    used = {dtype for entry in table["operators"].values() for dtype in entry if dtype != "why"}
    return [dtype for dtype in DTYPES if dtype in used]


DTYPES = (
    "float32",
    "float16",
    "bfloat16",
    "float64",
    "complex64",
    "complex128",
    "int64",
    "int32",
    "int16",
    "int8",
    "uint8",
    "bool",
)


def _brief(reason: str) -> str:
    """A message of torch's without what differs from sample to sample."""
    return (
        re.split(r"(?<=Error): |(?<=Exception): |(?<=NotFound): ", reason)[0]
        if reason.startswith(("torch.export", "eager torch"))
        else reason
    )


def _four(counts: list[int]) -> list[int]:
    """passed, fallback, failed and skipped, of which the file leaves out zeros at the end."""
    return [*counts, 0, 0, 0, 0][:4]


def models_page() -> str:
    """The gallery of models, as scripts/models.py measured it, as Markdown."""
    data = json.loads(MODELS.read_text(encoding="utf-8"))
    rows = data["models"]
    found = [(row, way) for row in rows.values() for name in _WAYS if (way := row.get(name))]
    agree = [(row, way) for row, way in found if "failed" not in way]
    exporter = sum(way.get("failed", "").startswith("NotExported") for _, way in found)
    one = sum(way.get("segments") == 1 and not way["cpu"] for _, way in agree)
    wrong = sum(way["error"] > row["tolerance"] for row, way in agree)
    eager = sum(bool(way.get("eager")) for _, way in agree)
    packages = ", ".join(f"{name} {version}" for name, version in data["versions"].items())
    sections = [
        part
        for library in dict.fromkeys(row["library"] for row in rows.values())
        for part in (
            f"## {library}",
            "\n".join(
                [
                    "| model | what | parameters | eager ms | compile: segments | error | ms | s |"
                    " torch.compile: segments | error | `.pte`: delegates | segments | error | ms | s |",
                    "|---|---|--:|--:|---|--:|--:|--:|---|--:|--:|---|--:|--:|--:|",
                    *[
                        _model_line(name, row)
                        for name, row in rows.items()
                        if row["library"] == library
                    ],
                ]
            ),
        )
    ]
    return _page(
        "Models",
        _prose(
            "These are small models of many architectures, with seeded random weights."
            " `tests/models/gallery` defines them. Each model ran in up to three ways, and the results"
            " were compared with eager torch:"
        ),
        "\n".join(
            map(
                _prose,
                (
                    "- *compile*: straight from torch, with `purevk.compile`.",
                    '- *torch.compile*: through `torch.compile(backend="purevk")`.',
                    "- *`.pte`*: a file that ExecuTorch's VulkanPartitioner made. A few models need"
                    " ExecuTorch's constant folding first: ExecuTorch cannot lower them without it.",
                ),
            )
        ),
        "```sh\n"
        "python scripts/models.py mobilenet_v2                    # runs one model\n"
        "python scripts/models.py --json docs/data/models.json    # measures new models\n"
        "```",
        _prose(
            f"There are {len(rows)} models and {len(found)} runs. {one} runs are one GPU segment with"
            f" nothing on the CPU. torch.export or ExecuTorch could not export {exporter}. In {eager},"
            " `torch.compile` fell back to eager torch for a graph. The error of"
            f" {wrong} is above the model's tolerance. {len(found) - len(agree) - exporter} failed."
            " `scripts/models.py --list` names all models of the gallery. Those that the tables lack"
            " have not been measured yet."
        ),
        _prose(f"Device: {data['device']}, 2 cores; {packages}."),
        "\n".join(
            map(
                _prose,
                (
                    "- *error*: the largest difference from eager torch over all outputs and calls,"
                    " relative to the largest output.",
                    "- *ms*: the fastest of a few calls. The batch size is 1. For models with a"
                    " cache it is the last call, with one token. Eager torch uses both cores, and so"
                    " does lavapipe. Weights and inputs are small, so these figures compare the cost"
                    " of a call rather than peak speed; for that see"
                    " [bench/RESULTS.md](../bench/RESULTS.md).",
                    "- *s*: seconds of `purevk.compile` of the exported program (torch's"
                    " decompositions included), or of `purevk.load` of the file, with empty caches.",
                    "- *delegates*: delegate calls in the `.pte` file. The number after the + counts"
                    " the CPU kernels that ExecuTorch would run between them.",
                    "- *segments*: command buffers on the GPU, and the nodes that run on the CPU"
                    " between them. With `torch.compile`, those of all graphs that dynamo made. Where"
                    " dynamo cannot trace a line of the model, it ends a graph there, and Python"
                    " runs the line.",
                    "- *some*: they were not counted. A cell for a time is empty where the machine was"
                    " busy with other work.",
                ),
            )
        ),
        *sections,
    )


def _model_line(name: str, row: dict) -> str:
    count = row["parameters"]
    shown = f"{count / 1e6:.1f} M" if count >= 1e6 else f"{count / 1e3:.0f} k"
    cells = [f"`{name}`", row["about"], shown, _number(row.get("eager_ms"))]
    cells += _way_cells(row.get("compile"), "torch.export")
    cells += _way_cells(row.get("torch.compile"), "dynamo")[:2]
    cells += _way_cells(row.get("pte"), "ExecuTorch", file=True)
    return f"| {' | '.join(_cell(cell) for cell in cells)} |"


_WAYS = ("compile", "torch.compile", "pte")


def _way_cells(way: dict | None, exporter: str, file: bool = False) -> list[str]:
    if way is None or "failed" in way:
        reason = "" if way is None else way["failed"].split(":")[0]
        reason = (
            f"not exported by {exporter}"
            if reason == "NotExported"
            else reason and f"failed: {reason}"
        )
        return [""] * file + [reason, "", "", ""]
    host = ", ".join(
        f"`{name}`" + (f" x {count}" if count > 1 else "")
        for name, count in way.get("cpu", {}).items()
    )
    first = (
        [f"{way['delegates']}" + (f" + {way['kernels']}" if way["kernels"] else "")] if file else []
    )
    parts = [
        f" in {way['graphs']} graphs" if way.get("graphs", 1) > 1 else "",
        f"; CPU: {host}" if host else "",
        f"; eager torch: {len(way['eager'])}" if way.get("eager") else "",
    ]
    return [
        *first,
        f"{way.get('segments', 'some')}{''.join(parts)}",
        f"{way['error']:.0e}",
        _number(way.get("ms")),
        "" if "compile_s" not in way else f"{way['compile_s']:.1f}",
    ]


def _number(value: float | None) -> str:
    if value is None:
        return ""
    return f"{value:.1f}" if value < 100 else f"{value:.0f}"


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


def api_page() -> str:
    """The Python API, as Markdown."""
    return _page("Python API", *api_parts(_prose))


def errors_page() -> str:
    """All error texts, as Markdown."""
    return _page(
        "Error texts",
        _prose(
            "What each error class says, from the source. `…` stands for names and numbers; of two"
            " texts with ` / ` between them, an error has one. The texts that you are most likely to"
            " meet are in [Troubleshooting](../help/troubleshooting.md), with their cures."
        ),
        *error_parts(),
    )


PAGES = {
    "docs/reference/api.md": api_page,
    "docs/knobs.md": knobs_page,
    "docs/ops.md": ops_page,
    "docs/reference/op_samples.md": samples_page,
    "docs/models.md": models_page,
    "docs/help/devices.md": devices_page,
}


def stale() -> list[str]:
    """The pages that are not what would be written."""
    found = []
    for name, make in PAGES.items():
        path = ROOT / name
        if not path.is_file() or path.read_text(encoding="utf-8") != make():
            found.append(name)
    return found


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--check", action="store_true", help="write nothing; exit with 1 if a page is stale"
    )
    if parser.parse_args().check:
        names = stale()
        for name in names:
            print(f"{name} is stale: run python scripts/make_docs.py", file=sys.stderr)
        return 1 if names else 0
    for name, make in PAGES.items():
        (ROOT / name).write_text(make(), encoding="utf-8")
        print(name)
    return 0


if __name__ == "__main__":
    sys.exit(main())
