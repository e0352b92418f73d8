#version 450
#extension GL_GOOGLE_include_directive : enable
// out[i] = x[offset + sum_d i_d * x_stride_d + sum_k wrap_k(index_k[i]) * step_k],
// i = (i3, i2, i1, i0)
//
// One formula serves embedding, index_select, gather along a dim and index.Tensor. A dim of the
// output that indexes x directly has a stride in x, and stride 0 in the index tensors. A dim of the
// (broadcast) index tensors has stride 0 in x, and strides in the index tensors that have it.
// Example: embedding(table [R, E], idx [I]) has dims i1 = I and i0 = E, x strides (i1: 0, i0: 1),
// index strides (1, 0), size_0 = R, step_0 = E.
//
// wrap_k(i) is i + size_k if i < 0, clamped to 0 .. size_k - 1, so that nothing outside x is read.
//
// Buffers: x, the index tensors index_0 to index_3 (as many as INDICES says), and out.
// Offsets and strides are in elements. out is dense, and dim 0 is its innermost. limit_ik is size_k;
// stride_ik_d is the stride of dim d in index tensor k.
// Macros:
//   DIMS            dims of the output, 1 to 4
//   INDICES         index tensors, 1 to 4
//   T_X, T_OUT      element types
//   TEXEL_X         1: x is a uniform texel buffer (rows.glslh)
//   T_INDEX         type of the index tensors: int, int64_t, ...
//   INDEX_WORDS     2: the index tensors are int64, T_INDEX is int, and only low words are read.
//                   This needs no 64-bit integers. An index beyond 32 bits counts as its low word.
//                   Offsets and strides are still those of the int64 elements
//   ITEMS           elements per invocation, a workgroup's width apart; default 1
//   PARTS           parts of x that are read one after the other; default 1. Elements of one part
//                   are then found in a cache
//   PART            log2 of the elements of such a part
//   VEC4            1: x and out are read and written as vec4. Dim 0 has stride 1 in x and 0 in the
//                   index tensors. Its size, all other strides of x, the steps and both offsets are
//                   multiples of 4
// Grid: groups = ceil(outputs / (VEC4 ? 4 : 1) / ITEMS / local_size_x), as
// (min(groups, 65535), ceil(groups / 65535), 1).
#undef ROW_PER_INVOCATION
#define ROW_PER_INVOCATION 1
#include "core/rows.glslh"

#ifndef T_OUT
#define T_OUT T_X
#endif
#ifndef T_INDEX
#define T_INDEX int
#endif
#ifndef INDEX_WORDS
#define INDEX_WORDS 1
#endif
#pragma purevk macro PART
#ifndef ITEMS
#define ITEMS 1
#endif
#ifndef DIMS
#define DIMS 2
#endif
#ifndef INDICES
#define INDICES 1
#endif

PARAM(0, x_offset)
PARAM(1, out_offset)
PARAM(2, outputs)
#if DIMS > 1
PARAM(3, size_0)
PARAM(7, x_stride_1)
#endif
#if DIMS > 2
PARAM(4, size_1)
PARAM(8, x_stride_2)
#endif
#if DIMS > 3
PARAM(5, size_2)
PARAM(9, x_stride_3)
#endif
PARAM(6, x_stride_0)
#if INDICES > 0
PARAM(10, offset_i0)
PARAM(11, limit_i0)
PARAM(12, step_i0)
PARAM(13, stride_i0_0)
#if DIMS > 1
PARAM(14, stride_i0_1)
#endif
#if DIMS > 2
PARAM(15, stride_i0_2)
#endif
#if DIMS > 3
PARAM(16, stride_i0_3)
#endif
READONLY_BUFFER(1, index_0, T_INDEX)
#endif
#if INDICES > 1
PARAM(17, offset_i1)
PARAM(18, limit_i1)
PARAM(19, step_i1)
PARAM(20, stride_i1_0)
#if DIMS > 1
PARAM(21, stride_i1_1)
#endif
#if DIMS > 2
PARAM(22, stride_i1_2)
#endif
#if DIMS > 3
PARAM(23, stride_i1_3)
#endif
READONLY_BUFFER(2, index_1, T_INDEX)
#endif
#if INDICES > 2
PARAM(24, offset_i2)
PARAM(25, limit_i2)
PARAM(26, step_i2)
PARAM(27, stride_i2_0)
#if DIMS > 1
PARAM(28, stride_i2_1)
#endif
#if DIMS > 2
PARAM(29, stride_i2_2)
#endif
#if DIMS > 3
PARAM(30, stride_i2_3)
#endif
READONLY_BUFFER(3, index_2, T_INDEX)
#endif
#if INDICES > 3
PARAM(31, offset_i3)
PARAM(32, limit_i3)
PARAM(33, step_i3)
PARAM(34, stride_i3_0)
#if DIMS > 1
PARAM(35, stride_i3_1)
#endif
#if DIMS > 2
PARAM(36, stride_i3_2)
#endif
#if DIMS > 3
PARAM(37, stride_i3_3)
#endif
READONLY_BUFFER(4, index_3, T_INDEX)
#endif

