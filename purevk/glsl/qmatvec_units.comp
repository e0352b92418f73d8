#version 450
#extension GL_GOOGLE_include_directive : enable
#ifndef MATRIX_UNITS
#define MATRIX_UNITS 0
#endif
#if MATRIX_UNITS
#extension GL_KHR_cooperative_matrix : require
#extension GL_KHR_memory_scope_semantics : require
#extension GL_KHR_shader_subgroup_arithmetic : require
#endif
// The product with a quantized weight for few rows, on matrix units: W, the left operand, goes from memory into fragments
// without a detour, and A through shared memory. A subgroup makes TILES times 16 columns of the result.
//
// Fragments lie as fragments.glslh says: the device must have been seen to do it so. The order of K is free, as long as both
// operands have the same: an invocation takes whole words of W.
//
// Bindings, macros: qmatmul_io.glslh (ACT 1: with GROUPED alone). Parameters: qmatmul_params.glslh. Further macros:
//   ROWS   rows of A at a time, at most 8 (1)
//   SPLIT  1: numbers of A go as two halves, in units of the largest of CHUNK neighbours, for 22 bits. 0: as one half.
//   WORDS  words of W that an invocation reads at once: 4, 2 or 1; a row of W has a multiple of them, and a group of
//          SEGMENT = 4 * WORDS * 32 / BITS codes.
//   SEGMENTS  of which so many are read ahead; SEGMENTS * SEGMENT is a multiple of 128.
//   TILES  of 16 columns, of a subgroup (1)
//   SUBS_N, SUBS_K  subgroups side by side along the columns (4), and along K (1)
//   MATRIX_UNITS 0: the same arithmetic step by step, for tests on devices without matrix units.
// Shared memory, bytes: 96 * SUBS_K * CHUNK / 16 * COLUMNS for A, 4 * SUBS_K * TILE_N * COLUMNS for the sums, 8 * SUBS_K * ROWS.
// Grid: (ceil(N / (16 * TILES * SUBS_N)), ceil(M / ROWS))
#include "common.glslh"
#ifndef ROWS
#define ROWS 1
#endif
#ifndef SPLIT
#define SPLIT 1
#endif
#ifndef SEGMENTS
#define SEGMENTS 4
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

#include "qmatmul_params.glslh"
#include "fragments.glslh"

#define SUBS (SUBS_N * SUBS_K)
layout(local_size_x = 32 * SUBS, local_size_y = 1, local_size_z = 1) in;

#if MATRIX_UNITS
#define T_HALF float16_t
#define PAIR f16vec2
#define PAIR_OF unpackFloat2x16
#define SUB int(gl_SubgroupID)
#define LANE int(gl_SubgroupInvocationID)
#else
#define T_HALF float
#define PAIR vec2
#define PAIR_OF unpackHalf2x16
#define SUB int(gl_LocalInvocationIndex / 32u)
#define LANE int(gl_LocalInvocationIndex % 32u)
#endif

#define PER_WORD (32 / BITS)
#define SEGMENT (4 * WORDS * PER_WORD)
#define CHUNK (SEGMENTS * SEGMENT)
#define STEPS (PER_WORD / 4)
#define FRAGMENTS (CHUNK / 16)
// Columns of A's fragments: ROWS, and the second halves after them.
#define COLUMNS (ROWS * (1 + SPLIT) > 8 ? 16 : 8)
#define UNITS (ROWS * (1 + SPLIT) > 8 ? 2 : 1)
#define SECOND (COLUMNS / 2)
#define ITEMS ((ROWS * SUBS_K + SUBS - 1) / SUBS)
#define QUADS (CHUNK / 128)
#define TILE_N (16 * TILES * SUBS_N)
#define FRAGMENT_SIZE (COLUMNS * B_LINE)

#if WORDS == 4
#define T_WORDS uvec4
#define WORD(v, j) v[j]
#elif WORDS == 2
#define T_WORDS uvec2
#define WORD(v, j) v[j]
#else
#define T_WORDS uint
#define WORD(v, j) v
#endif

shared T_HALF fragments[2 * SUBS_K * FRAGMENTS * FRAGMENT_SIZE];
shared float row_unit[2 * SUBS_K * ROWS];
shared float results[SUBS_K * TILE_N * COLUMNS];

