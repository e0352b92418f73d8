#version 450
#extension GL_GOOGLE_include_directive : enable
// Tables for Fourier transforms: roots of unity, and chirps (Bluestein's algorithm).
//
// Buffers: out.
// Macros:
//   T_OUT      vec2 or dvec2; REAL and DOUBLE as in roots.glslh
//   KIND       0: out[i] = exp(-2 pi i i / whole)
//              1: out[i] = exp(-pi i i^2 / whole), a chirp
//              2: the conjugated chirp of min(i, count - i); 0 if that is whole or more
// Grid: one invocation per element.
#include "core/common.glslh"
#ifndef T_OUT
#define T_OUT vec2
#endif
#ifndef KIND
#define KIND 0
#endif
#include "fft/roots.glslh"

layout(local_size_x = 64) in;
PARAM(0, count)
PARAM(1, whole)
WRITEONLY_BUFFER(0, out, T_OUT)

// i^2 modulo n, bit by bit: i^2 itself may not fit.
uint square_modulo(uint i, uint n) {
    uint made = 0u;
    for (int bit = 27; bit >= 0; bit--) {
        made = 2u * made % n;
        if (((i >> bit) & 1u) != 0u) made = (made + i) % n;
    }
    return made;
}

LOOPS(loop(28))

void main() {
    uint group = WORKGROUP_ID.y * gl_NumWorkGroups.x + WORKGROUP_ID.x;
    int i = int(group * 64u + gl_LocalInvocationIndex);
    if (i >= count) return;
#if KIND == 0
    COMPLEX made = root_of_unity(uint(i % whole), uint(whole));
#else
    int j = KIND == 1 ? i : min(i, count - i);
    COMPLEX made = root_of_unity(square_modulo(uint(min(j, whole)), 2u * uint(whole)), 2u * uint(whole));
    if (KIND == 2) made = j < whole ? COMPLEX(made.x, -made.y) : COMPLEX(0.0);
#endif
    buf_out[i] = T_OUT(made);
}
