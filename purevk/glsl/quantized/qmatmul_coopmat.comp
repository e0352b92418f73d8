#version 450
#extension GL_GOOGLE_include_directive : enable
#ifndef COOPMAT
#define COOPMAT 0
#endif
#if COOPMAT
#extension GL_KHR_cooperative_matrix : require
#extension GL_KHR_memory_scope_semantics : require
#extension GL_KHR_shader_subgroup_arithmetic : require
#endif
// Matmul with a quantized weight on matrix cores. W, the left operand, goes from memory directly
// into fragments, and A through shared memory. A subgroup computes TILES * 16 columns of the
// result.
//
// The elements of fragments must be where fragments.glslh says, so the device has to be tested
// first. The order of K is free if both operands have the same one. An invocation reads whole words
// of W. The four invocations that share a row of a fragment read 16 consecutive words, a segment.
// If a segment has more than one scale, they exchange words, so that each multiplication is of one
// group.
//
// Buffers, macros: qmatmul_io.glslh. Parameters: qmatmul_params.glslh. Further macros:
//   ROWS      rows of A in a pass: at most 8, or a multiple of 8 (1)
//   SPLIT     1: an element of A becomes two halves with 22 bits, relative to the largest element
//             of the row so far. 0: one half.
//   SCALES    of a segment: 1, 2 or 4 (1). Groups are multiples of 4 words, and rows of W start at
//             multiples of 4 words.
//   SCALES4   1: there are 4 scales, and rows of scales have a multiple of 4
//   BLOCKS    of 32 words of a row that a subgroup multiplies between two barriers (1)
//   SEGMENTS  of a row that four invocations read at once: 2, or 1 for less code and fewer
//             registers (2)
//   TILES     of 16 columns that a subgroup computes (1)
//   SUBS_N    subgroups side by side along the columns (4)
//   SUBS_K    subgroups that share K (1)
//   AHEAD     1: the next operands are read before the current ones are multiplied (0)
//   COOPMAT  0: the same in scalar arithmetic, for tests on devices without matrix cores
// Shared memory, bytes: A_FRAGMENTS * SUBS_K * BLOCKS * (BITS 4: 4096, 8: 2048), 512 * SUBS_N *
// SUBS_K for the sums, 8 * SUBS_K * ROWS.
// Grid: (ceil(M / ROWS), ceil(N / (16 * TILES * SUBS_N)))
#include "core/common.glslh"
#ifndef ROWS
#define ROWS 1
#endif
#ifndef SPLIT
#define SPLIT 1
#endif
#ifndef SCALES
#define SCALES 1
#endif
#ifndef SCALES4
#define SCALES4 0
#endif
#ifndef BLOCKS
#define BLOCKS 1
#endif
#ifndef SEGMENTS
#define SEGMENTS 2
#endif
#ifndef TILES
#define TILES 1
#endif
#ifndef SUBS_N
#define SUBS_N 4
#endif
#ifndef SUBS_K
#define SUBS_K 1
#endif
#ifndef AHEAD
#define AHEAD 0
#endif
#define WORDS 4

#include "quantized/qmatmul_params.glslh"
#include "core/fragments.glslh"

#define SUBS (SUBS_N * SUBS_K)
layout(local_size_x = 32 * SUBS, local_size_y = 1, local_size_z = 1) in;

#if SCALES4
BUFFER_VIEW(2, scale, scales, VEC4_OF(T_SCALE))
#endif