T_WORDS w_next[TILES][2][SEGMENTS];
float scale_next[TILES][2][SEGMENTS];
vec4 a_next[ITEMS][QUADS];
float total[TILES][UNITS][4];

// Where code k of a chunk lies in the fragments of column 0: what codes_of takes from a word goes where A_COLUMN says.
int place_of(int k) {
    int inside = k % SEGMENT, word = inside / PER_WORD, p = inside % PER_WORD;
#if BITS == 8
    int step = 0, upper = p & 1, odd = p >> 1;
#else
#if HIGH_FIRST
    p ^= 1;
#endif
    int step = (p >> 1) & 1, upper = p & 1, odd = p >> 2;
#endif
    int fragment = ((k / SEGMENT) * WORDS + word % WORDS) * STEPS + step;
    return fragment * FRAGMENT_SIZE + 8 * upper + 2 * (word / WORDS) + odd;
}

// Codes of a word for the pairs of a step that lie in the first (upper 0) or last 8 columns of the fragment.
PAIR codes_of(uint word, int step, int upper) {
#if BITS == 8
    uint bits = ((word ^ 0x80808080u) >> (8 * upper)) & 0x00ff00ffu;
    return PAIR_OF(bits | 0x64006400u) - PAIR(1152.0);
#else
    uint bits = word >> (8 * step);
    if (upper == 0) return PAIR_OF((bits & 0x000f000fu) | 0x64006400u) - PAIR(1032.0);
    return PAIR_OF((bits & 0x00f000f0u) | 0x64006400u) * PAIR(0.0625) - PAIR(72.0);
#endif
}

void fetch(int turn, int m0, int n0) {
    int sub = SUB, lane = LANE, k0 = (turn * SUBS_K + sub / SUBS_N) * CHUNK, last = ldw / WORDS - 1;
    UNROLL for (int t = 0; t < TILES; t++) {
        UNROLL for (int h = 0; h < 2; h++) {
            int n = min(n0 + ((sub % SUBS_N) * TILES + t) * 16 + A_ROW(lane, 2 * h), N - 1), row = (offset_w + n * ldw) / WORDS;
            UNROLL for (int s = 0; s < SEGMENTS; s++) {
                w_next[t][h][s] = buf_w[row + min(k0 / (PER_WORD * WORDS) + s * 4 + lane % 4, last)];
#if GROUPED
                scale_next[t][h][s] = float(buf_scale[n * groups + min((k0 + s * SEGMENT) / group, groups - 1)]);
#endif
            }
        }
    }
    UNROLL for (int i = 0; i < ITEMS; i++) {
        int item = min(sub + i * SUBS, ROWS * SUBS_K - 1), m = min(m0 + item % ROWS, M - 1);
        UNROLL for (int j = 0; j < QUADS; j++) {
            int k = (turn * SUBS_K + item / ROWS) * CHUNK + (j * 32 + lane) * 4;
#if ACT
            int word = a_codes(m, k), zero = row_zero(m);
            ivec4 c = ivec4(bitfieldExtract(word, 0, 8), bitfieldExtract(word, 8, 8), bitfieldExtract(word, 16, 8), word >> 24);
            a_next[i][j] = mix(vec4(0.0), vec4(c - zero), lessThan(ivec4(k, k + 1, k + 2, k + 3), ivec4(K)));
#else
            a_next[i][j] = a_values(m, k);
#endif
        }
    }
}

// The largest exponent among the numbers of a subgroup, as the bits of a float have it.
uint largest(vec4 v[QUADS], int turn, int item, int m0) {
    uint top = 15u << 23;
#if MATRIX_UNITS
    UNROLL for (int j = 0; j < QUADS; j++) {
        vec4 a = abs(v[j]);
        top = max(top, floatBitsToUint(max(max(a.x, a.y), max(a.z, a.w))));
    }
    top = subgroupMax(top);
#else
    for (int j = 0; j < CHUNK / 4; j++) {
        vec4 a = vec4(0.0);
#if !ACT
        a = abs(a_values(min(m0 + item % ROWS, M - 1), (turn * SUBS_K + item / ROWS) * CHUNK + j * 4));
#endif
        top = max(top, floatBitsToUint(max(max(a.x, a.y), max(a.z, a.w))));
    }
#endif
    return top >> 23;
}

