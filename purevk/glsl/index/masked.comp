#version 450
#extension GL_GOOGLE_include_directive : enable
// out[i] = mask[i] ? source[count of true elements in mask[0 .. i - 1]] : x[i], for dense tensors.
// A block is 16 LOCAL elements. A first dispatch (COUNT) counts the true elements of each block. A
// second one writes out.
//
// Buffers: with COUNT: mask, counts. Else: mask, x, source, counts, out.
// Macros:
//   T_X        element type of x, source and out
//   ACC        type of the arithmetic
//   FROM_X(v)  converts an element of x or source to ACC
//   TO_OUT(v)  converts ACC to an element of out
//   COUNT      1: counts the blocks
//   WORDS      1: the mask is read 16 bytes at once
//   VEC4       1: x and out are read and written as vec4
//   LOCAL      invocations of a workgroup (before.glslh)
//   SUBGROUP   1: uses subgroup operations (before.glslh)
// Grid: blocks. local_size_x is LOCAL.
#include "core/common.glslh"
#extension GL_EXT_shader_explicit_arithmetic_types_int8 : enable
#extension GL_EXT_shader_explicit_arithmetic_types_int16 : enable
#extension GL_EXT_shader_explicit_arithmetic_types_int64 : enable
#extension GL_KHR_shader_subgroup_arithmetic : enable
#include "core/math.glslh"

#ifndef LOCAL
#define LOCAL 64
#endif
#ifndef SUBGROUP
#define SUBGROUP 0
#endif
#ifndef COUNT
#define COUNT 0
#endif
#ifndef WORDS
#define WORDS 1
#endif
#ifndef VEC4
#define VEC4 0
#endif
#ifndef T_X
#define T_X float
#endif
#ifndef T_OUT
#define T_OUT T_X
#endif
#ifndef ACC
#define ACC float
#endif
#ifndef FROM_X
#define FROM_X(v) ACC(v)
#endif
#ifndef TO_OUT
#define TO_OUT(v) T_OUT(v)
#endif
#ifndef VEC4_OF_int
#define VEC4_OF_int ivec4
#endif

layout(local_size_x_id = 100) in;
#include "core/before.glslh"

PARAM(0, elements)  // of the mask, x and out
PARAM(1, mask_offset)
PARAM(2, x_offset)
PARAM(3, source_offset)
PARAM(4, out_offset)
PARAM(5, source_length)

#if WORDS
READONLY_BUFFER(0, mask, uvec4)
#else
READONLY_BUFFER(0, mask, uint8_t)
#endif
#if COUNT
WRITEONLY_BUFFER(1, counts, int)
#else
#if VEC4
#define T_ITEM VEC4_OF(T_X)
#else
#define T_ITEM T_X
#endif
READONLY_BUFFER(1, x, T_ITEM)
READONLY_BUFFER(2, source, T_X)
READONLY_BUFFER(3, counts, int)
WRITEONLY_BUFFER(4, out, T_ITEM)
shared uint shared_bits[LOCAL], shared_before[LOCAL];
#endif
shared uint whole;

// The mask of the 16 elements from `first` on, one bit each.
uint bits_at(int first) {
    uint bits = 0u;
#if WORDS
    if (first >= elements) return 0u;
    uvec4 some = buf_mask[(mask_offset + first) >> 4];
    UNROLL for (int k = 0; k < 4; k++) {
        uint word = some[k];
        UNROLL for (int b = 0; b < 4; b++) bits |= ((word >> (8 * b)) & 255u) != 0u ? 1u << (4 * k + b) : 0u;
    }
#else
    UNROLL for (int k = 0; k < 16; k++) {
        if (first + k < elements && uint(buf_mask[mask_offset + first + k]) != 0u) bits |= 1u << k;
    }
#endif
    return bits;
}

LOOPS(SUM_BEFORE_LOOPS)
#if !COUNT
LOOPS(loop(ceil(workgroups, LOCAL)))
#endif

void main() {
    int block = int(WORKGROUP_ID.x + WORKGROUP_ID.y * gl_NumWorkGroups.x), start = block * 16 * LOCAL;
    if (start >= elements) return;
    uint bits = bits_at(start + 16 * MINE);
#if COUNT
    if (MINE == 0) whole = 0u;
    barrier();
    uint mine = uint(bitCount(bits));
#if SUBGROUP
    mine = subgroupAdd(mine);
    if (gl_SubgroupInvocationID == 0u)
#endif
        atomicAdd(whole, mine);
    barrier();
    if (MINE == 0) buf_counts[block] = int(whole);
#else
    if (MINE == 0) whole = 0u;
    barrier();
    uint ahead = 0u;
    for (int other = MINE; other < block; other += LOCAL) ahead += uint(buf_counts[other]);
#if SUBGROUP
    ahead = subgroupAdd(ahead);
    if (gl_SubgroupInvocationID == 0u)
#endif
        atomicAdd(whole, ahead);
    uint among = sum_before(uint(bitCount(bits)));
    barrier();
    shared_bits[MINE] = bits;
    shared_before[MINE] = whole + among;
    barrier();
    UNROLL for (int j = 0; j < 4; j++) {
        // Four neighbours, all of the same 16.
        int at = 4 * (j * LOCAL + int(gl_LocalInvocationIndex)), shift = at & 15;
        uint some = shared_bits[at >> 4];
        int from = int(shared_before[at >> 4]) + bitCount(some & ((1u << shift) - 1u));
        some = (some >> shift) & 15u;
        at += start;
#if VEC4
        if (at >= elements) continue;
        VEC4_OF(ACC) made = VEC4_OF(ACC)(ACC(0));
        if (some != 15u) made = VEC4_OF(ACC)(buf_x[(x_offset + at) >> 2]);
#endif
        UNROLL for (int k = 0; k < 4; k++) {
            bool taken = (some & (1u << k)) != 0u;
            int entry = source_offset + min(from + bitCount(some & ((1u << k) - 1u)), source_length - 1);
#if VEC4
            if (taken) made[k] = FROM_X(buf_source[entry]);
#else
            if (at + k < elements) {
                if (taken) buf_out[out_offset + at + k] = TO_OUT(FROM_X(buf_source[entry]));
                else buf_out[out_offset + at + k] = TO_OUT(FROM_X(buf_x[x_offset + at + k]));
            }
#endif
        }
#if VEC4
        buf_out[(out_offset + at) >> 2] = T_ITEM(made);
#endif
    }
#endif
}
