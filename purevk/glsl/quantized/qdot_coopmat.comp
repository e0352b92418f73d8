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
// Matmul with a quantized weight of 4 bits for few rows of halves, as in decoding, on matrix cores. W,
// the left operand, goes from memory directly into fragments, and nothing but A and the sums of
// subgroups passes through shared memory.
//
// The elements of fragments must be where fragments.glslh says, so the device has to be tested
// first. The order of K is free if both operands have the same one. The four invocations that share a
// row of a fragment read 4 consecutive words each, 32 quantized values of one group: a segment of 128
// in all. Each of the four has a column of the right operand for itself, with the elements of A that
// belong to its words; the other columns have zeros there. So groups have sums of their own, and no
// scale is applied before these are complete.
//
// Buffers, macros: qmatmul_io.glslh; ACT is 0, BITS 4. Parameters: qmatmul_params.glslh. Groups have
// a multiple of 32 elements, and rows of W a multiple of 4 words, from a multiple of 4 on. Further
// macros:
//   ROWS      rows of A in a pass (1)
//   SCALES4   1: groups have 32 elements, and rows of scales a multiple of 4
//   SEGMENTS  that a subgroup reads at once (1)
//   SUBS      subgroups, which share K (4)
//   NORM, PAIRED, STORE_PAIR  as in qmatmul_few_rows.glslh: a workgroup computes 16 columns and those
//             `pair` behind
//   COOPMAT   0: the same in scalar arithmetic, for tests on devices without matrix cores
// Shared memory, bytes: 256 * SUBS * SEGMENTS * ROWS, 64 * SUBS * ROWS * (1 + PAIRED) for the sums,
// and with NORM 4 * SUBS * ROWS.
// Grid: (ceil(N / 16), ceil(M / ROWS)); with PAIRED N / 2 instead of N.
#include "core/common.glslh"
#ifndef ROWS
#define ROWS 1
#endif
#ifndef SCALES4
#define SCALES4 0
#endif
#ifndef SEGMENTS
#define SEGMENTS 1
#endif
#ifndef SUBS
#define SUBS 4
#endif
#define WORDS 4

#include "quantized/qmatmul_few_rows.glslh"
#include "quantized/qfragments.glslh"
#include "core/fragments.glslh"

layout(local_size_x = 32 * SUBS, local_size_y = 1, local_size_z = 1) in;

#if SCALES4
BUFFER_VIEW(2, scale, scales, VEC4_OF(T_SCALE))
#endif

#define SEGMENT 128
#define TILES (1 + PAIRED)
#define PASSES ((ROWS + 1) / 2)  // over 2 rows of A each

// A in the order of the quantized values in words of W: for each word, the pairs of qvalues_of.
shared uvec2 pairs_of_a[SUBS * SEGMENTS * ROWS * 32];
shared vec4 sums[SUBS * ROWS * TILES * 4];
uvec4 w[SEGMENTS][TILES][2];
vec2 scale[SEGMENTS][TILES][2];
float total[PASSES][TILES][4];

#if COOPMAT
#define ACCUMULATOR coopmat<float, gl_ScopeSubgroup, 16, 8, gl_MatrixUseAccumulator>
ACCUMULATOR acc[PASSES][TILES];
#define CLEAR(v) v = ACCUMULATOR(0.0)
#define SUBGROUP_BARRIER subgroupBarrier()
#else
float acc[PASSES][TILES][4];
shared vec2 pairs_of_w[SUBS * 32][STEPS * 4];
shared uvec2 pairs_of_b[SUBS * 32][2];
#define CLEAR(v) v = float[4](0.0, 0.0, 0.0, 0.0)
#define SUBGROUP_BARRIER barrier()
#endif

#if NORM
#if COOPMAT
#define NORM_PARTS SUBS
#else
#define NORM_PARTS (SUBS * 32)
#endif
shared float squares[ROWS * NORM_PARTS];
float row_factor[ROWS];

// What each row is divided by, as a factor.
void find_factors(int m0) {
    int id = int(gl_LocalInvocationIndex);
    UNROLL for (int r = 0; r < ROWS; r++) {
        float sum = 0.0;
        for (int k = 4 * id; k < K; k += 128 * SUBS) {
            vec4 a = a_values(min(m0 + r, M - 1), k);
            sum += dot(a, a);
        }
#if COOPMAT
        sum = subgroupAdd(sum);
        if (subgroupElect()) squares[r * NORM_PARTS + SUB] = sum;
#else
        squares[r * NORM_PARTS + id] = sum;
#endif
    }
    barrier();
    UNROLL for (int r = 0; r < ROWS; r++) {
        float sum = 0.0;
        for (int p = 0; p < NORM_PARTS; p++) sum += squares[r * NORM_PARTS + p];
        row_factor[r] = NORM_FACTOR(sum);
    }
}
#endif