void put(int turn, int m0) {
    int sub = SUB, lane = LANE, side = turn & 1;
    UNROLL for (int i = 0; i < ITEMS; i++) {
        int item = sub + i * SUBS, column = item % ROWS;
        int base = (side * SUBS_K + item / ROWS) * (FRAGMENTS * FRAGMENT_SIZE) + column * B_LINE;
#if SPLIT
        uint exponent = largest(a_next[i], turn, item, m0);
        float unit = uintBitsToFloat((268u - exponent) << 23);
        if (item < ROWS * SUBS_K) row_unit[side * (ROWS * SUBS_K) + item] = uintBitsToFloat((exponent - 14u) << 23);
#endif
        if (item < ROWS * SUBS_K) {
            UNROLL for (int j = 0; j < QUADS; j++) {
                UNROLL for (int e = 0; e < 4; e++) {
                    int at = base + place_of((j * 32 + lane) * 4 + e);
#if SPLIT
                    float v = a_next[i][j][e] * unit;
                    // Rounded to the 11 bits of a half by its bits: compilers may take a conversion there and back for none.
                    float first = uintBitsToFloat((floatBitsToUint(v) + 0x1000u) & 0xffffe000u);
                    fragments[at] = T_HALF(first);
                    fragments[at + SECOND * B_LINE] = T_HALF((v - first) * 2048.0);
#else
                    fragments[at] = T_HALF(a_next[i][j][e]);
#endif
                }
            }
        }
    }
}

#if MATRIX_UNITS
#define ACCUMULATOR coopmat<float, gl_ScopeSubgroup, 16, 8, gl_MatrixUseAccumulator>
ACCUMULATOR acc[TILES][UNITS];
#define CLEAR(v) v = ACCUMULATOR(0.0)
#else
float acc[TILES][UNITS][4];
shared vec2 pairs[SUBS * 32 * 4];
#define CLEAR(v) v = float[4](0.0, 0.0, 0.0, 0.0)
#endif

// Multiplies the fragment that is made of a word of each tile.
void multiply_step(uint words[TILES][2], int step, int at) {
#if MATRIX_UNITS
    coopmat<float16_t, gl_ScopeSubgroup, 16, 8, gl_MatrixUseB> b[UNITS];
    UNROLL for (int u = 0; u < UNITS; u++) {
        coopMatLoad(b[u], fragments, at + u * 8 * B_LINE, B_LINE, gl_CooperativeMatrixLayoutColumnMajor);
    }
#endif
    UNROLL for (int t = 0; t < TILES; t++) {
        PAIR p[4];
        UNROLL for (int i = 0; i < 4; i++) p[i] = codes_of(words[t][i / 2], step, i % 2);
#if MATRIX_UNITS
        coopmat<float16_t, gl_ScopeSubgroup, 16, 16, gl_MatrixUseA> a;
        UNROLL for (int i = 0; i < 4; i++) {
            a[2 * i] = p[i].x;
            a[2 * i + 1] = p[i].y;
        }
        UNROLL for (int u = 0; u < UNITS; u++) acc[t][u] = coopMatMulAdd(a, b[u], acc[t][u]);
#else
        barrier();
        UNROLL for (int i = 0; i < 4; i++) pairs[(SUB * 32 + LANE) * 4 + i] = p[i];
        barrier();
        UNROLL for (int u = 0; u < UNITS; u++) {
            UNROLL for (int i = 0; i < 4; i++) {
                int row = SUM_ROW(LANE, i), column = SUM_COLUMN(LANE, i) + 8 * u;
                for (int k = 0; k < 16; k++) {
                    vec2 held = pairs[(SUB * 32 + row % 8 * 4 + k % 8 / 2) * 4 + row / 8 * 2 + k / 8];
                    acc[t][u][i] += held[k % 2] * fragments[at + column * B_LINE + k];
                }
            }
        }
#endif
    }
}