#include "quantized/qfragments.glslh"
#define SEGMENT (16 * PER_WORD)
#define BLOCK (2 * SEGMENT)
#define RUNS (2 * BLOCKS / SEGMENTS)
#define QUADS (PER_WORD / 4)
// Fragments of A have 8 columns: ROWS columns, then their second halves. RESULTS of the fragments
// are results. (No ?: here, because the optimizer does not unroll loops up to it.)
#if ROWS * (1 + SPLIT) <= 8
#define A_FRAGMENTS 1
#define RESULTS 1
#else
#define RESULTS ((ROWS + 7) / 8)
#define A_FRAGMENTS (RESULTS * (1 + SPLIT))
#endif
#define SECOND (4 * A_FRAGMENTS)
// Rows of blocks of A that a subgroup reads and stores. Several subgroups may store the last ones.
#define ITEMS ((ROWS * SUBS_K * BLOCKS + SUBS - 1) / SUBS)
#define ITEM(i) min(SUB + (i) * SUBS, ROWS * SUBS_K * BLOCKS - 1)
#define ITEM_ROW(item) ((item) / (ROWS * BLOCKS) * ROWS + (item) % ROWS)

// The elements of A for a word of W: for each step, pairs for the first and for the last 8 columns
// of its fragment.
#if BITS == 8
#define T_PAIRS uvec2
#else
#define T_PAIRS uvec4
#endif
#if ACT && !GROUPED
#define T_TOTAL int
#define T_TOTAL4 ivec4
#else
#define T_TOTAL float
#define T_TOTAL4 vec4
#endif
#define BLOCK_PAIRS (8 * A_FRAGMENTS * 32)
shared T_PAIRS fragments[SUBS_K * BLOCKS * BLOCK_PAIRS];
#if SPLIT
// The largest exponent of a row of A so far, as in the bits of a float. Iterations alternate
// between the two. Elements are relative to an exponent that is 14 less.
shared uint row_top[2][SUBS_K * ROWS];
uint top[RESULTS][2];
#endif
shared T_TOTAL results[SUBS * 128];

uvec4 w_next[TILES][2][SEGMENTS], w[TILES][2][SEGMENTS];
float scale_next[TILES][SCALES], scale[TILES][SCALES];
T_TOTAL total[TILES][A_FRAGMENTS][4];
#if ACT
uint a_next[ITEMS][QUADS];
#else
vec4 a_next[ITEMS][QUADS];
#endif

#if COOPMAT == 0
shared uvec4 exchange[SUBS * 32];
#endif

// Transposes the words of four invocations: word v of invocation q becomes word q of invocation v.
uvec4 transposed4(uvec4 w) {
#if COOPMAT
    bool odd = (gl_SubgroupInvocationID & 1u) != 0u, last = (gl_SubgroupInvocationID & 2u) != 0u;
    uint a = subgroupShuffleXor(odd ? w.x : w.y, 1u), b = subgroupShuffleXor(odd ? w.z : w.w, 1u);
    w = odd ? uvec4(a, w.y, b, w.w) : uvec4(w.x, a, w.z, b);
    a = subgroupShuffleXor(last ? w.x : w.z, 2u);
    b = subgroupShuffleXor(last ? w.y : w.w, 2u);
    return last ? uvec4(a, b, w.z, w.w) : uvec4(w.x, w.y, a, b);
#else
    uint id = gl_LocalInvocationIndex, first = id & ~3u;
    barrier();
    exchange[id] = w;
    barrier();
    return uvec4(exchange[first][id & 3u], exchange[first + 1u][id & 3u], exchange[first + 2u][id & 3u], exchange[first + 3u][id & 3u]);
#endif
}

// The number of invocation q of each four.
float quad_broadcast(float v, int q) {
#if COOPMAT
    return subgroupShuffle(v, (gl_SubgroupInvocationID & ~3u) | uint(q));
#else
    barrier();
    exchange[gl_LocalInvocationIndex].x = floatBitsToUint(v);
    barrier();
    return uintBitsToFloat(exchange[(gl_LocalInvocationIndex & ~3u) | uint(q)].x);
#endif
}

