#version 450
#extension GL_GOOGLE_include_directive : enable
// out[r, c] = x[r, wrap(index[r, c])]: elements of 4 bytes, picked along the rows of a matrix. A
// workgroup keeps one row in shared memory, where picking single elements is cheap.
//
// wrap(i) is i + columns if i < 0, clamped to 0 .. columns - 1.
//
// Buffers: x, index, out (dense).
// Offsets and strides are in elements.
// Macros:
//   VEC4     1: x is read as vec4. Its columns, offset and stride are multiples of 4
//   T_INDEX  type of the index tensor: int, int64_t, ...
//   COLUMNS  elements of shared memory for a row, a multiple of 4
//   ITEMS    columns of out that an invocation computes per iteration
// Grid: one workgroup per row, spread over x and y.
#include "core/common.glslh"
#pragma purevk macro HAS_INT64
#ifdef HAS_INT64
#extension GL_EXT_shader_explicit_arithmetic_types_int64 : require
#endif
#ifndef T_INDEX
#define T_INDEX int
#endif
#ifndef VEC4
#define VEC4 0
#endif
#ifndef COLUMNS
#define COLUMNS 1024
#endif
#ifndef ITEMS
#define ITEMS 4
#endif

PARAM(0, rows)
PARAM(1, columns)  // of x
PARAM(2, outputs)  // columns of out
PARAM(3, x_offset)
PARAM(4, out_offset)
PARAM(5, x_stride)  // from one row to the next
PARAM(6, index_offset)
PARAM(7, index_row)  // strides of the index tensor
PARAM(8, index_column)

layout(local_size_x_id = 100) in;
#if VEC4
#define ELEMENTS uvec4
#define EACH 4
#else
#define ELEMENTS uint
#define EACH 1
#endif
READONLY_BUFFER(0, x, ELEMENTS)
READONLY_BUFFER(1, index, T_INDEX)
WRITEONLY_BUFFER(2, out, uint)

shared ELEMENTS row_of_x[COLUMNS / EACH];

int wrap(T_INDEX i) {
    T_INDEX high = T_INDEX(columns - 1);
    if (i < 0) i += T_INDEX(columns);
    return int(i < 0 ? T_INDEX(0) : i > high ? high : i);
}

LOOPS(loop(ceil(columns / EACH, 4 * local_size_x)) + loop(ceil(outputs, ITEMS * local_size_x)))

void main() {
    int row = int(WORKGROUP_ID.x + WORKGROUP_ID.y * gl_NumWorkGroups.x), lane = int(gl_LocalInvocationIndex);
    int width = int(gl_WorkGroupSize.x), count = columns / EACH;
    if (row >= rows) return;
    int from = (x_offset + row * x_stride) / EACH;
    for (int start = lane; start < count; start += 4 * width) {
        ELEMENTS v[4];
        UNROLL for (int p = 0; p < 4; p++) v[p] = buf_x[from + min(start + p * width, count - 1)];
        UNROLL for (int p = 0; p < 4; p++) {
            if (start + p * width < count) row_of_x[start + p * width] = v[p];
        }
    }
    barrier();
    for (int start = lane; start < outputs; start += ITEMS * width) {
        int at[ITEMS];
        UNROLL for (int p = 0; p < ITEMS; p++) {
            at[p] = wrap(buf_index[index_offset + row * index_row + min(start + p * width, outputs - 1) * index_column]);
        }
        uint v[ITEMS];
        UNROLL for (int p = 0; p < ITEMS; p++) {
#if VEC4
            v[p] = row_of_x[at[p] >> 2][at[p] & 3];
#else
            v[p] = row_of_x[at[p]];
#endif
        }
        UNROLL for (int p = 0; p < ITEMS; p++) {
            if (start + p * width < outputs) buf_out[out_offset + row * outputs + start + p * width] = v[p];
        }
    }
}
