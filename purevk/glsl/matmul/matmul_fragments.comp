#version 450
#extension GL_GOOGLE_include_directive : enable
#ifndef COOPMAT
#define COOPMAT 0
#endif
#ifndef BFLOAT16
#define BFLOAT16 0
#endif
#if COOPMAT
#extension GL_KHR_cooperative_matrix : require
#extension GL_KHR_memory_scope_semantics : require
#if BFLOAT16
#extension GL_EXT_bfloat16 : require
#extension GL_EXT_shader_explicit_arithmetic_types_int16 : require
#endif
#endif
// out[m, n] = EPILOGUE(sum_k A[m, k] * B[k, n] + bias[n]) of 16 bits on matrix cores, without shared
// memory: A and B are in the order of fragments (fragment_blocks.glslh), and invocations load their
// elements of them directly. Sums are float.
//
// The elements of fragments of 16 x 16 x 16 must be where fragments.glslh says, those of the right
// operand too, so the device has to be tested first.
//
// Buffers: those of matmul_io.glslh. A has ceil(M / 16) * 16 rows, of which those from M on may hold
// anything, and B has N / 16 blocks of columns.
// Macros: those of matmul_io.glslh, VEC8_A, VEC8_B and VEC4_OUT 1, and
//   BLOCKS_OUT   1: the result is in the order of fragments, a left operand with N terms (0: rows)
//   SUBGROUPS_M, SUBGROUPS_N   subgroups of a workgroup along rows and columns (2, 2)
//   FRAGMENTS_M, FRAGMENTS_N   fragments of a subgroup along rows and columns (3, 3)
//   SLICES       subgroups that share the terms of the same results (1)
//   DEPTH        steps of 16 terms that are loaded before they are needed (2)
//   TURN         steps in a turn of the loop, a multiple of DEPTH (DEPTH)
//   REST         steps behind the last turn: K / 16 % TURN (0)
//   PAIRED, STORE_PAIR  as in matmul_fused.glslh. FRAGMENTS_N is even, `pair` a multiple of 16
//   BFLOAT16     with COOPMAT, 1: A and B are bfloat16. Needs a compiler that knows GL_EXT_bfloat16
//   COOPMAT      0: the same in scalar arithmetic, for tests on devices without matrix cores
// K is a multiple of 16, N of 16, with PAIRED of 32.
// Grid: (ceil(N / (16 * FRAGMENTS_N * SUBGROUPS_N)), ceil(M / (16 * FRAGMENTS_M * SUBGROUPS_M))).
#include "core/common.glslh"
#ifndef BLOCKS_OUT
#define BLOCKS_OUT 0
#endif
#ifndef SUBGROUPS_M
#define SUBGROUPS_M 2
#endif
#ifndef SUBGROUPS_N
#define SUBGROUPS_N 2
#endif
#ifndef FRAGMENTS_M
#define FRAGMENTS_M 3
#endif
#ifndef FRAGMENTS_N
#define FRAGMENTS_N 3
#endif
#ifndef SLICES
#define SLICES 1
#endif
#ifndef DEPTH
#define DEPTH 2
#endif
#ifndef TURN
#define TURN DEPTH
#endif
#ifndef REST
#define REST 0
#endif
#include "attention/matmul_fused.glslh"
#define FRAGMENT_N 16
#ifndef VEC8_A
#define VEC8_A 1
#endif
#ifndef VEC8_B
#define VEC8_B 1
#endif
#ifndef VEC4_OUT
#define VEC4_OUT 1
#endif

PARAM(0, M)
PARAM(1, N)
PARAM(2, K)
PARAM(3, ldo)
#undef PARAM_DEFAULT
#define PARAM_DEFAULT 0
PARAM(4, offset_a)
PARAM(5, offset_b)
PARAM(6, offset_o)
PARAM(7, offset_bias)
#if PAIRED
#undef PARAM_DEFAULT
#define PARAM_DEFAULT 16
PARAM(8, pair)
#endif

#include "matmul/matmul_io.glslh"
#include "core/fragments.glslh"
#include "matmul/fragment_blocks.glslh"

