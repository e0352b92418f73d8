#version 450
#extension GL_GOOGLE_include_directive : enable
// The weight of a quantized linear layer as halves: out[n, k] = quantized value * scales[n, k / group].
//
// Buffers: w (rows of words, `ldw` words from one to the next), scale [N, groups], out [N, K].
// K and group are multiples of 8.
// Macros:
//   BITS        8: int8; 4: two values in a byte, each stored as value + 8
//   HIGH_FIRST  1: the high nibble of a byte has the even k
//   T_SCALE     element type
// Grid: ceil(N * K / 8 / local_size_x), spread over y: an invocation makes 8 values
#include "core/common.glslh"
#ifndef BITS
#define BITS 4
#endif
#ifndef HIGH_FIRST
#define HIGH_FIRST 0
#endif
#ifndef T_SCALE
#define T_SCALE float
#endif

PARAM(0, N)
PARAM(1, K)
PARAM(2, ldw)
PARAM(3, groups)  // of a row
PARAM(4, group)   // values of one
#undef PARAM_DEFAULT
#define PARAM_DEFAULT 0
PARAM(5, offset_w)

layout(local_size_x_id = 100) in;
READONLY_BUFFER(0, w, uint)
READONLY_BUFFER(1, scale, T_SCALE)
WRITEONLY_BUFFER(2, out, f16vec4)

// The 4 values from bit 0 of a word on (BITS 4: the lower 16 bits).
vec4 qvalues(uint word) {
    ivec4 values;
    UNROLL for (int c = 0; c < 4; c++) {
#if BITS == 8
        values[c] = bitfieldExtract(int(word), 8 * c, 8);
#else
        values[c] = int(bitfieldExtract(word, 4 * (c ^ HIGH_FIRST), 4)) - 8;
#endif
    }
    return vec4(values);
}

void main() {
    int local = int(gl_WorkGroupSize.x), eights = K / 8;
    int i = int(gl_WorkGroupID.x + gl_WorkGroupID.y * gl_NumWorkGroups.x) * local + int(gl_LocalInvocationIndex);
    if (i >= N * eights) return;
    int row = i / eights, eight = i - row * eights;
    float scale = float(buf_scale[row * groups + eight * 8 / group]);
#if BITS == 8
    int at = offset_w + row * ldw + 2 * eight;
    uint low = buf_w[at], high = buf_w[at + 1];
#else
    uint low = buf_w[offset_w + row * ldw + eight], high = low >> 16;
#endif
    buf_out[2 * i] = f16vec4(qvalues(low) * scale);
    buf_out[2 * i + 1] = f16vec4(qvalues(high) * scale);
}