// Reads W from k0 on: segment s of two rows, [h][s]. Invocation q of four reads the scales of row
// q / 2, segment q % SEGMENTS.
void fetch(int k0, int n0) {
    int sub = SUB, lane = LANE, last = ldw / 4 - 1;
    EACH for (int t = 0; t < TILES; t++) {
        int first = n0 + ((sub % SUBS_N) * TILES + t) * 16;
        EACH for (int h = 0; h < 2; h++) {
            int row = (offset_w + min(first + A_ROW(lane, 2 * h), N - 1) * ldw) / 4;
            EACH for (int s = 0; s < 2; s++) w_next[t][h][s] = buf_w[row + min(k0 / (PER_WORD * 4) + s * 4 + lane % 4, last)];
        }
#if GROUPED
        int n = min(first + lane / 4 + lane % 4 / 2 * 8, N - 1), k = k0 + lane % SEGMENTS * SEGMENT;
#if SCALES4
        vec4 scales = vec4(buf_scales[(n * groups + min(k / group, groups - 4)) / 4]);
        UNROLL for (int g = 0; g < SCALES; g++) scale_next[t][g] = scales[g];
#else
        UNROLL for (int g = 0; g < SCALES; g++) {
            scale_next[t][g] = float(buf_scale[n * groups + min((k + g * (SEGMENT / SCALES)) / group, groups - 1)]);
        }
#endif
#endif
    }
}

#include "quantized/qmatmul_coopmat_a.glslh"

#if COOPMAT
#define ACCUMULATOR coopmat<float, gl_ScopeSubgroup, 16, 8, gl_MatrixUseAccumulator>
ACCUMULATOR acc[TILES][A_FRAGMENTS];
#define CLEAR(v) v = ACCUMULATOR(0.0)
#else
float acc[TILES][A_FRAGMENTS][4];
shared vec2 pairs[SUBS * 32 * 4 * STEPS * TILES];
#define CLEAR(v) v = float[4](0.0, 0.0, 0.0, 0.0)
#endif

// Adds the sums of a group, scaled, to the total.
#define END_GROUP(u, scales) \
    EACH for (int t = 0; t < TILES; t++) { \
        EACH for (int i = 0; i < 4; i++) total[t][u][i] += acc[t][u][i] * scales[t][i / 2]; \
        CLEAR(acc[t][u]); \
    }

// Multiplies the fragments of one word of each row.
void multiply_word(uint words[TILES][2], int at, float scales[TILES][2]) {
#if COOPMAT
    coopmat<float16_t, gl_ScopeSubgroup, 16, 16, gl_MatrixUseA> a[STEPS][TILES];
    EACH for (int step = 0; step < STEPS; step++) {
        EACH for (int t = 0; t < TILES; t++) {
            EACH for (int i = 0; i < 4; i++) {
                f16vec2 p = qvalues_of(words[t][i / 2], step, i % 2);
                a[step][t][2 * i] = p.x;
                a[step][t][2 * i + 1] = p.y;
            }
        }
    }
#else
    barrier();
    for (int j = 0; j < 4 * STEPS * TILES; j++) {
        pairs[(SUB * 32 + LANE) * (4 * STEPS * TILES) + j] = qvalues_of(words[j / (4 * STEPS)][j % 4 / 2], j / 4 % STEPS, j % 2);
    }
    barrier();
#endif
    EACH for (int u = 0; u < A_FRAGMENTS; u++) {
#if COOPMAT
        T_PAIRS pairs_of_a = fragments[at + u * 32 + LANE];
        EACH for (int step = 0; step < STEPS; step++) {
            coopmat<float16_t, gl_ScopeSubgroup, 16, 8, gl_MatrixUseB> b;
            EACH for (int i = 0; i < 2; i++) {
                f16vec2 p = unpackFloat2x16(pairs_of_a[2 * step + i]);
                b[2 * i] = p.x;
                b[2 * i + 1] = p.y;
            }
            EACH for (int t = 0; t < TILES; t++) acc[t][u] = coopMatMulAdd(a[step][t], b, acc[t][u]);
        }
#else
        for (int j = 0; j < 4 * STEPS * TILES * 16; j++) {
            int k = j % 16, i = j / 16 % 4, step = j / 64 % STEPS, t = j / (64 * STEPS);
            int row = SUM_ROW(LANE, i), column = SUM_COLUMN(LANE, i);
            int from = ((SUB * 32 + row % 8 * 4 + k % 8 / 2) * TILES + t) * STEPS + step;
            uint pair = fragments[at + u * 32 + column * 4 + k % 8 / 2][2 * step + k / 8];
            acc[t][u][i] += pairs[from * 4 + row / 8 * 2 + k / 8][k % 2] * unpackHalf2x16(pair)[k % 2];
        }
#endif
#if GROUPED && SCALES == 4
        END_GROUP(u, scales)
#endif
    }
}

