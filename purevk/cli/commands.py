"""The subcommands: their names, arguments and help. Nothing of the library is imported here, so that
--help answers at once."""

from __future__ import annotations

import argparse

from purevk.cli.command import (
    Command,
    add_data,
    add_device,
    add_inputs,
    add_model,
    byte_size,
    natural_number,
    option,
    positive,
)


def _add_info(parser: argparse.ArgumentParser) -> None:
    add_device(parser)
    option(parser, "--all", "also show the numbers and cost models of the device's profile")


def _add_inspect(parser: argparse.ArgumentParser) -> None:
    option(parser, "MODEL", "the program: a .pte, .ptn, .pvk or .pt2 file")
    add_data(parser)
    option(parser, "--method NAME", "only this method (default: all)")
    option(parser, "--graph", "print the optimized graph, one node per line")
    option(
        parser,
        "--node-table",
        "list all nodes in the order in which they run, with their kernels, and their lines in the"
        " user's code where the file knows them",
    )
    option(
        parser,
        "--etrecord FILE",
        "the ETRecord that executorch wrote for a .pte file: it knows modules and lines (for"
        " the node table)",
    )
    option(
        parser,
        "--format",
        "print only the optimized graph of one method",
        choices=("text", "json", "mermaid"),
    )
    add_device(parser, no_device=True)


def _add_run(parser: argparse.ArgumentParser) -> None:
    add_model(parser)
    add_inputs(parser)
    option(
        parser, "--output -o FILE.npz", "write the outputs to a file, as output_0, output_1, ..."
    )
    add_device(parser)


def _add_chat(parser: argparse.ArgumentParser) -> None:
    option(
        parser,
        "MODEL",
        "a language model: a GGUF file, a folder of transformers, a .pvk or a .pte file",
    )
    option(
        parser,
        "--tokenizer FILE",
        "of a .pte file: tokenizer.json or tokenizer.model, with the chat template beside it",
    )
    add_data(parser)
    option(parser, "--prompt TEXT", "answer this and end (default: read messages, a line each)")
    option(parser, "--system TEXT", "the message before all others")
    option(
        parser,
        "--context N",
        "tokens that the cache holds (default: what the model was trained with, 4096 at most)",
        type=int,
    )
    option(
        parser,
        "--dtype",
        "what is computed in (default: float16 on GPUs that have it, else float32)",
        default="auto",
        choices=("auto", "float32", "float16", "bfloat16"),
    )
    option(
        parser,
        "--cache",
        "what the cache holds (default: as --dtype)",
        default="auto",
        choices=("auto", "float32", "float16", "bfloat16", "int8", "float8"),
    )
    option(parser, "--spill", "keep weights that do not fit on the device in memory of the host")
    option(
        parser,
        "--overflow",
        "when the cache is full: forget the oldest turns, enlarge it, or end (default: slide)",
        default="slide",
        choices=("slide", "grow", "error"),
    )
    option(parser, "--max-tokens N", "of an answer (default: no limit)", type=int)
    option(parser, "--temperature T", "0: the most likely token (0)", type=float, default=0.0)
    option(parser, "--top-k N", "0: all tokens (0)", type=int, default=0)
    option(parser, "--top-p P", "(1)", type=float, default=1.0)
    option(parser, "--min-p P", "(0)", type=float, default=0.0)
    option(parser, "--seed N", "of the random numbers", type=int)
    add_device(parser)


def _add_bench(parser: argparse.ArgumentParser) -> None:
    add_model(parser)
    add_inputs(parser)
    group = parser.add_argument_group("measuring")
    option(
        group,
        "--runs N",
        "number of timed calls (default: as many as fit into --seconds)",
        type=positive,
    )
    option(
        group,
        "--seconds S",
        "total time of the timed calls (default: 5)",
        type=natural_number,
        default=5.0,
    )
    option(group, "--no-load", "do not measure cold and warm loading")
    option(group, "--profile", "time every dispatch and compare it with the device's limits")
    _add_rows(group)
    option(group, "--load-only", argparse.SUPPRESS)  # what the processes of their own run
    add_device(parser)