void main() {
    int m0 = int(gl_WorkGroupID.y) * ROWS, n0 = int(gl_WorkGroupID.x) * TILE_N, sub = SUB, lane = LANE;
    int turns = (K + CHUNK * SUBS_K - 1) / (CHUNK * SUBS_K);
    UNROLL for (int t = 0; t < TILES; t++) {
        UNROLL for (int u = 0; u < UNITS; u++) {
            UNROLL for (int i = 0; i < 4; i++) total[t][u][i] = 0.0;
        }
    }
    fetch(0, m0, n0);
    for (int turn = 0; turn < turns; turn++) {
        put(turn, m0);
        T_WORDS w[TILES][2][SEGMENTS] = w_next;
        float scale[TILES][2][SEGMENTS] = scale_next;
        // What is put in the next turn goes to the other side, which all have left by then.
        barrier();
        if (turn + 1 < turns) fetch(turn + 1, m0, n0);
        int part = (turn & 1) * SUBS_K + sub / SUBS_N;
        float sum[TILES][UNITS][4];
        UNROLL for (int t = 0; t < TILES; t++) {
            UNROLL for (int u = 0; u < UNITS; u++) {
                CLEAR(acc[t][u]);
                UNROLL for (int i = 0; i < 4; i++) sum[t][u][i] = 0.0;
            }
        }
        UNROLL for (int s = 0; s < SEGMENTS; s++) {
            UNROLL for (int v = 0; v < WORDS; v++) {
                uint words[TILES][2];
                UNROLL for (int t = 0; t < TILES; t++) {
                    UNROLL for (int h = 0; h < 2; h++) words[t][h] = WORD(w[t][h][s], v);
                }
                UNROLL for (int step = 0; step < STEPS; step++) {
                    multiply_step(words, step, (part * FRAGMENTS + (s * WORDS + v) * STEPS + step) * FRAGMENT_SIZE);
                }
            }
#if GROUPED
            UNROLL for (int t = 0; t < TILES; t++) {
                UNROLL for (int u = 0; u < UNITS; u++) {
                    UNROLL for (int i = 0; i < 4; i++) sum[t][u][i] += acc[t][u][i] * scale[t][i / 2][s];
                    CLEAR(acc[t][u]);
                }
            }
#endif
        }
        UNROLL for (int u = 0; u < UNITS; u++) {
            UNROLL for (int i = 0; i < 4; i++) {
                float unit = 1.0;
#if SPLIT
                unit = row_unit[part * ROWS + min((SUM_COLUMN(lane, i) + 8 * u) % SECOND, ROWS - 1)];
#endif
                UNROLL for (int t = 0; t < TILES; t++) {
#if !GROUPED
                    sum[t][u][i] = acc[t][u][i];
#endif
                    total[t][u][i] += sum[t][u][i] * unit;
                }
            }
        }
    }
    UNROLL for (int t = 0; t < TILES; t++) {
        UNROLL for (int u = 0; u < UNITS; u++) {
            UNROLL for (int i = 0; i < 4; i++) {
                int n = ((sub % SUBS_N) * TILES + t) * 16 + SUM_ROW(lane, i);
                results[((sub / SUBS_N) * COLUMNS + SUM_COLUMN(lane, i) + 8 * u) * TILE_N + n] = total[t][u][i];
            }
        }
    }
    barrier();
    for (int item = int(gl_LocalInvocationIndex); item < ROWS * TILE_N / 4; item += 32 * SUBS) {
        int row = item / (TILE_N / 4), column = item % (TILE_N / 4) * 4, m = m0 + row, n = n0 + column;
        if (m >= M || n >= N) continue;
        vec4 sum = vec4(0.0);
        UNROLL for (int part = 0; part < SUBS_K; part++) {
            UNROLL for (int e = 0; e < 4; e++) {
                sum[e] += results[(part * COLUMNS + row) * TILE_N + column + e];
#if SPLIT
                sum[e] += results[(part * COLUMNS + SECOND + row) * TILE_N + column + e] / 2048.0;
#endif
            }
        }
#if GROUPED
        vec4 v = finish(sum, m, n);
#else
        vec4 v = finish(sum * scale4(n, 0), m, n);
#endif
        store4(v, offset_o + m * ldo + n, m, n);
    }
}