// Multiplies w by A, from fragments `at` on.
void multiply(int at) {
    EACH for (int t = 0; t < TILES; t++) {
        EACH for (int u = 0; u < A_FRAGMENTS; u++) CLEAR(acc[t][u]);
    }
    EACH for (int s = 0; s < SEGMENTS; s++) {
#if SCALES > 1
        EACH for (int t = 0; t < TILES; t++) {
            EACH for (int h = 0; h < 2; h++) w[t][h][s] = transposed4(w[t][h][s]);
        }
#endif
        EACH for (int g = 0; g < SCALES; g++) {
            float scales[TILES][2];
#if GROUPED
            EACH for (int t = 0; t < TILES; t++) {
                EACH for (int h = 0; h < 2; h++) scales[t][h] = quad_broadcast(scale[t][g], 2 * h + s);
            }
#endif
            EACH for (int j = 0; j < 4 / SCALES; j++) {
                int v = g * (4 / SCALES) + j;
                uint words[TILES][2];
                EACH for (int t = 0; t < TILES; t++) {
                    EACH for (int h = 0; h < 2; h++) words[t][h] = w[t][h][s][v];
                }
                multiply_word(words, at + (s * 4 + v) * (A_FRAGMENTS * 32), scales);
            }
#if GROUPED && SCALES < 4
            EACH for (int u = 0; u < A_FRAGMENTS; u++) {
                END_GROUP(u, scales)
            }
#endif
        }
    }
#if !GROUPED
    EACH for (int t = 0; t < TILES; t++) {
        EACH for (int u = 0; u < A_FRAGMENTS; u++) {
            EACH for (int i = 0; i < 4; i++) total[t][u][i] += T_TOTAL(acc[t][u][i]);
        }
    }
#endif
}

#if SPLIT
// Makes the sums relative to the exponents of the next elements.
void rescale(int part, int side) {
    EACH for (int u = 0; u < RESULTS; u++) {
        EACH for (int c = 0; c < 2; c++) {
            uint now = row_top[side][part * ROWS + min((SUM_COLUMN(LANE, c) + 8 * u) % SECOND, ROWS - 1)];
            float ratio = uintBitsToFloat(uint(max(127 + int(top[u][c]) - int(now), 0)) << 23);
            top[u][c] = now;
            EACH for (int t = 0; t < TILES; t++) {
                EACH for (int h = 0; h < 2; h++) {
                    total[t][u][2 * h + c] *= ratio;
#if A_FRAGMENTS > 1
                    total[t][u + RESULTS][2 * h + c] *= ratio;
#endif
                }
            }
        }
    }
}
#endif

#if COOPMAT
LOOPS(2 * loop(ceil(K, 16)))
#else
LOOPS(2 * loop(ceil(K, 16), loop(4 * STEPS * TILES) + loop(A_FRAGMENTS, loop(4 * STEPS * TILES * 16))))
#endif