// The column of W that is column c of the tile t of a workgroup.
int column_of(int c, int t) {
    int column = int(WORKGROUP_ID.x) * 16 + c;
#if PAIRED
    column = min(column, N / 2 - 1);
    return PAIRED_COLUMN(column) + t * pair;
#else
    return min(column, N - 1);
#endif
}

// Reads words and scales of W, from segment `first` on.
void fetch(int first, int lane) {
    EACH for (int s = 0; s < SEGMENTS; s++) {
        EACH for (int t = 0; t < TILES; t++) {
            EACH for (int h = 0; h < 2; h++) {
                int n = column_of(A_ROW(lane, 2 * h), t);
                w[s][t][h] = buf_w[(offset_w + n * ldw) / 4 + min((first + s) * 4 + lane % 4, ldw / 4 - 1)];
                // An invocation has the sums of 2 of the 4 columns.
#if SCALES4
                vec4 four = vec4(buf_scales[n * (groups / 4) + min(first + s, groups / 4 - 1)]);
                scale[s][t][h] = lane % 2 == 0 ? four.xy : four.zw;
#elif GROUPED
                EACH for (int c = 0; c < 2; c++) {
                    int k = ((first + s) * 4 + SUM_COLUMN(lane, c) % 4) * 32;
                    scale[s][t][h][c] = float(buf_scale[n * groups + min(k / group, groups - 1)]);
                }
#endif
            }
        }
    }
}

// A[m0 + r][k .. k+3] as halves, zero beyond K.
uvec2 halves_of(int m0, int r, int k) {
    vec4 a = a_values(min(m0 + r, M - 1), k);
#if NORM
    if (k < K) a *= row_factor[r] * vec4(buf_norm[(offset_norm + k) >> 2]);
#endif
    return uvec2(packHalf2x16(a.xy), packHalf2x16(a.zw));
}

// The first pairs of A for a segment and a row.
int start_of(int sub, int s, int r) { return ((sub * SEGMENTS + s) * ROWS + r) * 32; }

// Stores the elements of A that belong to the words that `fetch` has read.
void put(int m0, int first, int sub, int lane) {
    EACH for (int s = 0; s < SEGMENTS; s++) {
        EACH for (int r = 0; r < ROWS; r++) {
            // Two neighbours have the 8 elements of a word. The first makes two pairs of elements e and
            // e + 4 for e = 0, 1, the other those for 2, 3.
            int k = (first + s) * SEGMENT + 4 * lane;
            bool second = lane % 2 != 0;
            uvec2 own = halves_of(m0, r, k);
#if COOPMAT
            uint other = subgroupShuffleXor(second ? own.x : own.y, 1u);
#else
            uint other = halves_of(m0, r, k ^ 4)[second ? 1 : 0];
#endif
            uint low = second ? other : own.x, high = second ? own.y : other;
            uvec2 made = uvec2(low & 0xffffu | high << 16, low >> 16 | high & 0xffff0000u);
            pairs_of_a[start_of(sub, s, r) + lane] = HIGH_FIRST == 1 ? made.yx : made;
        }
    }
}

// Multiplies the fragments of word v of each row of segment s.
void multiply_word(int s, int v, int sub, int lane) {
    // The column of an invocation's elements of B: row 2 * pass + column / 4 of A, and the words of
    // invocation column % 4.
    bool mine = lane / 4 % 4 == lane % 4;
#if COOPMAT
    coopmat<float16_t, gl_ScopeSubgroup, 16, 16, gl_MatrixUseA> a[STEPS][TILES];
    EACH for (int step = 0; step < STEPS; step++) {
        EACH for (int t = 0; t < TILES; t++) {
            EACH for (int i = 0; i < 4; i++) {
                f16vec2 p = qvalues_of(w[s][t][i / 2][v], step, i % 2);
                a[step][t][2 * i] = p.x;
                a[step][t][2 * i + 1] = p.y;
            }
        }
    }
#endif
    EACH for (int pass = 0; pass < PASSES; pass++) {
        int r = 2 * pass + lane / 16, at = start_of(sub, s, min(r, ROWS - 1)) + (lane % 4 * 4 + v) * 2;
        uvec2 pairs[2] = uvec2[2](uvec2(0), uvec2(0));
        if (mine && r < ROWS) pairs = uvec2[2](pairs_of_a[at], pairs_of_a[at + 1]);
#if COOPMAT
        EACH for (int step = 0; step < STEPS; step++) {
            coopmat<float16_t, gl_ScopeSubgroup, 16, 8, gl_MatrixUseB> b;
            EACH for (int i = 0; i < 2; i++) {
                f16vec2 p = unpackFloat2x16(pairs[step][i]);
                b[2 * i] = p.x;
                b[2 * i + 1] = p.y;
            }
            EACH for (int t = 0; t < TILES; t++) acc[pass][t] = coopMatMulAdd(a[step][t], b, acc[pass][t]);
        }
#else
        for (int t = 0; t < TILES; t++) {
            barrier();
            int id = int(gl_LocalInvocationIndex);
            for (int j = 0; j < 4 * STEPS; j++) pairs_of_w[id][j] = qvalues_of(w[s][t][j % 4 / 2][v], j / 4, j % 2);
            pairs_of_b[id] = pairs;
            barrier();
            for (int j = 0; j < 4 * STEPS * 16; j++) {
                int k = j % 16, i = j / 16 % 4, step = j / 64, row = SUM_ROW(lane, i), column = SUM_COLUMN(lane, i);
                float of_w = pairs_of_w[sub * 32 + row % 8 * 4 + k % 8 / 2][step * 4 + row / 8 * 2 + k / 8][k % 2];
                acc[pass][t][i] += of_w * unpackHalf2x16(pairs_of_b[sub * 32 + column * 4 + k % 8 / 2][step][k / 8])[k % 2];
            }
        }
#endif
    }
}

