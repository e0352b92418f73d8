#version 450
#extension GL_GOOGLE_include_directive : enable
#extension GL_KHR_shader_subgroup_shuffle : require
// out[m, n] = EPILOGUE(sum_k A[m, k] * B[k, n] + bias[n]) for few rows, as in decoding, with B in the
// order of fragments (fragment_blocks.glslh), so that a prompt on matrix cores reads the same weight.
// B is read once, at copy bandwidth. Neighbouring invocations read neighbouring 16 bytes.
//
// Buffers: as matmul.comp, of elements of 16 bits. Rows of A start at a multiple of 4 elements. The
// result is stored as vectors of 4.
// Parameters: those of matmul_dot.comp with the same names.
// Macros: those of matmul_io.glslh, VEC4_A, VEC8_B and VEC4_OUT 1, and
//   ROWS    rows of A that a workgroup takes (1), up to 8
//   COLUMNS  columns of a workgroup: 4, 8 or 16 (16)
//   SLICES  groups of 2 * COLUMNS invocations that share K (8)
//   STEPS   blocks of 16 terms that such a group reads at once (4)
//   NORM, PAIRED, STORE_PAIR  as in matmul_fused.glslh; `pair` is a multiple of COLUMNS
// K and N are multiples of 16; with PAIRED half of N is one of COLUMNS. 4 neighbouring invocations are
// in one subgroup.
// Grid: (N / COLUMNS, ceil(M / ROWS)); with PAIRED N / 2 instead of N.
#include "core/common.glslh"
#ifndef VEC4_A
#define VEC4_A 1
#endif
#ifndef VEC8_B
#define VEC8_B 1
#endif
#ifndef VEC4_OUT
#define VEC4_OUT 1
#endif
#ifndef T_A
#define T_A float16_t
#endif
#ifndef T_B
#define T_B float16_t
#endif
#ifndef ROWS
#define ROWS 1
#endif
#ifndef COLUMNS
#define COLUMNS 16
#endif
#ifndef SLICES
#define SLICES 8
#endif
#ifndef STEPS
#define STEPS 4
#endif
#include "attention/matmul_fused.glslh"

PARAM(0, M)
PARAM(1, N)
PARAM(2, K)
PARAM(3, lda)
PARAM(4, ldo)
#undef PARAM_DEFAULT
#define PARAM_DEFAULT 0
PARAM(5, offset_a)
PARAM(6, offset_b)
PARAM(7, offset_o)
PARAM(8, offset_bias)
#if NORM
PARAM(9, offset_norm)
PARAM(10, eps_bits)
#endif
#if PAIRED
#undef PARAM_DEFAULT
#define PARAM_DEFAULT 16
PARAM(11, pair)
#endif
#include "matmul/matmul_io.glslh"
#include "matmul/fragment_blocks.glslh"
#define GROUP (2 * COLUMNS)  // invocations with the same terms, or others of the same 16
layout(local_size_x = GROUP * SLICES, local_size_y = 1, local_size_z = 1) in;

#define BLOCKS (1 + PAIRED)

// The sums of each group: those of every fourth invocation, for the columns of the two halves of a
// word.
shared vec2 parts[ROWS * BLOCKS][SLICES][GROUP / 4];
#if NORM
shared float all_squares[ROWS][SLICES];
#endif

float sum_of_4(float v) {
    v += subgroupShuffleXor(v, 1u);
    return v + subgroupShuffleXor(v, 2u);
}

// Columns 4 * quad .. + 3 of a workgroup.
vec4 sum_of_slices(int part, int quad) {
    vec4 sum = vec4(0.0);
    for (int s = 0; s < SLICES; s++) sum += vec4(parts[part][s][2 * quad].x, parts[part][s][2 * quad + 1].x, parts[part][s][2 * quad].y, parts[part][s][2 * quad + 1].y);
    return sum;
}

LOOPS(loop(ceil(ceil(K, 16), SLICES * STEPS)) + 2 * ROWS * loop(SLICES))