def _add_profile(parser: argparse.ArgumentParser) -> None:
    add_model(parser)
    add_inputs(parser)
    option(
        parser,
        "--trace FILE.json",
        "write a trace of a call, for ui.perfetto.dev or chrome://tracing",
    )
    option(
        parser,
        "--etdump FILE",
        "write the times of a .pte file's nodes for executorch's Inspector (needs executorch)",
    )
    _add_rows(parser)
    add_device(parser)


def _add_rows(parser: argparse._ActionsContainer) -> None:
    """Adds what a profile shows."""
    option(
        parser,
        "--by",
        "what a row of the profile is (default: operator)",
        default="operator",
        choices=("operator", "template", "dispatch"),
    )
    option(parser, "--remeasure", "measure the device's limits again")


def _add_report(parser: argparse.ArgumentParser) -> None:
    add_model(parser, method=False)
    option(parser, "--method NAME", "only this method (default: all)")
    option(
        parser, "--output -o FILE.html", "the page (default: report.html)", default="report.html"
    )
    add_inputs(parser)
    group = parser.add_argument_group("measuring")
    option(group, "--no-times", "do not time the dispatches")
    option(group, "--remeasure", "measure the device's limits again")
    add_device(parser, no_device=True)


def _add_tune(parser: argparse.ArgumentParser) -> None:
    add_model(parser)
    add_inputs(parser)
    group = parser.add_argument_group("measuring")
    option(
        group,
        "--candidates N",
        "kernels to measure for each problem, at most (default: 16)",
        type=positive,
        default=16,
    )
    option(
        group,
        "--runs N",
        "calls with each kernel; the median counts (default: 5)",
        type=positive,
        default=5,
    )
    add_device(parser)


def _add_bisect(parser: argparse.ArgumentParser) -> None:
    add_model(parser)
    add_inputs(parser)
    add_device(parser)


def _add_ops(parser: argparse.ArgumentParser) -> None:
    option(parser, "PATTERN", "only operators whose name matches, such as '*norm*'", nargs="?")
    option(parser, "--check MODEL", "show where each operator of a model would run, and why")
    add_data(parser)
    add_device(parser, no_device=True)


def _add_warmup(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "models", metavar="MODEL", nargs="*", help="models whose kernels to compile"
    )
    add_data(parser)
    option(
        parser,
        "--max-specializations N",
        "number of lowerings of a method to prepare: one for the exported bounds, and one for"
        " each combination of sizes that it does not serve (default: 256)",
        type=positive,
        default=256,
    )
    option(parser, "--bundle FILE.zip", "also write the compiled SPIR-V of the models to one file")
    option(
        parser,
        "--from-bundle FILE.zip...",
        "first copy the SPIR-V of a bundle into this machine's cache; may be repeated",
    )
    _add_trust(parser, "--from-bundle: the SHA-256 of the file; one for each bundle", many=True)
    add_device(parser)


def _add_trust(parser: argparse.ArgumentParser, help: str, many: bool) -> None:
    """Adds --sha256 and --trust, for a bundle that is read."""
    group = parser.add_mutually_exclusive_group()
    group.add_argument("--sha256", metavar="H", action="append" if many else "store", help=help)
    option(
        group,
        "--trust",
        "take bundles without a SHA-256: they are code, which can do what this user can",
    )


def _add_cache(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "action",
        choices=("ls", "verify", "prune", "clear", "diff", "export", "import"),
        help="ls: list entries; verify: check each; prune: remove by age or size; clear: remove all;"
        " diff: compare with the folder PATH; export, import: write, read the archive PATH",
    )
    parser.add_argument("paths", metavar="PATH", nargs="*", help="of diff, export and import")
    option(parser, "--folder DIR", "cache folder (default: that of PUREVK_CACHE)")
    option(parser, "--remove", "verify: also remove the damaged entries")
    option(
        parser,
        "--older-than DAYS",
        "prune: remove entries that were not used for so long",
        type=natural_number,
    )
    option(
        parser,
        "--max-size SIZE",
        "prune: keep the last used entries up to this size, such as 500M",
        type=byte_size,
    )
    option(parser, "--dry-run", "prune, verify: remove nothing, and say what would go")
    _add_trust(parser, "import: the SHA-256 of the file, as export printed it", many=False)