// Adds the sums of a segment's groups, scaled, to the total.
void end_segment(int s) {
    EACH for (int pass = 0; pass < PASSES; pass++) {
        EACH for (int t = 0; t < TILES; t++) {
            EACH for (int i = 0; i < 4; i++) {
#if GROUPED
                total[pass][t][i] += acc[pass][t][i] * scale[s][t][i / 2][i % 2];
#else
                total[pass][t][i] += acc[pass][t][i];
#endif
            }
            CLEAR(acc[pass][t]);
        }
    }
}

#if COOPMAT
LOOPS(2 * loop(ceil(K, 16)))
#else
LOOPS(2 * loop(ceil(K, 16), loop(TILES, loop(4 * STEPS) + loop(4 * STEPS * 16))))
#endif

void main() {
    int m0 = int(WORKGROUP_ID.y) * ROWS, sub = SUB, lane = LANE, segments = (K + SEGMENT - 1) / SEGMENT;
    fetch(sub * SEGMENTS, lane);
#if NORM
    find_factors(m0);
#endif
    EACH for (int pass = 0; pass < PASSES; pass++) {
        EACH for (int t = 0; t < TILES; t++) {
            CLEAR(acc[pass][t]);
            EACH for (int i = 0; i < 4; i++) total[pass][t][i] = 0.0;
        }
    }
    for (int start = 0; start < segments; start += SUBS * SEGMENTS) {
        int first = start + sub * SEGMENTS;
        if (start > 0) fetch(first, lane);
        put(m0, first, sub, lane);
        SUBGROUP_BARRIER;
        EACH for (int s = 0; s < SEGMENTS; s++) {
            EACH for (int v = 0; v < 4; v++) multiply_word(s, v, sub, lane);
            end_segment(s);
        }
        SUBGROUP_BARRIER;
    }
    // Two columns of an invocation, and two of its neighbour, have the groups of a row.
    EACH for (int pass = 0; pass < PASSES; pass++) {
        EACH for (int t = 0; t < TILES; t++) {
            EACH for (int h = 0; h < 2; h++) {
                float sum = total[pass][t][2 * h] + total[pass][t][2 * h + 1];
                int r = 2 * pass + lane % 4 / 2, at = ((sub * ROWS + min(r, ROWS - 1)) * TILES + t) * 4 + lane / 16 + 2 * h;
#if COOPMAT
                sum += subgroupShuffleXor(sum, 1u);
                if (lane % 2 == 0 && r < ROWS) sums[at][lane / 4 % 4] = sum;
#else
                if (lane % 2 == 0 && r < ROWS) sums[at][lane / 4 % 4] = sum;
                barrier();
                if (lane % 2 != 0 && r < ROWS) sums[at][lane / 4 % 4] += sum;
#endif
            }
        }
    }
    barrier();
    int item = int(gl_LocalInvocationIndex), r = item / 4, column = int(WORKGROUP_ID.x) * 16 + item % 4 * 4, m = m0 + r;
    if (r >= ROWS || m >= M || column >= N / TILES) return;
    vec4 made[TILES];
    UNROLL for (int t = 0; t < TILES; t++) {
        int n = column_of(item % 4 * 4, t);
        vec4 sum = vec4(0.0);
        UNROLL for (int p = 0; p < SUBS; p++) sum += sums[((p * ROWS + r) * TILES + t) * 4 + item % 4];
#if !GROUPED
        sum *= scale4(n, 0);
#endif
        made[t] = finish(sum, m, n);
    }
    int n = column_of(item % 4 * 4, 0);
#if PAIRED
    store_pair4(made[0], made[1], m, n, column);
#else
    store4(made[0], offset_o + m * ldo + n, m, n);
#endif
}