#define RESULTS (SUBGROUPS_M * SUBGROUPS_N)  // subgroups with results of their own
layout(local_size_x = 32 * RESULTS * SLICES, local_size_y = 1, local_size_z = 1) in;

#if COOPMAT
#define EACH UNROLL
#if BFLOAT16
#define LOADED bfloat16_t
#else
#define LOADED float16_t
#endif
#define SUB int(gl_SubgroupID)
#define LANE int(gl_SubgroupInvocationID)
#define SUMS(name) coopmat<float, gl_ScopeSubgroup, 16, 16, gl_MatrixUseAccumulator> name
#else
#define EACH  // small code, which a software device compiles in time
#define SUB int(gl_LocalInvocationIndex / 32u)
#define LANE int(gl_LocalInvocationIndex % 32u)
#define SUMS(name) float name[8]
#endif

#if COOPMAT
#if BFLOAT16
#define PAIR bf16vec2
#define PAIR_OF(word) uintBitsToBFloat16EXT(unpack16(word))
#else
#define PAIR f16vec2
#define PAIR_OF(word) unpackFloat2x16(word)
#endif
#define FILL(fragment, words)             \
    UNROLL for (int p = 0; p < 4; p++) {  \
        PAIR pair = PAIR_OF(words[p]);    \
        fragment[2 * p] = pair.x;         \
        fragment[2 * p + 1] = pair.y;     \
    }
// Adds step `start` + t, and loads the one that is DEPTH steps behind it.
#define MULTIPLY_STEP(t, start)                                                                                        \
    coopmat<LOADED, gl_ScopeSubgroup, 16, 16, gl_MatrixUseA> a[FRAGMENTS_M];                                           \
    coopmat<LOADED, gl_ScopeSubgroup, 16, 16, gl_MatrixUseB> b[FRAGMENTS_N];                                           \
    UNROLL for (int i = 0; i < FRAGMENTS_M; i++) { FILL(a[i], next_a[(t) % DEPTH][i]) }                                \
    UNROLL for (int j = 0; j < FRAGMENTS_N; j++) { FILL(b[j], next_b[(t) % DEPTH][j]) }                                \
    int then = min((start) + (t) + DEPTH, steps - 1) * 32;                                                             \
    UNROLL for (int i = 0; i < FRAGMENTS_M; i++) next_a[(t) % DEPTH][i] = buf_a[at_a[i] + then];                       \
    UNROLL for (int j = 0; j < FRAGMENTS_N; j++) next_b[(t) % DEPTH][j] = buf_b[at_b[j] + then];                       \
    UNROLL for (int j = 0; j < FRAGMENTS_N; j++) {                                                                     \
        UNROLL for (int i = 0; i < FRAGMENTS_M; i++) sums[i][j] = coopMatMulAdd(a[i], b[j], sums[i][j]);               \
    }
#else
// Element [row][term] of a fragment whose words start at a place.
#define WORDS_AT(buffer, at, row, term) buffer[(at) + (row) % 8 * 4 + (term) % 8 / 2][(row) / 8 * 2 + (term) / 8]
float element_of(uint word, int odd) {
    uint bits = odd == 1 ? word >> 16 : word & 0xffffu;
#if BFLOAT16
    return uintBitsToFloat(bits << 16);
#else
    return unpackHalf2x16(bits).x;
#endif
}
#endif

#if SLICES > 1
shared vec4 parts[(SLICES - 1) * RESULTS * FRAGMENTS_M * FRAGMENTS_N * 64];
#endif

#define COLUMNS (FRAGMENTS_N / (1 + PAIRED))  // fragments of columns of the output
#define LAST_COLUMN (N / (16 * (1 + PAIRED)) - 1)
#if COLUMNS * FRAGMENTS_M * 2 * EXTRAS_WORDS <= 64
#define EXTRAS_AT_ONCE 1
#else
#define EXTRAS_AT_ONCE 0
#endif
#define ROW_OF(i, h) min((block_m + i) * 16 + lane / 4 + 8 * h, M - 1)
#define COLUMN_OF(j) (min(block_n + j, LAST_COLUMN) * 16 + lane % 4 * 4)