_PATHS = {"diff": "the folder PATH", "export": "the file PATH", "import": "the file PATH"}
_CACHE_OPTIONS = {
    "--remove": ("verify",),
    "--older-than": ("prune",),
    "--max-size": ("prune",),
    "--dry-run": ("prune", "verify"),
    "--sha256": ("import",),
    "--trust": ("import",),
}


def _check_cache(args: argparse.Namespace) -> str:
    """What is wrong with the arguments of an action."""
    action, wanted = args.action, _PATHS.get(args.action)
    if wanted is None and args.paths:
        return f"{action} takes no PATH"
    if wanted is not None and len(args.paths) != 1:
        return f"{action} takes {wanted}, and {len(args.paths)} are given"
    for name, actions in _CACHE_OPTIONS.items():
        value = getattr(args, name.strip("-").replace("-", "_"))
        if value is not None and value is not False and action not in actions:
            verb = "takes" if len(actions) == 1 else "take"
            return f"{action} has no {name}: {' and '.join(actions)} {verb} it"
    if action == "prune" and args.older_than is None and args.max_size is None:
        return "prune needs --older-than DAYS, --max-size SIZE, or both"
    return ""


def _check_warmup(args: argparse.Namespace) -> str:
    """What is wrong with the files of `warmup`."""
    if args.bundle and not args.models:
        return "--bundle needs the MODELs whose kernels the bundle shall hold"
    if not args.models and not args.from_bundle:
        return "name a MODEL, or a bundle: --from-bundle FILE.zip"
    if args.sha256 and len(args.sha256) != len(args.from_bundle):
        return (
            f"each --from-bundle takes one --sha256, in the same order: {len(args.from_bundle)} and"
            f" {len(args.sha256)} are given"
        )
    return ""