#if VEC4
BUFFER(INDICES + 1, out, VEC4_OF(T_OUT))
#define EACH 4
#else
BUFFER(INDICES + 1, out, T_OUT)
#define EACH 1
#endif

int wrap(T_INDEX i, int limit) {
    T_INDEX high = T_INDEX(limit - 1);
    if (i < 0) i += T_INDEX(limit);
    return int(i < 0 ? T_INDEX(0) : i > high ? high : i);
}

// The offset in index tensor k of output coordinates `at`.
#if DIMS == 1
#define OFFSET_IN(k) (at.x * stride_i##k##_0)
#elif DIMS == 2
#define OFFSET_IN(k) (at.x * stride_i##k##_0 + at.y * stride_i##k##_1)
#elif DIMS == 3
#define OFFSET_IN(k) (at.x * stride_i##k##_0 + at.y * stride_i##k##_1 + at.z * stride_i##k##_2)
#else
#define OFFSET_IN(k) (at.x * stride_i##k##_0 + at.y * stride_i##k##_1 + at.z * stride_i##k##_2 + at.w * stride_i##k##_3)
#endif
#define INDEXED(k) (wrap(buf_index_##k[(offset_i##k + OFFSET_IN(k)) * INDEX_WORDS], limit_i##k) * step_i##k)

// The element of x that output o is.
int source_of(int o) {
    ivec4 at = ivec4(o, 0, 0, 0);
#if DIMS > 1
    at.y = at.x / size_0;
    at.x -= at.y * size_0;
#endif
#if DIMS > 2
    at.z = at.y / size_1;
    at.y -= at.z * size_1;
#endif
#if DIMS > 3
    at.w = at.z / size_2;
    at.z -= at.w * size_2;
#endif
    int from = x_offset + at.x * x_stride_0;
#if DIMS > 1
    from += at.y * x_stride_1;
#endif
#if DIMS > 2
    from += at.z * x_stride_2;
#endif
#if DIMS > 3
    from += at.w * x_stride_3;
#endif
    from += INDEXED(0);
#if INDICES > 1
    from += INDEXED(1);
#endif
#if INDICES > 2
    from += INDEXED(2);
#endif
#if INDICES > 3
    from += INDEXED(3);
#endif
    return from;
}

// The type in which a copy holds an element. Small types are widened, as in rows.glslh.
#define WIDE_OF_float float
#define WIDE_OF_float16_t float
#define WIDE_OF_int int
#define WIDE_OF_int8_t int
#define WIDE_OF_int16_t int
#define WIDE_OF_uint8_t uint
#define WIDE_OF_uint16_t uint
#define WIDE_OF_int64_t int64_t
#define WIDE_OF_double double
#define WIDE_OF_PASTE(T) WIDE_OF_##T
#define WIDE_OF(T) WIDE_OF_PASTE(T)
#if VEC4
#define ELEMENTS X4
#define LOAD(from) READ4_X(from)
#define STORED(v) VEC4_OF(T_OUT)(v)
#else
#define ELEMENTS WIDE_OF(T_X)
#define LOAD(from) ELEMENTS(READ_X(from))
#define STORED(v) T_OUT(v)
#endif

#ifndef PARTS
#define PARTS 1
#endif

#if PARTS > 1
LOOPS(loop(ceil(outputs / EACH, workgroups * local_size_x * ITEMS), loop(PARTS)))
#else
LOOPS(loop(ceil(outputs / EACH, workgroups * local_size_x * ITEMS)))
#endif

void main() {
    // All indices first, then all elements, so that many loads are in flight. Items beyond the end
    // repeat the last element.
    int start = (WORKGROUP * ITEMS * WORKGROUP_SIZE + int(gl_LocalInvocationIndex)) * EACH, step = WORKGROUP_SIZE * EACH;
    for (; start < outputs; start += WORKGROUPS * ITEMS * step) {
        int from[ITEMS];
        UNROLL for (int p = 0; p < ITEMS; p++) from[p] = source_of(min(start + p * step, outputs - EACH));
        ELEMENTS v[ITEMS];
#if PARTS > 1
        for (int part = 0; part < PARTS; part++) {
            UNROLL for (int p = 0; p < ITEMS; p++) {
                if (min(max(from[p] - x_offset, 0) >> PART, PARTS - 1) == part) v[p] = LOAD(from[p]);
            }
        }
#else
        UNROLL for (int p = 0; p < ITEMS; p++) v[p] = LOAD(from[p]);
#endif
        UNROLL for (int p = 0; p < ITEMS; p++) {
            int o = start + p * step;
            if (o < outputs) buf_out[(out_offset + o) / EACH] = STORED(v[p]);
        }
    }
}