// The columns of B that fragment j of a subgroup has, in blocks.
int block_of(int block_n, int j) {
    int block = min(block_n + j % COLUMNS, LAST_COLUMN);
#if PAIRED
    int half_of_pairs = pair / 16;
    block += (block / half_of_pairs + j / COLUMNS) * half_of_pairs;
#endif
    return block;
}

#if SLICES > 1
#define PART(s, i, j, h) parts[((((s) * RESULTS + sub) * FRAGMENTS_M + i) * FRAGMENTS_N + j) * 64 + (h) * 32 + lane]
#endif
// The sums of row h of an invocation in a fragment.
#define SUM4(i, j, h) vec4(sums[i][j][4 * h], sums[i][j][4 * h + 1], sums[i][j][4 * h + 2], sums[i][j][4 * h + 3])

#if COOPMAT
LOOPS(loop(ceil(K, 16)))
#else
LOOPS(loop(FRAGMENTS_M, loop(FRAGMENTS_N, loop(8, loop(K + 16)))))
#endif

void main() {
    int lane = LANE, steps = K / 16, slice = SUB / RESULTS, sub = SUB % RESULTS;
    int block_m = (int(WORKGROUP_ID.y) * SUBGROUPS_M + sub / SUBGROUPS_N) * FRAGMENTS_M;
    int block_n = (int(WORKGROUP_ID.x) * SUBGROUPS_N + sub % SUBGROUPS_N) * COLUMNS;
    // Whole turns are shared by the slices. What is behind them is of the last slice.
    int turns = steps / TURN, share = (turns + SLICES - 1) / SLICES * TURN;
    int first = min(slice * share, turns * TURN), last = min(first + share, turns * TURN);
    // The first words of this invocation, or without matrix cores of the block.
    int at_a[FRAGMENTS_M], at_b[FRAGMENTS_N];
    EACH for (int i = 0; i < FRAGMENTS_M; i++) {
        at_a[i] = offset_a / 8 + min(block_m + i, (M + 15) / 16 - 1) * steps * 32 + COOPMAT * lane;
    }
    EACH for (int j = 0; j < FRAGMENTS_N; j++) {
        at_b[j] = offset_b / 8 + block_of(block_n, j) * steps * 32 + COOPMAT * lane;
    }
    SUMS(sums[FRAGMENTS_M][FRAGMENTS_N]);
#if COOPMAT
    UNROLL for (int i = 0; i < FRAGMENTS_M; i++) {
        UNROLL for (int j = 0; j < FRAGMENTS_N; j++) {
            sums[i][j] = coopmat<float, gl_ScopeSubgroup, 16, 16, gl_MatrixUseAccumulator>(0.0);
        }
    }
    uvec4 next_a[DEPTH][FRAGMENTS_M], next_b[DEPTH][FRAGMENTS_N];
    UNROLL for (int d = 0; d < DEPTH; d++) {
        int start = min(first + d, steps - 1) * 32;
        UNROLL for (int i = 0; i < FRAGMENTS_M; i++) next_a[d][i] = buf_a[at_a[i] + start];
        UNROLL for (int j = 0; j < FRAGMENTS_N; j++) next_b[d][j] = buf_b[at_b[j] + start];
    }
    // A compiler that unrolls as it likes makes code that is in no cache where the kernel runs once.
    ROLL for (int step = first; step < last; step += TURN) {
        UNROLL for (int t = 0; t < TURN; t++) {
            MULTIPLY_STEP(t, step)
        }
    }
#if REST > 0
    if (slice == SLICES - 1) {
        UNROLL for (int t = 0; t < REST; t++) {
            MULTIPLY_STEP(t, last)
        }
    }
#endif
#else
    for (int i = 0; i < FRAGMENTS_M; i++) {
        for (int j = 0; j < FRAGMENTS_N; j++) {
            for (int e = 0; e < 8; e++) {
                int row = SUM_ROW(lane, e), column = SUM_COLUMN(lane, e);
                sums[i][j][e] = 0.0;
                int end = slice == SLICES - 1 ? last + REST : last;
                for (int k = first * 16; k < end * 16; k++) {
                    int block = k / 16 * 32, term = k % 16;
                    sums[i][j][e] += element_of(WORDS_AT(buf_a, at_a[i] + block, row, term), k % 2) *
                                     element_of(WORDS_AT(buf_b, at_b[j] + block, column, term), k % 2);
                }
            }
        }
    }
#endif
#if SLICES > 1
    if (slice > 0) {
        EACH for (int i = 0; i < FRAGMENTS_M; i++) {
            EACH for (int j = 0; j < FRAGMENTS_N; j++) {
                EACH for (int h = 0; h < 2; h++) PART(slice - 1, i, j, h) = SUM4(i, j, h);
            }
        }
    }
    barrier();
    if (slice > 0) return;
#endif
    // What the epilogue reads for all results of an invocation is in flight together, if that takes few
    // registers; else what it reads for a column of fragments. Rows and columns behind the last ones
    // read what those do.
#if EXTRAS_AT_ONCE
    EXTRAS extras[COLUMNS][FRAGMENTS_M][2];
    EACH for (int j = 0; j < COLUMNS; j++) {
        EACH for (int i = 0; i < FRAGMENTS_M; i++) {
            EACH for (int h = 0; h < 2; h++) extras[j][i][h] = extras4(0, ROW_OF(i, h), COLUMN_OF(j));
        }
    }
#endif
    EACH for (int j = 0; j < COLUMNS; j++) {
        if (block_n + j > LAST_COLUMN) continue;
        int n = COLUMN_OF(j);
        int first_n = block_of(block_n, j) * 16 + lane % 4 * 4;
        vec4 bias = bias4(first_n, N);
#if PAIRED
        vec4 second_bias = bias4(block_of(block_n, j + COLUMNS) * 16 + lane % 4 * 4, N);
#endif
#if !EXTRAS_AT_ONCE
        EXTRAS extras[1][FRAGMENTS_M][2];
        EACH for (int i = 0; i < FRAGMENTS_M; i++) {
            EACH for (int h = 0; h < 2; h++) extras[0][i][h] = extras4(0, ROW_OF(i, h), n);
        }
#endif
        EACH for (int i = 0; i < FRAGMENTS_M; i++) {
            int m = (block_m + i) * 16 + lane / 4;
            vec4 values[2];
            EACH for (int h = 0; h < 2; h++) {
                vec4 sum = SUM4(i, j, h);
#if SLICES > 1
                EACH for (int s = 0; s < SLICES - 1; s++) sum += PART(s, i, j, h);
#endif
#if PAIRED
                pv_second = SUM4(i, j + COLUMNS, h) + second_bias;
#if SLICES > 1
                EACH for (int s = 0; s < SLICES - 1; s++) pv_second += PART(s, i, j + COLUMNS, h);
#endif
#endif
#ifdef STORE_PAIR
                if (m + 8 * h < M) STORE_PAIR(sum + bias, pv_second, m + 8 * h, first_n);
#else
                values[h] = value4(sum + bias, extras[EXTRAS_AT_ONCE * j][i][h], 0, ROW_OF(i, h), n);
#endif
            }
#ifdef STORE_PAIR
#elif BLOCKS_OUT
            if (m - lane / 4 < M) {
                int at = offset_o + BLOCK_ELEMENT(m, n, (N / (1 + PAIRED)));
                buf_out[at >> 2] = QUAD_FROM(T_OUT, values[0]);
                buf_out[(at >> 2) + 1] = QUAD_FROM(T_OUT, values[1]);
            }
#else
            if (m < M) buf_out[(offset_o + m * ldo + n) >> 2] = QUAD_FROM(T_OUT, values[0]);
            if (m + 8 < M) buf_out[(offset_o + (m + 8) * ldo + n) >> 2] = QUAD_FROM(T_OUT, values[1]);
#endif
        }
    }
}
