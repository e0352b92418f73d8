#version 450
#extension GL_GOOGLE_include_directive : enable
// Sorts blocks of rows in shared memory, with the index of each element, by a bitonic network. Every
// step orders the same way: the first step of a merge compares mirrored positions. So positions
// behind the end of a row can be left out.
//
// Buffers: x, from (if INDEXED: the elements' indices in their rows), keys (the sorted
// elements) and indices (theirs, int), both dense.
// Offsets and strides are in elements. Outer dim 0 is the innermost.
// Macros:
//   T_X, T_KEY  element types of x and of the result
//   ACC         type of the comparison
//   FROM_X(v)   converts an element of x to ACC
//   TO_KEY(v)   converts ACC to an element of the result
//   BLOCK       elements of a block, a power of 2
//   DESCENDING  1: the largest elements come first
//   INDEXED     1: binding 1 has the elements' indices; 0: the index is the position in the row
// Grid: blocks of all rows, flat; any local_size_x.
#undef VEC4
#define VEC4 0
#include "core/rows.glslh"
#include "core/math.glslh"
#include "core/order.glslh"

#ifndef T_KEY
#define T_KEY T_X
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
#ifndef BLOCK
#define BLOCK 256
#endif
#ifndef DESCENDING
#define DESCENDING 0
#endif
#ifndef INDEXED
#define INDEXED 0
#endif

PARAM(0, x_offset)
PARAM(1, rows)
PARAM(2, row_length)
PARAM(3, step)  // stride along a row
PARAM(4, stride_0)  // of the outer dims
PARAM(5, stride_1)
PARAM(6, stride_2)
PARAM(7, stride_3)
PARAM(8, size_0)  // of the outer dims
PARAM(9, size_1)
PARAM(10, size_2)
PARAM(11, blocks)  // of a row
PARAM(12, keep)  // elements of each block that are stored
PARAM(13, key_offset)  // of the sorted elements
PARAM(14, out_length)  // of a row of them

#if INDEXED
READONLY_BUFFER(1, from, int)
BUFFER(2, keys, T_KEY)
BUFFER(3, indices, int)
#else
BUFFER(1, keys, T_KEY)
BUFFER(2, indices, int)
#endif

shared ACC key[BLOCK];
shared int index[BLOCK];

void order(int low, int high) {
    if (pv_before(key[high], index[high], key[low], index[low], DESCENDING == 1)) {
        ACC k = key[low];
        int p = index[low];
        key[low] = key[high];
        index[low] = index[high];
        key[high] = k;
        index[high] = p;
    }
}

// Compares all pairs at a distance. `mirrored`: the first step of a merge of two halves of `span`.
void compare(int span, bool mirrored) {
    int half_span = span / 2;
    for (int c = int(gl_LocalInvocationIndex); c < BLOCK / 2; c += WORKGROUP_SIZE) {
        int group = c / half_span, at = c - group * half_span;
        int low = group * span + at;
        order(low, mirrored ? group * span + span - 1 - at : low + half_span);
    }
    barrier();
}

#define COMPARE_LOOPS loop(ceil(BLOCK / 2, local_size_x))
LOOPS(loop(ceil(rows * blocks, workgroups), 2 * loop(ceil(BLOCK, local_size_x)) + loop(log2(BLOCK), COMPARE_LOOPS + loop(log2(BLOCK), COMPARE_LOOPS))))

void main() {
    int all_blocks = rows * blocks;
    for (int i = WORKGROUP; i < all_blocks; i += WORKGROUPS) {
        int row = i / blocks, block = i - row * blocks, first = block * BLOCK;
        int q1 = row / size_0, q2 = q1 / size_1, q3 = q2 / size_2;
        int base = x_offset + (row - q1 * size_0) * stride_0 + (q1 - q2 * size_1) * stride_1 + (q2 - q3 * size_2) * stride_2
            + q3 * stride_3;
        for (int e = int(gl_LocalInvocationIndex); e < BLOCK; e += WORKGROUP_SIZE) {
            ACC k = ACC(0);
            int p = PV_NOWHERE;
            if (first + e < row_length) {
                k = FROM_X(READ_X(base + (first + e) * step));
#if INDEXED
                p = buf_from[row * row_length + first + e];
#else
                p = first + e;
#endif
            }
            key[e] = k;
            index[e] = p;
        }
        barrier();
        for (int whole = 2; whole <= BLOCK; whole *= 2) {
            compare(whole, true);
            for (int span = whole / 2; span > 1; span /= 2) compare(span, false);
        }
        for (int e = int(gl_LocalInvocationIndex); e < keep; e += WORKGROUP_SIZE) {
            int at = block * keep + e;
            if (at < out_length) {
                buf_keys[key_offset + row * out_length + at] = TO_KEY(key[e]);
                buf_indices[row * out_length + at] = index[e];
            }
        }
        barrier();
    }
}