void main() {
    int index = int(gl_LocalInvocationIndex), lane = index % GROUP, slice = index / GROUP;
    int m0 = int(WORKGROUP_ID.y) * ROWS, steps = K / 16;
    int n = int(WORKGROUP_ID.x) * COLUMNS;
#if PAIRED
    int column = n;  // of the output
    n = PAIRED_COLUMN(column);
#endif
    int starts[BLOCKS];
    UNROLL for (int c = 0; c < BLOCKS; c++) {
        int at = n;
#if PAIRED
        at += c * pair;
#endif
        starts[c] = offset_b / 8 + at / 16 * steps * 32 + at % 16 * 2 + lane;
    }
    vec2 sums[ROWS][BLOCKS];
    UNROLL for (int r = 0; r < ROWS; r++) {
        UNROLL for (int c = 0; c < BLOCKS; c++) sums[r][c] = vec2(0.0);
    }
#if NORM
    float squares[ROWS];
    UNROLL for (int r = 0; r < ROWS; r++) squares[r] = 0.0;
#endif
    for (int first = slice * STEPS; first < steps; first += SLICES * STEPS) {
        uvec4 words[STEPS][BLOCKS];
        UNROLL for (int s = 0; s < STEPS; s++) {
            UNROLL for (int c = 0; c < BLOCKS; c++) {
                words[s][c] = first + s < steps ? buf_b[starts[c] + (first + s) * 32] : uvec4(0);
            }
        }
        UNROLL for (int s = 0; s < STEPS; s++) {
            // Behind the end, both are 0: an infinite A must not meet a B of 0.
            bool beyond = first + s >= steps;
            int at = min(first + s, steps - 1) * 4 + lane % 4;
#if NORM
            vec4 factors = FLOATS_OF(T_NORM, buf_norm[(offset_norm >> 2) + at]);
#endif
            UNROLL for (int r = 0; r < ROWS; r++) {
                vec4 a = beyond ? vec4(0.0) : FLOATS_OF(T_A, buf_a[(offset_a + min(m0 + r, M - 1) * lda >> 2) + at]);
#if NORM
                squares[r] += dot(a, a);
                a *= factors;
#endif
                UNROLL for (int c = 0; c < BLOCKS; c++) {
                    sums[r][c].x += dot(a, FLOATS_OF_WORDS(T_B, words[s][c].xy));
                    sums[r][c].y += dot(a, FLOATS_OF_WORDS(T_B, words[s][c].zw));
                }
            }
        }
    }
    UNROLL for (int r = 0; r < ROWS; r++) {
        UNROLL for (int c = 0; c < BLOCKS; c++) {
            vec2 sum = vec2(sum_of_4(sums[r][c].x), sum_of_4(sums[r][c].y));
            if (lane % 4 == 0) parts[r * BLOCKS + c][slice][lane / 4] = sum;
        }
#if NORM
        float square = sum_of_4(squares[r]);
        if (lane == 0) all_squares[r][slice] = square;
#endif
    }
    barrier();
    int row = index / (COLUMNS / 4), quad = index % (COLUMNS / 4), m = m0 + row;
    if (row < ROWS && m < M) {
        vec4 sum = sum_of_slices(row * BLOCKS, quad);
#if PAIRED
        vec4 second = sum_of_slices(row * BLOCKS + 1, quad);
#endif
#if NORM
        float square = 0.0;
        for (int s = 0; s < SLICES; s++) square += all_squares[row][s];
        float factor = NORM_FACTOR(square);
        sum *= factor;
#endif
        n += 4 * quad;
        sum += bias4(n, N);
        int at = offset_o + m * ldo;
#if PAIRED
#if NORM
        second *= factor;
#endif
        second += bias4(n + pair, N);
        column += 4 * quad;
        store_pair4(sum, second, at + column, 0, m, n, column);
#else
        store4(sum, at + n, 0, m, n, N);
#endif
    }
}
