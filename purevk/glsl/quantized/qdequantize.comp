#version 450
#extension GL_GOOGLE_include_directive : enable
// The weight of a quantized linear layer as elements: out[n, k] = quantized value * scales[n, k / group],
// or with minimums (quantized value + OFFSET) * scales[n, k / group] + minimums[n, k / group], where
// OFFSET is 8 or 128.
//
// Buffers: w (rows of words, `ldw` words from one to the next), scale [N, groups], minimum (if MINIMUM,
// as scale), out [N, K].
// K and group are multiples of 8.
// Macros:
//   BLOCKS      1: out is in the order of fragments, as a right operand [K, N] (fragment_blocks.glslh). K
//               and N are multiples of 16
//   BITS        8: int8; 4: two values in a byte, each stored as value + 8
//   HIGH_FIRST  1: the high nibble of a byte has the even k
//   MINIMUM     1: there are minimums (0)
//   TEXELS      1: w, scale and minimum are uniform texel buffers (0)
//   T_OUT       element type of the result, unless BLOCKS: float16_t or float
//   T_SCALE     element type of scales and minimums
// Grid: ceil(N * K / 8 / local_size_x), spread over y: an invocation makes 8 values; with BLOCKS 16,
// so half of that
#include "core/common.glslh"
#ifndef BITS
#define BITS 4
#endif
#ifndef HIGH_FIRST
#define HIGH_FIRST 0
#endif
#ifndef BLOCKS
#define BLOCKS 0
#endif
#ifndef MINIMUM
#define MINIMUM 0
#endif
#ifndef TEXELS
#define TEXELS 0
#endif
#ifndef T_OUT
#define T_OUT float16_t
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
#if TEXELS
#define AT(buffer, i) texelFetch(buffer, i).x
UTEXEL_BUFFER(0, w)
TEXEL_BUFFER(1, scale)
#if MINIMUM
TEXEL_BUFFER(2, minimum)
#endif
#else
#define AT(buffer, i) buffer[i]
READONLY_BUFFER(0, w, uint)
READONLY_BUFFER(1, scale, T_SCALE)
#if MINIMUM
READONLY_BUFFER(2, minimum, T_SCALE)
#endif
#endif
#define OUT_BINDING (2 + MINIMUM)
#if BLOCKS
#include "matmul/fragment_blocks.glslh"
WRITEONLY_BUFFER(OUT_BINDING, out, uvec4)
#else
WRITEONLY_BUFFER(OUT_BINDING, out, VEC4_OF(T_OUT))
#endif

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

// The 8 values from 8 * eight on of a row.
void dequantize(int row, int eight, out vec4 first, out vec4 second) {
    int at_group = row * groups + eight * 8 / group;
    float scale = float(AT(buf_scale, at_group));
#if BITS == 8
    int at = offset_w + row * ldw + 2 * eight;
    uint low = AT(buf_w, at), high = AT(buf_w, at + 1);
#else
    uint low = AT(buf_w, offset_w + row * ldw + eight), high = low >> 16;
#endif
    first = qvalues(low);
    second = qvalues(high);
#if MINIMUM
    float minimum = float(AT(buf_minimum, at_group));
    first = (first + float(1 << (BITS - 1))) * scale + minimum;
    second = (second + float(1 << (BITS - 1))) * scale + minimum;
#else
    first *= scale;
    second *= scale;
#endif
}

#if BLOCKS
uvec4 words_of(vec4 a, vec4 b) {
    return uvec4(packHalf2x16(a.xy), packHalf2x16(a.zw), packHalf2x16(b.xy), packHalf2x16(b.zw));
}
#endif

void main() {
    int local = int(gl_WorkGroupSize.x), eights = K / 8;
    int i = int(WORKGROUP_ID.x + WORKGROUP_ID.y * gl_NumWorkGroups.x) * local + int(gl_LocalInvocationIndex);
#if BLOCKS
    // Two neighbouring words of a block: 8 terms of two columns.
    if (i >= N * eights / 2) return;
    int block = i / 16, column = i % 16 / 2, eight = block % (K / 16) * 2 + i % 2;
    int row = block / (K / 16) * 16;
    vec4 first[2], second[2];
    UNROLL for (int h = 0; h < 2; h++) dequantize(row + BLOCK_COLUMN(column + 8 * h), eight, first[h], second[h]);
    buf_out[2 * i] = words_of(first[0], first[1]);
    buf_out[2 * i + 1] = words_of(second[0], second[1]);
#else
    if (i >= N * eights) return;
    int row = i / eights;
    vec4 first, second;
    dequantize(row, i - row * eights, first, second);
    buf_out[2 * i] = VEC4_OF(T_OUT)(first);
    buf_out[2 * i + 1] = VEC4_OF(T_OUT)(second);
#endif
}