void main() {
    int m0 = int(WORKGROUP_ID.x) * ROWS, n0 = int(WORKGROUP_ID.y) * (16 * TILES * SUBS_N), sub = SUB, lane = LANE;
    EACH for (int t = 0; t < TILES; t++) {
        EACH for (int u = 0; u < A_FRAGMENTS; u++) {
            EACH for (int i = 0; i < 4; i++) total[t][u][i] = T_TOTAL(0);
        }
    }
#if SPLIT
    for (int i = int(gl_LocalInvocationIndex); i < SUBS_K * ROWS; i += 32 * SUBS) row_top[0][i] = row_top[1][i] = 15u;
    EACH for (int u = 0; u < RESULTS; u++) top[u][0] = top[u][1] = 0u;
    barrier();
#endif
    int first = sub / SUBS_N * BLOCKS, side = 0;
    fetch(first * BLOCK, n0);
    fetch_a(0, m0, 0);
    for (int k0 = 0; k0 < K; k0 += BLOCKS * SUBS_K * BLOCK) {
        barrier();
        put(m0, side);
        barrier();
#if SPLIT
        rescale(sub / SUBS_N, side);
#endif
        side ^= 1;
#if AHEAD
        fetch_a(k0 + BLOCKS * SUBS_K * BLOCK, m0, side);
#endif
        [[dont_unroll]] for (int run = 0; run < RUNS; run++) {
            int next = k0 + (run + 1 < RUNS ? first * BLOCK + (run + 1) * (SEGMENTS * SEGMENT) : (BLOCKS * SUBS_K + first) * BLOCK);
            w = w_next;
            scale = scale_next;
#if AHEAD
            fetch(next, n0);
#endif
            multiply((first * 8 + run * 4 * SEGMENTS) * (A_FRAGMENTS * 32));
#if !AHEAD
            fetch(next, n0);
#endif
        }
#if !AHEAD
        fetch_a(k0 + BLOCKS * SUBS_K * BLOCK, m0, side);
#endif
    }
    // Each pass stores 8 rows of a tile. An invocation stores at most 4 columns of one row.
    // Registers cannot be indexed, so the loops visit all of them.
    int item = int(gl_LocalInvocationIndex), row = item / (4 * SUBS_N), column = item % (4 * SUBS_N) * 4;
    for (int pass = 0; pass < TILES * RESULTS; pass++) {
        T_TOTAL own[4];
        EACH for (int t = 0; t < TILES; t++) {
            EACH for (int u = 0; u < RESULTS; u++) {
                EACH for (int i = 0; i < 4; i++) {
                    T_TOTAL sum = total[t][u][i];
#if SPLIT
#if A_FRAGMENTS > 1
                    sum += total[t][u + RESULTS][i] / 2048.0;
#endif
                    sum *= uintBitsToFloat((top[u][i % 2] - 14u) << 23);
#endif
                    own[i] = pass == t * RESULTS + u ? sum : own[i];
                }
            }
        }
        EACH for (int i = 0; i < 4; i++) {
            results[((sub / SUBS_N) * 8 + SUM_COLUMN(lane, i)) * (16 * SUBS_N) + (sub % SUBS_N) * 16 + SUM_ROW(lane, i)] = own[i];
        }
        barrier();
        int m = m0 + pass % RESULTS * 8 + row, n = n0 + (column / 16 * TILES + pass / RESULTS) * 16 + column % 16;
        if (all(lessThan(ivec3(row, m, n), ivec3(min(ROWS, 8), M, N)))) {
            T_TOTAL4 sum = T_TOTAL4(0);
            UNROLL for (int part = 0; part < SUBS_K; part++) {
                UNROLL for (int e = 0; e < 4; e++) {
                    sum[e] += results[(part * 8 + row) * (16 * SUBS_N) + column + e];
#if SPLIT && A_FRAGMENTS == 1
                    sum[e] += results[(part * 8 + SECOND + row) * (16 * SUBS_N) + column + e] / 2048.0;
#endif
                }
            }
#if GROUPED
            vec4 v = finish(sum, m, n);
#elif ACT
            vec4 v = finish_sums(sum, m, n);
#else
            vec4 v = finish(sum * scale4(n, 0), m, n);
#endif
            store4(v, offset_o + m * ldo + n, m, n);
        }
        barrier();
    }
}
