"""`purevk chat`: a conversation with a language model."""

from __future__ import annotations

import argparse
import sys
from typing import TYPE_CHECKING, Any

from purevk.plain_text import printable

if TYPE_CHECKING:
    from purevk.cli.output import Output
    from purevk.llm import Pieces, Stats
    from purevk.llm.session import Session


def collect(args: argparse.Namespace) -> dict[str, Any]:
    import purevk.llm

    options = {
        "max_tokens": args.max_tokens,
        "temperature": args.temperature,
        "top_k": args.top_k,
        "top_p": args.top_p,
        "min_p": args.min_p,
        "seed": args.seed,
    }
    device = int(args.device) if args.device and args.device.isdecimal() else args.device
    turns: list[dict[str, Any]] = []
    with purevk.llm.load(
        args.model,
        context=args.context,
        dtype=args.dtype,
        cache=args.cache,
        spill=args.spill,
        device=device,
        tokenizer=args.tokenizer,
        data_files=args.data,
    ) as model:
        session = model.session(system=args.system, overflow=args.overflow, **options)
        if args.prompt is not None:
            turns.append(_answer(session, args.prompt, args.json))
        else:
            _converse(session, turns, args.json)
        memory = {"weights": model.plan.weights, "cache": model.plan.cache}
        return {
            "device": model.program.device.name,
            "context": model.context,
            "memory": memory,
            "turns": turns,
        }


def _converse(session: Session, turns: list[dict[str, Any]], quiet: bool) -> None:
    """Reads messages, a line each, until the end of the input."""
    from_terminal = sys.stdin.isatty() and not quiet
    if from_terminal:
        print("A message, and Enter. Ctrl-C stops an answer, Ctrl-D ends the conversation.")
    while True:
        try:
            line = input("> ") if from_terminal else sys.stdin.readline()
        except EOFError:
            line = ""
        if not line:
            return
        if line.strip():
            turns.append(_answer(session, line.strip(), quiet))


def _answer(session: Session, text: str, quiet: bool) -> dict[str, Any]:
    """Prints an answer while it is made. Ctrl-C ends it."""
    made = session.send(text)
    answer = _printed(made, quiet)
    return {"message": text, "answer": answer, **_figures(made.stats)}


def _printed(made: Pieces, quiet: bool) -> str:
    parts: list[str] = []
    try:
        for piece in made:
            parts.append(piece.text)
            if not quiet:
                print(printable(piece.text), end="", flush=True)
    except KeyboardInterrupt:
        made.close()
    if not quiet:
        print(f"\n\n[{made.stats}]\n", flush=True)
    return "".join(parts)


def _figures(stats: Stats) -> dict[str, Any]:
    return {
        "prompt_tokens": stats.prompt_tokens,
        "reused_tokens": stats.reused_tokens,
        "tokens": stats.tokens,
        "prompt_seconds": stats.prompt_seconds,
        "seconds": stats.seconds,
        "why": stats.why,
    }


def show(data: dict[str, Any], out: Output) -> None:
    sizes = " and ".join(f"{name} {size / 1e6:.0f} MB" for name, size in data["memory"].items())
    out.line(f"{data['device']}: {sizes}, context {data['context']} tokens")
