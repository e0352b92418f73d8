#version 450
#extension GL_GOOGLE_include_directive : enable
// A matrix of 16 bits in the order of fragments, as a right operand (fragment_blocks.glslh).
//
// Buffers: in [K, N], out [N / 16, K / 16, 256].
// Macro: DENSE_TERMS  1: columns are dense, and start at multiples of 4 elements (0: rows are)
// Parameters: K terms and N columns, multiples of 16; `ld` elements from one row (with DENSE_TERMS: one
// column) to the next.
// Grid: ceil(K * N / 16 / local_size_x), spread over y: an invocation makes 16 elements, of 4 terms and
// 4 columns.
#include "core/common.glslh"
#ifndef DENSE_TERMS
#define DENSE_TERMS 0
#endif

PARAM(0, K)
PARAM(1, N)
PARAM(2, ld)
#undef PARAM_DEFAULT
#define PARAM_DEFAULT 0
PARAM(3, offset_in)
PARAM(4, offset_out)

layout(local_size_x_id = 100) in;
READONLY_BUFFER(0, in, uvec2)
WRITEONLY_BUFFER(1, out, uvec4)

void main() {
    int i = int(WORKGROUP_ID.x + WORKGROUP_ID.y * gl_NumWorkGroups.x) * int(gl_WorkGroupSize.x) + int(gl_LocalInvocationIndex);
    if (i >= N / 4 * (K / 4)) return;
    // Of 32 invocations that follow each other, 4 have neighbouring terms and 8 neighbouring columns,
    // so that they read and write whole sectors of 32 bytes.
    int part = i / 4, term, column;
    term = i % 4 * 4;
#if DENSE_TERMS
    column = part % 4 * 4 + part / 4 / (K / 16) * 16;
    term += part / 4 % (K / 16) * 16;
#else
    column = part % (N / 4) * 4;
    term += part / (N / 4) * 16;
#endif
    uvec2 words[4];
    UNROLL for (int e = 0; e < 4; e++) {
#if DENSE_TERMS
        words[e] = buf_in[(offset_in + (column + e) * ld + term) >> 2];
#else
        words[e] = buf_in[(offset_in + (term + e) * ld + column) >> 2];
#endif
    }
#if !DENSE_TERMS
    // Columns become rows of 4 terms.
    uvec4 low = uvec4(words[0].x, words[1].x, words[2].x, words[3].x);
    uvec4 high = uvec4(words[0].y, words[1].y, words[2].y, words[3].y);
    words[0] = (low.xz & 0xffffu) | low.yw << 16;
    words[1] = low.xz >> 16 | (low.yw & 0xffff0000u);
    words[2] = (high.xz & 0xffffu) | high.yw << 16;
    words[3] = high.xz >> 16 | (high.yw & 0xffff0000u);
#endif
    int at = offset_out / 8 + (column / 16 * (K / 16) + term / 16) * 32 + column % 16 * 2 + term % 16 / 4;
    buf_out[at] = uvec4(words[0], words[2]);
    buf_out[at + 4] = uvec4(words[1], words[3]);
}
