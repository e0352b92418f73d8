#version 450
#extension GL_GOOGLE_include_directive : enable
// Sorts a few rows that fit into shared memory, with the index of each element: an element's place is
// the number of elements before it, which COUNTERS invocations count. Many workgroups share a row.
//
// Buffers: x, keys (the sorted elements) and indices (theirs).
// Offsets and strides are in elements. Outer dim 0 is the innermost.
// Macros:
//   T_X, T_KEY  element types of x and of the result
//   T_INDEX     type of the indices
//   ACC         type of the comparison: float, int or int64_t
//   FROM_X(v)   converts an element of x to ACC
//   TO_KEY(v)   converts ACC to an element of the result
//   WIDE        1: ACC is int64_t (0)
//   ROOM        elements of a row, at most
//   COUNTERS       invocations that count for one element; divides the workgroup
//   LOCAL       invocations of a workgroup
//   DESCENDING  1: the largest elements come first (0)
// local_size_x is LOCAL. Grid: (ceil(row_length * COUNTERS / LOCAL), rows).
#undef VEC4
#define VEC4 0
#include "core/rows.glslh"
#include "core/math.glslh"
#include "core/order.glslh"

#ifndef T_KEY
#define T_KEY T_X
#endif
#ifndef T_INDEX
#define T_INDEX int
#endif
#ifndef ACC
#define ACC float
#endif
#ifndef FROM_X
#define FROM_X(v) ACC(v)
#endif
#ifndef TO_KEY
#define TO_KEY(v) T_KEY(v)
#endif
#ifndef WIDE
#define WIDE 0
#endif
#ifndef ROOM
#define ROOM 1024
#endif
#ifndef COUNTERS
#define COUNTERS 32
#endif
#ifndef DESCENDING
#define DESCENDING 0
#endif
#if WIDE
#define KEY uint64_t
#else
#define KEY uint
#endif
#define IN_ORDER(key) (DESCENDING == 1 ? ~(key) : (key))

PARAM(0, x_offset)
PARAM(1, row_length)
PARAM(2, step)  // stride along a row
PARAM(3, stride_0)  // of the outer dims
PARAM(4, stride_1)
PARAM(5, stride_2)
PARAM(6, stride_3)
PARAM(7, size_0)  // of the outer dims
PARAM(8, size_1)
PARAM(9, size_2)
PARAM(10, keep)  // elements of a row that are stored
PARAM(11, values_offset)  // of the sorted elements
PARAM(12, values_step)
PARAM(13, values_stride_0)
PARAM(14, values_stride_1)
PARAM(15, values_stride_2)
PARAM(16, values_stride_3)
PARAM(17, indices_offset)  // of their indices
PARAM(18, indices_step)
PARAM(19, indices_stride_0)
PARAM(20, indices_stride_1)
PARAM(21, indices_stride_2)
PARAM(22, indices_stride_3)

WRITEONLY_BUFFER(1, keys, T_KEY)
WRITEONLY_BUFFER(2, indices, T_INDEX)

#define ELEMENTS (LOCAL / COUNTERS)
shared KEY row_keys[ROOM];
shared int before[ELEMENTS];

LOOPS(loop(ceil(row_length, LOCAL)) + loop(ceil(row_length, COUNTERS)))

void main() {
    int id = int(gl_LocalInvocationIndex), own = id / COUNTERS, lane = id % COUNTERS;
    int row = int(WORKGROUP_ID.y), q1 = row / size_0, q2 = q1 / size_1, q3 = q2 / size_2;
    int c0 = row - q1 * size_0, c1 = q1 - q2 * size_1, c2 = q2 - q3 * size_2;
    int base = x_offset + c0 * stride_0 + c1 * stride_1 + c2 * stride_2 + q3 * stride_3;
    for (int e = id; e < row_length; e += LOCAL) row_keys[e] = IN_ORDER(pv_key(FROM_X(READ_X(base + e * step))));
    if (lane == 0) before[own] = 0;
    barrier();
    int mine = int(WORKGROUP_ID.x) * ELEMENTS + own, count = 0;
    KEY key = row_keys[min(mine, row_length - 1)];
    // Of equal keys, those of lower indices come first.
    for (int e = lane; e < row_length; e += COUNTERS) {
        KEY other = row_keys[e];
        count += int(other < key || (other == key && e < mine));
    }
    atomicAdd(before[own], count);
    barrier();
    int place = before[own];
    if (lane != 0 || mine >= row_length || place >= keep) return;
    int values_at = values_offset + c0 * values_stride_0 + c1 * values_stride_1 + c2 * values_stride_2
        + q3 * values_stride_3;
    int indices_at = indices_offset + c0 * indices_stride_0 + c1 * indices_stride_1 + c2 * indices_stride_2
        + q3 * indices_stride_3;
    buf_keys[values_at + place * values_step] = TO_KEY(FROM_X(READ_X(base + mine * step)));
    buf_indices[indices_at + place * indices_step] = T_INDEX(mine);
}
