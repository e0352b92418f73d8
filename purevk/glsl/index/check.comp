#version 450
#extension GL_GOOGLE_include_directive : enable
// Notes an index that is not within lowest .. below - 1. Indices that are in range write nothing, so
// the host clears the note only after it has read one.
//
// Buffers: index, note: 1 if an index is out of range, this index (brought within 32 bits; of several
// any one), lowest, below. flag: 1 if an index is out of range, for kernels that write states.
// Offsets and strides are in elements.
// Macros:
//   DIMS         dims of the index, 1 to 4; dim 0 is the innermost
//   T_INDEX      type of the index: int or int64_t
//   INDEX_WORDS  2: the index is int64, T_INDEX is int, and both words are read
//   FLAG         1: there is a flag
//   ITEMS        indices that an invocation compares, a workgroup's width apart
// Grid: ceil(count / ITEMS / local_size_x) workgroups, spread over x and y.
#include "core/common.glslh"
#pragma purevk macro HAS_INT64
#ifdef HAS_INT64
#extension GL_EXT_shader_explicit_arithmetic_types_int64 : require
#endif
#ifndef T_INDEX
#define T_INDEX int
#endif
#ifndef DIMS
#define DIMS 1
#endif
#ifndef INDEX_WORDS
#define INDEX_WORDS 1
#endif
#ifndef FLAG
#define FLAG 0
#endif
#ifndef ITEMS
#define ITEMS 4
#endif

PARAM(0, count)
PARAM(1, lowest)
PARAM(2, below)
PARAM(3, offset)
PARAM(4, stride_0)
#if DIMS > 1
PARAM(5, stride_1)
PARAM(8, size_0)
#endif
#if DIMS > 2
PARAM(6, stride_2)
PARAM(9, size_1)
#endif
#if DIMS > 3
PARAM(7, stride_3)
PARAM(10, size_2)
#define OUTERMOST stride_3
#elif DIMS > 2
#define OUTERMOST stride_2
#elif DIMS > 1
#define OUTERMOST stride_1
#else
#define OUTERMOST stride_0
#endif

layout(local_size_x_id = 100) in;
READONLY_BUFFER(0, index, T_INDEX)
WRITEONLY_BUFFER(1, note, int)
#if FLAG
WRITEONLY_BUFFER(2, flag, int)
#endif

#define LEAST (-2147483647 - 1)
#define GREATEST 2147483647

// Where the index of a number is.
#define SPLIT(d) from += number % size_##d * stride_##d; number /= size_##d;
int position_of(int number) {
    int from = offset;
#if DIMS > 1
    SPLIT(0)
#endif
#if DIMS > 2
    SPLIT(1)
#endif
#if DIMS > 3
    SPLIT(2)
#endif
    return from + number * OUTERMOST;
}

void main() {
    int group = int(WORKGROUP_ID.y * gl_NumWorkGroups.x + WORKGROUP_ID.x), width = int(gl_WorkGroupSize.x);
    int first = group * ITEMS * width + int(gl_LocalInvocationIndex);
    UNROLL for (int p = 0; p < ITEMS; p++) {
        int number = first + p * width;
        if (number < count) {
            int at = position_of(number) * INDEX_WORDS;
            T_INDEX i = buf_index[at];
            bool within = i >= lowest && i < below;
#if INDEX_WORDS > 1
            int high = buf_index[at + 1];
            if (high != i >> 31) {
                within = false;
                i = high < 0 ? LEAST : GREATEST;
            }
#endif
            if (!within) {
                buf_note[0] = 1;
                buf_note[1] = int(i < LEAST ? T_INDEX(LEAST) : i > GREATEST ? T_INDEX(GREATEST) : i);
                buf_note[2] = lowest;
                buf_note[3] = below;
#if FLAG
                buf_flag[0] = 1;
#endif
            }
        }
    }
}
