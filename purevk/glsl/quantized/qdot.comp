#version 450
#extension GL_GOOGLE_include_directive : enable
#extension GL_KHR_shader_subgroup_arithmetic : require
// Matmul with a quantized weight for few rows, as in decoding. The invocations of a workgroup share
// K, for 4 columns. Neighbours read neighbouring words of W and elements of A, which nothing stages:
// there is no barrier before the sums are added up. qmatvec.comp reads longer pieces of W.
//
// Buffers, macros: qmatmul_io.glslh; ACT is 0. Parameters: qmatmul_params.glslh. Further macros:
//   ROWS    rows of A in a pass (1)
//   WORDS   words of W that an invocation reads at once: 4, 2 or 1. The words of a row of W, and of a
//           group, are multiples of it.
//   STEPS   reads of each column that are in flight (1)
//   LX      invocations of a workgroup (128), a multiple of SG
//   SG      the size of subgroups (32)
//   NORM, PAIRED, STORE_PAIR  as in qmatmul_few_rows.glslh: a workgroup computes 4 columns and those
//           `pair` behind
// Grid: (ceil(N / 4), ceil(M / ROWS)); with PAIRED N / 2 instead of N.
#include "core/common.glslh"
#ifndef ROWS
#define ROWS 1
#endif
#ifndef STEPS
#define STEPS 1
#endif
#ifndef LX
#define LX 128
#endif
#ifndef SG
#define SG 32
#endif

#include "quantized/qmatmul_few_rows.glslh"

layout(local_size_x = LX, local_size_y = 1, local_size_z = 1) in;

#if WORDS == 4
#define T_WORDS uvec4
#define WORD(v, i) v[i]
#elif WORDS == 2
#define T_WORDS uvec2
#define WORD(v, i) v[i]
#else
#define T_WORDS uint
#define WORD(v, i) v
#endif
#define PER_WORD (32 / BITS)
#define CHUNK (WORDS * PER_WORD)  // elements of K that an invocation takes at once
#define QUADS (CHUNK / 4)
#define HALVES (1 + PAIRED)  // vectors of 4 columns
#define SUBGROUPS (LX / SG)

shared vec4 parts[ROWS * HALVES * SUBGROUPS];
#if NORM
shared float all_squares[ROWS * SUBGROUPS];
#endif
T_WORDS words[STEPS][4 * HALVES];
vec4 scales[STEPS][HALVES], minimums[STEPS][HALVES];
vec4 total[ROWS * HALVES];
float squares[ROWS];

LOOPS(loop(ceil(ceil(K, CHUNK), STEPS * LX)))

void main() {
    int lane = int(gl_LocalInvocationID.x), m0 = int(WORKGROUP_ID.y) * ROWS, chunks = (K + CHUNK - 1) / CHUNK;
    int n0 = int(WORKGROUP_ID.x) * 4, distance = 0;
#if PAIRED
    int column = n0;  // of the output
    n0 = PAIRED_COLUMN(column);
    distance = pair;
#endif
    int starts[4 * HALVES];
    UNROLL for (int c = 0; c < 4 * HALVES; c++) {
        starts[c] = (offset_w + min(n0 + c % 4 + c / 4 * distance, N - 1) * ldw) / WORDS;
    }
    UNROLL for (int i = 0; i < ROWS * HALVES; i++) total[i] = vec4(0.0);
    UNROLL for (int r = 0; r < ROWS; r++) squares[r] = 0.0;
    for (int first = 0; first < chunks; first += STEPS * LX) {
        UNROLL for (int s = 0; s < STEPS; s++) {
            int chunk = min(first + s * LX + lane, chunks - 1);
            UNROLL for (int c = 0; c < 4 * HALVES; c++) words[s][c] = buf_w[starts[c] + chunk];
#if GROUPED
            UNROLL for (int h = 0; h < HALVES; h++) {
                scales[s][h] = scale4(min(n0 + h * distance, N - 1), chunk * CHUNK / group);
#if MINIMUM
                minimums[s][h] = minimum4(min(n0 + h * distance, N - 1), chunk * CHUNK / group) / OFFSET;
#endif
            }
#endif
        }
        UNROLL for (int s = 0; s < STEPS; s++) {
            int k = (first + s * LX + lane) * CHUNK;
            UNROLL for (int r = 0; r < ROWS; r++) {
                int row = offset_a + min(m0 + r, M - 1) * lda;
                vec4 part[HALVES];
                UNROLL for (int h = 0; h < HALVES; h++) part[h] = vec4(0.0);
                float excess = 0.0;
                UNROLL for (int q = 0; q < QUADS; q++) {
                    // Beyond K, A is 0.
#if VEC8_A
                    uvec4 pieces = k + q / 2 * 8 < K ? buf_a[(row + k) / 8 + q / 2] : uvec4(0);
                    vec4 a = vec4(unpackHalf2x16(pieces[q % 2 * 2]), unpackHalf2x16(pieces[q % 2 * 2 + 1]));
#else
                    vec4 a = a_values(min(m0 + r, M - 1), k + 4 * q);
#endif
#if NORM
                    squares[r] += dot(a, a);
                    if (k + 4 * q < K) a *= vec4(buf_norm[((offset_norm + k) >> 2) + q]);
#endif
                    a *= UNSPREAD;
                    excess += dot(a, OFFSET * SPREAD);
                    UNROLL for (int c = 0; c < 4 * HALVES; c++) {
                        uint word = WORD(words[s][c], q * 4 / PER_WORD) >> (q * 4 % PER_WORD * BITS);
                        part[c / 4][c % 4] += dot(a, spread_qvalues(word));
                    }
                }
                UNROLL for (int h = 0; h < HALVES; h++) {
#if MINIMUM
                    total[h * ROWS + r] += scales[s][h] * part[h] + minimums[s][h] * excess;
#elif GROUPED
                    total[h * ROWS + r] += scales[s][h] * (part[h] - excess);
#else
                    total[h * ROWS + r] += part[h] - excess;
#endif
                }
            }
        }
    }
    UNROLL for (int i = 0; i < ROWS * HALVES; i++) {
        vec4 sum = subgroupAdd(total[i]);
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
    if (lane >= ROWS || m >= M) return;
    vec4 sums[HALVES];
    UNROLL for (int h = 0; h < HALVES; h++) {
        sums[h] = vec4(0.0);
        UNROLL for (int p = 0; p < SUBGROUPS; p++) sums[h] += parts[(h * ROWS + lane) * SUBGROUPS + p];
#if NORM
        float square = 0.0;
        UNROLL for (int p = 0; p < SUBGROUPS; p++) square += all_squares[lane * SUBGROUPS + p];
        sums[h] *= NORM_FACTOR(square);
#endif
#if !GROUPED
        sums[h] *= scale4(min(n0 + h * distance, N - 1), 0);
#endif
        sums[h] = finish(sums[h], m, n0 + h * distance);
    }
#if PAIRED
    store_pair4(sums[0], sums[1], m, n0, column);
#else
    store4(sums[0], offset_o + m * ldo + n0, m, n0);
#endif
}
