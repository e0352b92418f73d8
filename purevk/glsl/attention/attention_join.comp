#version 450
#extension GL_GOOGLE_include_directive : enable
// Joins the parts that attention_decode.comp (SPLIT 1) made.
//
// Buffers: shares, float [B, Hq, S, splits, DV + 4], sinks (if SINKS), and out.
// Macros: T_OUT, SINKS and T_SINKS as in attention_io.glslh. Local size 128; DV is at most 512.
// Grid: (S, Hq, B)
#include "core/common.glslh"
#include "core/elements.glslh"
#ifndef T_OUT
#define T_OUT float
#endif
#ifndef SINKS
#define SINKS 0
#endif
#ifndef T_SINKS
#define T_SINKS float
#endif
PARAM(0, S)
PARAM(1, DV)  // a multiple of 4
PARAM(2, splits)
PARAM(3, o_batch)  // strides of out, in elements: multiples of 4
PARAM(4, o_head)
PARAM(5, o_row)
#undef PARAM_DEFAULT
#define PARAM_DEFAULT 0
PARAM(6, offset_shares)  // of the shares in their buffer, in elements
PARAM(7, offset_o)  // of out
#if SINKS
PARAM(8, sinks_batch)  // strides of the sinks (0 broadcasts)
PARAM(9, sinks_head)
PARAM(10, sinks_row)
PARAM(11, offset_sinks)  // of the sinks
#endif

READONLY_BUFFER(0, shares, vec4)
#if SINKS
READONLY_BUFFER(1, sinks, T_SINKS)
WRITEONLY_BUFFER(2, out, QUAD_OF(T_OUT))
#else
WRITEONLY_BUFFER(1, out, QUAD_OF(T_OUT))
#endif
layout(local_size_x = 128, local_size_y = 1, local_size_z = 1) in;

shared vec4 sums[128];
shared vec2 ends[128];

#define UNSEEN uintBitsToFloat(0xff800000u)

#define SHARES (128 / (DV / 4))
LOOPS(loop(ceil(splits, SHARES)) + 2 * loop(SHARES))

void main() {
    // One invocation for each vec4 of the result and every `shares`-th of its parts.
    int vectors = DV / 4, shares = 128 / vectors, s = int(gl_WorkGroupID.x), id = int(gl_LocalInvocationIndex);
    int share = id / vectors, column = id - share * vectors;
    int head = int(gl_WorkGroupID.y), batch = int(gl_WorkGroupID.z);
    int at = offset_shares / 4 + ((batch * int(gl_NumWorkGroups.y) + head) * S + s) * splits * (vectors + 1);
    float highest = UNSEEN, total = 0.0;
    vec4 acc = vec4(0.0);
    for (int p = share < shares ? share : splits; p < splits; p += shares) {
        int row = at + p * (vectors + 1);
        vec4 end = buf_shares[row + vectors], sum = buf_shares[row + column];
        float top = max(highest, end.x);
        float kept = highest == UNSEEN ? 0.0 : exp(highest - top), added = end.x == UNSEEN ? 0.0 : exp(end.x - top);
        highest = top;
        total = total * kept + end.y * added;
        acc = acc * kept + sum * added;
    }
    sums[id] = acc;
    ends[id] = vec2(highest, total);
    barrier();
    if (share > 0) return;
    for (int i = 1; i < shares; i++) highest = max(highest, ends[i * vectors + column].x);
    acc = vec4(0.0);
    total = 0.0;
    for (int i = 0; i < shares; i++) {
        vec2 end = ends[i * vectors + column];
        float scale = end.x == UNSEEN ? 0.0 : exp(end.x - highest);
        total += scale * end.y;
        acc += scale * sums[i * vectors + column];
    }
    float all = total;
#if SINKS
    all += exp(FLOAT_OF(T_SINKS, buf_sinks[offset_sinks + batch * sinks_batch + head * sinks_head + s * sinks_row]) - highest);
#endif
    int to = (offset_o + batch * o_batch + head * o_head + s * o_row) / 4 + column;
    buf_out[to] = QUAD_FROM(T_OUT, (total == 0.0 ? vec4(0.0) : acc / all));
}
