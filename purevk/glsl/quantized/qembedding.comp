#version 450
#extension GL_GOOGLE_include_directive : enable
// Rows of a quantized table: out[i, d] = (quantized value - zero point) * scale, for the quantized
// values of row index[i].
//
// Buffers: table (rows of bytes), scale [rows, groups], zero [rows, groups] (the zero points, if
// ZEROS), index, out.
// Macros:
//   BITS         8: int8. 4 and 2: unsigned, stored as value + 8 and value + 2.
//   HIGH_FIRST   1: the high nibble of a byte has the even value (BITS 4). With BITS 2, the lowest
//                bits have the first value.
//   T_SCALE, T_ZERO, T_OUT   element types
//   ZEROS        1: there are zero points
//   MINIMUM      1: out is (stored value) * scale + minimum instead, of the buffer minimum [rows,
//                groups] of T_SCALE; BITS 8: the stored value is that of int8 plus 128. ZEROS is 0.
//   VEC4         1: D is a multiple of 4, and out is an array of vec4
//   QUADS        1 (with VEC4): 4 neighbours are in one word, and in one group
//   INDEX_WORDS  2: the indices are int64, of which the low words are read
//   ITEMS        (with QUADS) vec4s that an invocation computes, a workgroup's width apart (1)
// Grid: ceil(count * ceil(D / 4) / (local_size_x * ITEMS)), spread over y
#include "core/common.glslh"
#ifndef BITS
#define BITS 4
#endif
#ifndef HIGH_FIRST
#define HIGH_FIRST 0
#endif
#ifndef ZEROS
#define ZEROS 0
#endif
#ifndef MINIMUM
#define MINIMUM 0
#endif
#define OFFSET float(1 << (BITS - 1))
#ifndef VEC4
#define VEC4 0
#endif
#ifndef QUADS
#define QUADS 0
#endif
#ifndef T_SCALE
#define T_SCALE float
#endif
#ifndef T_ZERO
#define T_ZERO float
#endif
#ifndef INDEX_WORDS
#define INDEX_WORDS 1
#endif
#ifndef ITEMS
#define ITEMS 1
#endif
#ifndef T_OUT
#define T_OUT float
#endif

PARAM(0, count)  // of indices
PARAM(1, D)
PARAM(2, rows)
PARAM(3, groups)      // of a row
PARAM(4, group)       // values of one
PARAM(5, row_bytes)   // from one row to the next
PARAM(6, index_step)  // elements from one index to the next
#undef PARAM_DEFAULT
#define PARAM_DEFAULT 0
PARAM(7, offset_table)  // bytes
PARAM(8, offset_index)
PARAM(9, offset_out)

layout(local_size_x_id = 100) in;
READONLY_BUFFER(0, table, uint)
READONLY_BUFFER(1, scale, T_SCALE)
#if ZEROS
READONLY_BUFFER(2, zero, T_ZERO)
#endif
#if MINIMUM
READONLY_BUFFER(2, minimum, T_SCALE)
#endif
READONLY_BUFFER(2 + ZEROS + MINIMUM, index, int)
#if VEC4
WRITEONLY_BUFFER(3 + ZEROS + MINIMUM, out, VEC4_OF(T_OUT))
#else
WRITEONLY_BUFFER(3 + ZEROS + MINIMUM, out, T_OUT)
#endif

#if QUADS
vec4 values(int row, int d) {
    int at = offset_table + row * row_bytes + d * BITS / 8, at_group = row * groups + d / group;
    uint word = buf_table[at >> 2] >> ((at & 3) * 8);
    ivec4 qvalues;
    UNROLL for (int c = 0; c < 4; c++) {
#if BITS == 8
        qvalues[c] = bitfieldExtract(int(word), 8 * c, 8);
#elif BITS == 4
        qvalues[c] = int(bitfieldExtract(word, 4 * (c ^ HIGH_FIRST), 4)) - 8;
#else
        qvalues[c] = int(bitfieldExtract(word, 2 * c, 2)) - 2;
#endif
    }
    vec4 numbers = vec4(qvalues);
#if ZEROS
    numbers -= float(buf_zero[at_group]);
#endif
#if MINIMUM
    return (numbers + OFFSET) * float(buf_scale[at_group]) + float(buf_minimum[at_group]);
#endif
    return numbers * float(buf_scale[at_group]);
}
#endif

int qvalue(int row, int d) {
#if BITS == 8
    int at = offset_table + row * row_bytes + d;
    return bitfieldExtract(int(buf_table[at >> 2]), (at & 3) * 8, 8);
#elif BITS == 4
    int at = offset_table + row * row_bytes + (d >> 1);
    int nibble = (d & 1) ^ HIGH_FIRST;
    return int(bitfieldExtract(buf_table[at >> 2], (at & 3) * 8 + nibble * 4, 4)) - 8;
#else
    int at = offset_table + row * row_bytes + (d >> 2);
    return int(bitfieldExtract(buf_table[at >> 2], (at & 3) * 8 + (d & 3) * 2, 2)) - 2;
#endif
}

float value(int row, int d) {
    int at_group = row * groups + d / group;
    float number = float(qvalue(row, d));
#if ZEROS
    number -= float(buf_zero[at_group]);
#endif
#if MINIMUM
    return (number + OFFSET) * float(buf_scale[at_group]) + float(buf_minimum[at_group]);
#endif
    return number * float(buf_scale[at_group]);
}

LOOPS(loop(4))

void main() {
    int quads = (D + 3) / 4, local = int(gl_WorkGroupSize.x);
    int first = int(WORKGROUP_ID.x + WORKGROUP_ID.y * gl_NumWorkGroups.x) * local * ITEMS + int(gl_LocalInvocationIndex);
#if QUADS
    // All indices first, then all values, so that the loads overlap. Items beyond the end repeat
    // the last one.
    int row[ITEMS];
    vec4 v[ITEMS];
    UNROLL for (int p = 0; p < ITEMS; p++) {
        int i = min((first + p * local) / quads, count - 1);
        row[p] = clamp(int(buf_index[(offset_index + i * index_step) * INDEX_WORDS]), 0, rows - 1);
    }
    UNROLL for (int p = 0; p < ITEMS; p++) v[p] = values(row[p], (first + p * local) % quads * 4);
    UNROLL for (int p = 0; p < ITEMS; p++) {
        if (first + p * local < count * quads) buf_out[(offset_out >> 2) + first + p * local] = VEC4_OF(T_OUT)(v[p]);
    }
#else
    int i = first / quads, d = (first - i * quads) * 4;
    if (i >= count) return;
    int row = clamp(int(buf_index[(offset_index + i * index_step) * INDEX_WORDS]), 0, rows - 1);
    int at = offset_out + i * D + d;
#if VEC4
    buf_out[at >> 2] = VEC4_OF(T_OUT)(vec4(value(row, d), value(row, d + 1), value(row, d + 2), value(row, d + 3)));
#else
    for (int c = 0; c < 4 && d + c < D; c++) buf_out[at + c] = T_OUT(value(row, d + c));
#endif
#endif
}
