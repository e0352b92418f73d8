#version 450
#extension GL_GOOGLE_include_directive : enable
// A pointwise program of inputs whose neighbours in memory lie along another dim (K) than those of
// the output (J). A tile of each input goes through shared memory, so that both sides access memory
// in its order. lower/transpose.py writes what surrounds the program.
//
// An element has ITEM bytes. Shared memory holds words of 4 bytes (8, if ITEM is 8): PER_WORD
// elements that are neighbours along J. 16 bytes of them are a group. Groups are permuted
// (`tile_index`), so that the invocations of a subgroup use different banks both when they write
// along K and when they read along J.
//
// Macros:
//   ITEM      bytes of an element
//   KT        elements along K of a tile, a power of 2
//   JG        groups along J of a tile, a power of 2
//   VECTOR    elements per load, a power of 2
//   LOCAL     invocations of a workgroup
//   CHUNK     vectors that an invocation loads before it stores the first; a divisor of LOADS
//   TILES     tiles
//   LOADED(v) what is loaded, as words
//   BUFFERS   declarations of the buffers in0, in1, ..., out0, ...
//   DECLARE   sizes, strides and offsets: SPEC_CONSTANT and PUSH_CONSTANT, from word 1 on
//   J_SIZE, K_SIZE  the names among those that are the sizes of J and K
//   FIND_TILE statements that declare, from `group`, the number of the workgroup, the first element
//             of the tile (k_first, j_first), and the index along the other dims
//   STAGE     stage(n, ...) for each tile
//   BODY      statements for the group of elements j .. at k; `at` is its index in the first tile
// Parameter `work`: workgroups with work.
#include "core/common.glslh"
#pragma purevk macro HAS_8BIT
#ifdef HAS_8BIT
#extension GL_EXT_shader_8bit_storage : require
#extension GL_EXT_shader_explicit_arithmetic_types_int8 : enable
#endif
#pragma purevk macro HAS_16BIT
#ifdef HAS_16BIT
#extension GL_EXT_shader_16bit_storage : require
#extension GL_EXT_shader_explicit_arithmetic_types_int16 : enable
#endif
#ifdef HAS_INT64
#extension GL_EXT_shader_explicit_arithmetic_types_int64 : require
#endif
#include "core/math.glslh"

layout(local_size_x_id = 100) in;  // LOCAL
RAW_PUSH_CONSTANT(0, work)

#pragma purevk macro BUFFERS ITEM KT JG VECTOR LOCAL CHUNK TILES LOADED DECLARE J_SIZE K_SIZE FIND_TILE STAGE BODY
#ifndef BUFFERS
#define ITEM 4
#define KT 64
#define JG 16
#define VECTOR 1
#define LOCAL 256
#define CHUNK 16
#define TILES 1
#define BUFFERS READONLY_BUFFER(0, in0, uint) WRITEONLY_BUFFER(1, out0, uvec4)
#define LOADED(v) v
#define DECLARE const int J_SIZE = 64, K_SIZE = 64;
#define FIND_TILE int j_first = 0, k_first = 0;
#define STAGE STAGE_TILE(0, buf_in0, 0, 64, 1)
#define BODY buf_out0[(k * 64 + j) >> 2] = tile[at];
#endif

#define PER_WORD (ITEM < 4 ? 4 / ITEM : 1)
#define GROUP (16 / ITEM)
#define GROUP_WORDS (ITEM == 8 ? 2 : 4)
#define K_VECTORS (KT / VECTOR)
#define SIDE (K_VECTORS < 8 ? K_VECTORS : 8)
#define VECTORS (K_VECTORS * JG * GROUP_WORDS)
#define LOADS ((VECTORS + LOCAL - 1) / LOCAL)
#define STORES ((KT * JG + LOCAL - 1) / LOCAL)

BUFFERS
DECLARE

shared uvec4 tile[TILES * KT * JG];

int tile_index(int k, int group) { return k * JG + (group ^ ((k ^ (k >> 3)) & 7 & (JG - 1))); }

// The first k of a vector of a tile, and its word along J. Up to 8 vectors along K are read side by
// side in each row of a group.
ivec2 vector_at(int vector) {
    int k = vector % SIDE;
    vector /= SIDE;
    int j = vector % GROUP_WORDS;
    vector /= GROUP_WORDS;
    return ivec2((vector % (K_VECTORS / SIDE) * SIDE + k) * VECTOR, vector / (K_VECTORS / SIDE) * GROUP_WORDS + j);
}

uvec4 words(uint v) { return uvec4(v, 0u, 0u, 0u); }
uvec4 words(uvec2 v) { return uvec4(v, 0u, 0u); }
uvec4 words(uvec4 v) { return v; }

// Element e of the PER_WORD rows `v`, from `row` on.
#define ELEMENT(v, e) (PER_WORD == 1 ? (v)[e] : ((v)[(e) / PER_WORD] >> ((e) % PER_WORD * 8 * ITEM)) & ((1u << (8 * ITEM % 32)) - 1u))

// Indices outside the operand are clamped; what is read there is not used.
#define STAGE_TILE(number, buffer, first, step_j, step_k) \
    for (int n = 0; n < LOADS; n += CHUNK) { \
        uvec4 v[CHUNK * PER_WORD]; \
        UNROLL for (int c = 0; c < CHUNK; c++) { \
            ivec2 vector = vector_at((n + c) * LOCAL + int(gl_LocalInvocationIndex)); \
            int k = min(k_first + vector.x, K_SIZE - VECTOR); \
            UNROLL for (int p = 0; p < PER_WORD; p++) { \
                int j = min(j_first + vector.y * PER_WORD + p, J_SIZE - 1); \
                v[c * PER_WORD + p] = words(LOADED(buffer[((first) + j * (step_j) + k * (step_k)) / VECTOR])); \
            } \
        } \
        UNROLL for (int c = 0; c < CHUNK; c++) { \
            ivec2 vector = vector_at((n + c) * LOCAL + int(gl_LocalInvocationIndex)); \
            if ((n + c) * LOCAL + int(gl_LocalInvocationIndex) < VECTORS) { \
                UNROLL for (int e = 0; e < VECTOR; e++) { \
                    int at = number * KT * JG + tile_index(vector.x + e, vector.y / GROUP_WORDS); \
                    PUT(at, vector.y % GROUP_WORDS, c, e) \
                } \
            } \
        } \
    }

#if ITEM == 8
#define PUT(at, word, c, e) if (word == 0) tile[at].xy = VECTOR == 2 && e == 1 ? v[c].zw : v[c].xy; else tile[at].zw = VECTOR == 2 && e == 1 ? v[c].zw : v[c].xy;
#else
#define PUT(at, word, c, e) \
    uint made = ELEMENT(v[c * PER_WORD], e); \
    UNROLL for (int p = 1; p < PER_WORD; p++) made |= ELEMENT(v[c * PER_WORD + p], e) << (p * 8 * ITEM % 32); \
    tile[at][word] = made;
#endif

LOOPS(loop(LOADS / CHUNK))

void main() {
    int group = int(WORKGROUP_ID.x + WORKGROUP_ID.y * gl_NumWorkGroups.x);
    if (group >= push.p[0]) return;
    FIND_TILE
    STAGE
    barrier();
    UNROLL for (int n = 0; n < STORES; n++) {
        int group_index = n * LOCAL + int(gl_LocalInvocationIndex);
        int k = k_first + group_index / JG, j = j_first + group_index % JG * GROUP, at = tile_index(group_index / JG, group_index % JG);
        if (group_index < KT * JG && k < K_SIZE && j < J_SIZE) {
            BODY
        }
    }
}