COMMANDS = (
    Command(
        "info",
        "shows devices, their features, the shader compiler, the cache and versions",
        _add_info,
        epilog="examples:\n  purevk info\n  purevk info --device 0 --json",
    ),
    Command(
        "inspect",
        "shows what is in a file and where each node runs",
        _add_inspect,
        description="Shows methods, inputs, delegates, where each node runs and why, memory and kernels."
        " Nothing is compiled.",
        epilog="examples:\n  purevk inspect model.pte\n  purevk inspect model.pte --no-device --node-table\n"
        "  purevk inspect model.pte --graph | less -S\n  purevk inspect model.pte --format mermaid > model.mmd",
    ),
    Command(
        "run",
        "runs a method once and shows its outputs",
        _add_run,
        epilog="examples:\n  purevk run model.pte\n  purevk run model.pte --input image.npy --output out.npz\n"
        "  purevk run encoder.pvk --input random:30522 --input ones --size s0=17",
    ),
    Command(
        "chat",
        "talks with a language model",
        _add_chat,
        description="Loads a language model, and answers messages while they are computed.\n"
        "Ctrl-C stops an answer, Ctrl-D ends the conversation. Needs purevk[llm].",
        epilog="examples:\n  purevk chat model.gguf\n"
        '  purevk chat model.gguf --prompt "Why is the sky blue?" --max-tokens 60\n'
        "  purevk chat model.gguf --context 1024 --overflow grow",
    ),
    Command(
        "bench",
        "measures loading and calls, and profiles a call",
        _add_bench,
        description="Measures loading in two new processes, with an empty and with a filled cache. Then times calls\n"
        "in this process, one by one.",
        epilog="examples:\n  purevk bench model.pte\n  purevk bench model.pte --runs 100 --no-load --profile\n"
        "  purevk bench encoder.pvk --size s0=17 --profile --by dispatch",
    ),
    Command(
        "profile",
        "times every dispatch of a call, and writes a trace",
        _add_profile,
        description="Times every dispatch of a call, each alone, and compares it with the limits of the device.",
        epilog="examples:\n  purevk profile model.pte\n  purevk profile model.pte --trace trace.json\n"
        "  purevk profile model.pte --etdump model.etdump\n"
        "  purevk profile encoder.pvk --size s0=17 --by dispatch",
    ),
    Command(
        "report",
        "writes a page that shows the inside of a model in a browser",
        _add_report,
        description="Writes one HTML page, which needs no network: the graph by modules, where each node runs and"
        " why,\nkernels with their GLSL and SPIR-V, times, memory over a call, and guards in words.",
        epilog="examples:\n  purevk report model.pte\n  purevk report model.pte -o model.html --no-times\n"
        "  purevk report encoder.pvk --size s0=17\n  purevk report model.pte --no-device",
    ),
    Command(
        "tune",
        "measures the kernels that a model could run, and keeps the fastest",
        _add_tune,
        description="Measures kernels and tiles for the matmuls, convolutions and attention of a model on the"
        " device.\nThe fastest are kept in the cache. Every program with the same sizes on this device runs them"
        " from then on.",
        epilog="examples:\n  purevk tune model.pte\n  purevk tune encoder.pvk --size s0=17 --candidates 32",
    ),
    Command(
        "bisect",
        "finds the node, pass or device feature that makes results differ from eager torch",
        _add_bisect,
        description="Runs a method, compares each node with eager torch, and the optimized program with the"
        " single nodes.\nIf something differs, it switches off optional passes and device features until the"
        " results agree,\nand looks for the fewest nodes that differ. Needs torch.\n\n"
        "exit codes: 0 nothing differs, 1 something differs (or an error), 2 a wrong command line",
        epilog="examples:\n  purevk bisect model.pte\n  purevk bisect model.pvk --input x.npy --size s0=17",
    ),
    Command(
        "ops",
        "lists the operators, or shows where each operator of a model runs",
        _add_ops,
        description="Lists the operators that have a kernel. All others run on the CPU through torch.\n"
        "With --check: lists the operators of a model, before fusion, and where each would run.",
        epilog="examples:\n  purevk ops\n  purevk ops softmax\n  purevk ops --check model.pte --no-device",
    ),
    Command(
        "warmup",
        "compiles what models need ahead of time",
        _add_warmup,
        description="Compiles the kernels of models into the cache, for all sizes within the exported bounds,\n"
        "and has the driver compile its pipelines, so that the first load compiles nothing. Weights\n"
        "are not read.",
        epilog="examples:\n  purevk warmup model.pte\n"
        "  purevk warmup *.pte --bundle kernels.zip     on a machine with a compiler\n"
        "  purevk warmup --from-bundle kernels.zip --trust     on a machine without a compiler;\n"
        "      better: --sha256 H, with the digest that the first command printed",
        check=_check_warmup,
    ),
    Command(
        "cache",
        "lists, verifies, prunes, compares and copies the entries of the cache",
        _add_cache,
        description="Manages the on-disk cache: SPIR-V by template, pipeline caches by device, tuning"
        " results.\n`diff` ends with 1 if something differs, `verify` if entries are damaged and stay.",
        epilog="examples:\n  purevk cache ls\n  purevk cache verify --remove\n"
        "  purevk cache prune --older-than 30 --max-size 500M\n  purevk cache diff other-cache\n"
        "  purevk cache export kernels.zip\n  purevk cache import kernels.zip --trust\n  purevk cache clear",
        check=_check_cache,
    ),
    Command(
        "doctor",
        "shows what is missing on this machine, and the commands that install it",
        add_device,
        epilog="examples:\n  purevk doctor\n  purevk doctor --device 0",
    ),
)
