#version 450
#extension GL_GOOGLE_include_directive : enable
#extension GL_KHR_shader_subgroup_arithmetic : require
// out[b, m, n] = EPILOGUE(sum_k A[b, m, k] * B[b, n, k] + bias[n]) for few rows, as in decoding: B is
// read once, at copy bandwidth, 16 bytes at a time. The invocations of a workgroup share K, for 4
// columns.
//
// Buffers: as matmul.comp, A and B alike in the size of their elements. A row of A, and a column of B,
// is dense, and starts at a multiple of 16 bytes, of which K has a whole number: VEC8_A and VEC8_B
// are 1 for elements of 16 bits, VEC4_A and VEC4_B for floats.
// Parameters: as matmul.comp.
// Macros: those of matmul_io.glslh, and
//   ROWS  rows of A that a workgroup takes (1), up to 8
//   LANES  invocations that share K (128), a multiple of SG
//   STEPS  loads of each column that are in flight (2)
//   SG  the size of subgroups (32)
//   NORM, PAIRED, STORE_PAIR  as in matmul_fused.glslh: a workgroup computes 4 columns and those
//     `pair` behind
// Grid: (ceil(N / 4), ceil(M / ROWS), batches); with PAIRED N / 2 instead of N.
#include "core/common.glslh"
#ifndef VEC4_A
#define VEC4_A 1
#endif
#ifndef VEC4_B
#define VEC4_B 1
#endif
#ifndef ROWS
#define ROWS 1
#endif
#ifndef LANES
#define LANES 128
#endif
#ifndef STEPS
#define STEPS 2
#endif
#ifndef SG
#define SG 32
#endif
#include "attention/matmul_fused.glslh"

PARAM(0, M)
PARAM(1, N)
PARAM(2, K)
PARAM(3, lda)
PARAM(4, ldb)
PARAM(5, ldo)
PARAM(6, batch_a)
PARAM(7, batch_b)
PARAM(8, batch_o)
PARAM(9, inner_batches)
PARAM(10, outer_a)
PARAM(11, outer_b)
PARAM(12, outer_o)
#undef PARAM_DEFAULT
#define PARAM_DEFAULT 0
PARAM(13, offset_a)
PARAM(14, offset_b)
PARAM(15, offset_o)
PARAM(16, offset_bias)
#if NORM
PARAM(23, offset_norm)
PARAM(24, eps_bits)
#endif
#if PAIRED
#undef PARAM_DEFAULT
#define PARAM_DEFAULT 4
PARAM(25, pair)
#endif
#include "matmul/matmul_io.glslh"
layout(local_size_x = LANES, local_size_y = 1, local_size_z = 1) in;

#if VEC8_B
#define PER 8  // elements of a load
#define T_LOAD uvec4
#define QUAD(T, load, half) FLOATS_OF_WORDS(T, uvec2(load[2 * (half)], load[2 * (half) + 1]))
#else
#define PER 4
#define T_LOAD vec4
#define QUAD(T, load, half) load
#endif
#define COLS (4 + 4 * PAIRED)
#define SUBGROUPS (LANES / SG)

shared vec4 parts[ROWS * (1 + PAIRED) * SUBGROUPS];
vec4 sums[ROWS * (1 + PAIRED)];
T_LOAD columns[STEPS][COLS];
#if NORM
shared float all_squares[SUBGROUPS * ROWS];
float squares[ROWS];  // sums over what an invocation reads of a row
#endif

LOOPS(loop(ceil(ceil(K, 4), STEPS * LANES)))

