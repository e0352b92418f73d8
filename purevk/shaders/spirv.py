"""Corrections of SPIR-V after the compiler."""

from __future__ import annotations

# SPIR-V's numbers: instructions, and the capability that an integer constant of so many bits needs.
_OP_CAPABILITY, _OP_TYPE_INT, _OP_CONSTANT, _OP_FUNCTION = 17, 21, 43, 54
_NARROW = {8: 39, 16: 22}
_OP_DECORATE, _NO_CONTRACTION, _OP_F_ADD, _OP_F_MUL = 71, 42, 129, 133
_FLOAT_SUMS_AND_PRODUCTS = (_OP_F_ADD, 131, _OP_F_MUL)
_OP_EXT_INST, _FMA = 12, 50  # GLSL.std.450 is the only set of instructions that shaders import


def declare_narrow_integers(spirv: bytes) -> bytes:
    """Declares `Int8` and `Int16` in a module with constants of these types that lacks them.

    A shader that only stores such numbers needs the capabilities of the storage alone; the
    optimizer folds a conversion of a constant, and leaves a constant of the narrow type that the
    module is then not valid with.
    """
    words = memoryview(spirv).cast("I")
    declared, narrow, needed = set(), {}, set()
    at = 5
    while at < len(words):
        length, op = words[at] >> 16, words[at] & 0xFFFF
        if op == _OP_FUNCTION or not length:
            break
        if op == _OP_CAPABILITY:
            declared.add(words[at + 1])
        elif op == _OP_TYPE_INT and words[at + 2] in _NARROW:
            narrow[words[at + 1]] = _NARROW[words[at + 2]]
        elif op == _OP_CONSTANT and words[at + 1] in narrow:
            needed.add(narrow[words[at + 1]])
        at += length
    added = [
        word
        for capability in sorted(needed - declared)
        for word in (2 << 16 | _OP_CAPABILITY, capability)
    ]
    return (
        spirv
        if not added
        else spirv[:20] + b"".join(word.to_bytes(4, "little") for word in added) + spirv[20:]
    )


def forbid_contraction(spirv: bytes) -> bytes:
    """Decorates every OpFAdd, OpFSub and OpFMul of a module with NoContraction. What the optimizer
    has contracted already (it makes GLSL.std.450's Fma of a product and a sum) is taken apart
    before."""
    words = list(memoryview(spirv).cast("I"))
    decorated: set[int] = set()
    results: list[int] = []
    body: list[int] = []
    at, first_decoration = 5, None
    while at < len(words):
        length, op = words[at] >> 16, words[at] & 0xFFFF
        if not length:
            return spirv
        if op == _OP_DECORATE:
            first_decoration = len(body) if first_decoration is None else first_decoration
            if words[at + 2] == _NO_CONTRACTION:
                decorated.add(words[at + 1])
        elif op in _FLOAT_SUMS_AND_PRODUCTS:
            results.append(words[at + 2])
        elif op == _OP_EXT_INST and words[at + 4] == _FMA:
            kind, result, x, y, z = words[at + 1], words[at + 2], *words[at + 5 : at + 8]
            product, words[3] = words[3], words[3] + 1  # the bound of the module's ids
            body += [
                5 << 16 | _OP_F_MUL,
                kind,
                product,
                x,
                y,
                5 << 16 | _OP_F_ADD,
                kind,
                result,
                product,
                z,
            ]
            results += [product, result]
            at += length
            continue
        body += words[at : at + length]
        at += length
    added = [
        word
        for each in results
        if each not in decorated
        for word in (3 << 16 | _OP_DECORATE, each, _NO_CONTRACTION)
    ]
    if not added or first_decoration is None:  # every kernel has decorations, those of its bindings
        return spirv
    return b"".join(
        word.to_bytes(4, "little")
        for word in (*words[:5], *body[:first_decoration], *added, *body[first_decoration:])
    )