void main() {
    int z = int(WORKGROUP_ID.z), outer = z / inner_batches, inner = z - outer * inner_batches;
    int lane = int(gl_LocalInvocationID.x), loads = K / PER, m0 = int(WORKGROUP_ID.y) * ROWS;
    int n = int(WORKGROUP_ID.x) * 4;
#if PAIRED
    int column = n;  // of the output
    n = PAIRED_COLUMN(column);
#endif
    int base_a = (offset_a + inner * batch_a + outer * outer_a) / PER;
    int starts[COLS];
    UNROLL for (int c = 0; c < COLS; c++) {
        int at = min(n + c % 4, N - 1);
#if PAIRED
        at += c / 4 * pair;
#endif
        starts[c] = (offset_b + inner * batch_b + outer * outer_b + at * ldb) / PER;
    }
    UNROLL for (int i = 0; i < ROWS * (1 + PAIRED); i++) sums[i] = vec4(0.0);
#if NORM
    UNROLL for (int r = 0; r < ROWS; r++) squares[r] = 0.0;
#endif
    for (int k0 = 0; k0 < loads; k0 += STEPS * LANES) {
        int k = k0 + lane;
        UNROLL for (int s = 0; s < STEPS; s++) {
            UNROLL for (int c = 0; c < COLS; c++) {
                columns[s][c] = k + s * LANES < loads ? buf_b[starts[c] + k + s * LANES] : T_LOAD(0);
            }
        }
        UNROLL for (int s = 0; s < STEPS; s++) {
            // Behind the end, both are 0: an infinite A must not meet a B of 0.
            bool beyond = k + s * LANES >= loads;
            int at = min(k + s * LANES, loads - 1);
#if NORM
            vec4 factors[PER / 4];
            UNROLL for (int h = 0; h < PER / 4; h++) factors[h] = FLOATS_OF(T_NORM, buf_norm[((offset_norm + at * PER) >> 2) + h]);
#endif
            UNROLL for (int r = 0; r < ROWS; r++) {
                T_LOAD row = beyond ? T_LOAD(0) : buf_a[base_a + min(m0 + r, M - 1) * (lda / PER) + at];
                UNROLL for (int h = 0; h < PER / 4; h++) {
                    vec4 a = vec4(QUAD(T_A, row, h));
#if NORM
                    squares[r] += dot(a, a);
                    a *= factors[h];
#endif
                    UNROLL for (int c = 0; c < COLS; c++) sums[c / 4 * ROWS + r][c % 4] += dot(a, vec4(QUAD(T_B, columns[s][c], h)));
                }
            }
        }
    }
    UNROLL for (int i = 0; i < ROWS * (1 + PAIRED); i++) {
        vec4 sum = subgroupAdd(sums[i]);
        if (subgroupElect()) parts[i * SUBGROUPS + int(gl_SubgroupID)] = sum;
    }
#if NORM
    UNROLL for (int r = 0; r < ROWS; r++) {
        float sum = subgroupAdd(squares[r]);
        if (subgroupElect()) all_squares[r * SUBGROUPS + int(gl_SubgroupID)] = sum;
    }
#endif
    barrier();
    int m = m0 + lane;
    if (lane < ROWS && m < M) {
        vec4 first = parts[lane * SUBGROUPS];
        UNROLL for (int p = 1; p < SUBGROUPS; p++) first += parts[lane * SUBGROUPS + p];
#if NORM
        float square = all_squares[lane * SUBGROUPS];
        UNROLL for (int p = 1; p < SUBGROUPS; p++) square += all_squares[lane * SUBGROUPS + p];
        float factor = NORM_FACTOR(square);
        first *= factor;
#endif
        first += bias4(n, N);
        int at = offset_o + inner * batch_o + outer * outer_o + m * ldo;
#if PAIRED
        vec4 second = parts[(ROWS + lane) * SUBGROUPS];
        UNROLL for (int p = 1; p < SUBGROUPS; p++) second += parts[(ROWS + lane) * SUBGROUPS + p];
#if NORM
        second *= factor;
#endif
        second += bias4(n + pair, N);
        store_pair4(first, second, at + column, z, m, n, column);
#else
        store4(first, at + n, z, m, n, N);
#endif
    }
}
