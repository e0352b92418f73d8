#version 450
#extension GL_GOOGLE_include_directive : enable
// Matmul with a quantized weight for few rows, as in decoding. W is read once, at the speed of
// memory. The invocations of a workgroup share K, and compute COLS columns.
//
// Buffers, macros: qmatmul_io.glslh. Parameters: qmatmul_params.glslh. Further macros:
//   ROWS       rows of A in a pass (1)
//   COLS       columns of a workgroup, a multiple of 4 (4)
//   WORDS      words of W that an invocation reads at once: 4, 2 or 1. The words of a row of W, and
//              of a group, are multiples of it.
//   STEPS      reads of each column that overlap, where A is not shared (1)
//   SHARE      (ACT 0) 1: A goes through shared memory, 16 * ROWS * LX * (WORDS * 8 / BITS + 1)
//              bytes; 0: it does not (1)
//   ANY_GROUP  1: groups of any length. An invocation takes whole groups, and WORDS is 1.
//   LX         invocations that share the columns, a power of two (32)
//   SUBGROUP   size of a subgroup, of which LX is a multiple: subgroup arithmetic adds up. 0:
//              shared memory does.
//   TEAMS      groups of LX invocations in a workgroup, each for other columns (1). They share A.
//              More than one need SUBGROUP == LX.
//   NORM, PAIRED, STORE_PAIR  (SHARE) as in qmatmul_few_rows.glslh. With PAIRED, the second half of the
//              COLS columns is `pair` columns behind the first: COLS is a multiple of 8, and pair one
//              of COLS / 2.
// Grid: (ceil(N / (COLS * TEAMS)), ceil(M / ROWS))
#include "core/common.glslh"
#ifndef ROWS
#define ROWS 1
#endif
#ifndef COLS
#define COLS 4
#endif
#ifndef STEPS
#define STEPS 1
#endif
#ifndef SHARE
#define SHARE 1
#endif
#ifndef LX
#define LX 32
#endif
#ifndef SUBGROUP
#define SUBGROUP 0
#endif
#ifndef ANY_GROUP
#define ANY_GROUP 0
#endif
#ifndef TEAMS
#define TEAMS 1
#endif
#if SUBGROUP
#extension GL_KHR_shader_subgroup_arithmetic : require
#endif

#include "quantized/qmatmul_few_rows.glslh"
#if PAIRED
#define COLUMN(n0, c) ((n0) + (c) % (COLS / 2) + (c) / (COLS / 2) * pair)
#else
#define COLUMN(n0, c) ((n0) + (c))
#endif

layout(local_size_x = LX, local_size_y = TEAMS, local_size_z = 1) in;

#define PER_WORD (32 / BITS)
#define CHUNK (WORDS * PER_WORD)
#define QUADS (PER_WORD / 4)
#define COLS4 (COLS / 4)

#if ACT && !GROUPED
#define T_SUM ivec4
#else
#define T_SUM vec4
#endif
T_SUM total[ROWS][COLS4];
#if SUBGROUP == 0
#define PARTS LX
#else
#define PARTS (LX / SUBGROUP)
#endif
#if PARTS > 1
shared T_SUM parts[PARTS];
#endif

// Adds the sums of all invocations. All of them get the result.
T_SUM add_up(T_SUM sum) {
#if SUBGROUP
    sum = subgroupAdd(sum);
#endif
#if PARTS > 1
    int id = int(gl_LocalInvocationIndex);
    barrier();
#if SUBGROUP
    if (subgroupElect()) parts[gl_SubgroupID] = sum;
    barrier();
    sum = parts[0];
    UNROLL for (int p = 1; p < PARTS; p++) sum += parts[p];
#else
    parts[id] = sum;
    barrier();
    for (int half_way = LX / 2; half_way > 0; half_way /= 2) {
        if (id < half_way) parts[id] += parts[id + half_way];
        barrier();
    }
    sum = parts[0];
#endif
#endif
    return sum;
}

int row_at(int n) { return offset_w + min(n, N - 1) * ldw; }

#if ANY_GROUP
void multiply(int lane, int m0, int n0) {
    for (int g = lane; g < groups; g += LX) {
        UNROLL for (int j = 0; j < COLS4; j++) {
            int n = min(n0 + 4 * j, N - 1);
            vec4 scales = scale4(n, g);
            UNROLL for (int r = 0; r < ROWS; r++) {
                int m = min(m0 + r, M - 1);
#if ACT
                ivec4 part = -row_zero(m) * sum4(n, g);
#else
                vec4 part = vec4(0.0);
                float a_sum = 0.0;
#endif
                for (int k = g * group; k < min((g + 1) * group, K); k++) {
                    ivec4 c;
                    UNROLL for (int i = 0; i < 4; i++) c[i] = qvalue_at(row_at(n + i), k);
#if ACT
                    part += bitfieldExtract(a_qvalues(m, k & ~3), (k & 3) * 8, 8) * c;
#else
                    float a = a_values(m, k & ~3)[k & 3];
                    part += a * vec4(c);
                    a_sum += a;
#endif
                }
#if MINIMUM
                part += OFFSET * a_sum;
                total[r][j] += minimum4(n, g) * a_sum;
#endif
                total[r][j] += scales * vec4(part);
            }
        }
    }
}
#else
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

#if ACT || !SHARE
// Adds CHUNK quantized values of each column from k0 on.
void add_chunk(T_WORDS w[COLS], int k0, int m0, int n0) {
#if ACT
    ivec4 part[ROWS][COLS4];
    UNROLL for (int r = 0; r < ROWS; r++) {
        UNROLL for (int j = 0; j < COLS4; j++) part[r][j] = ivec4(0);
    }
    UNROLL for (int i = 0; i < WORDS; i++) {
        UNROLL for (int q = 0; q < QUADS; q++) {
            int k = k0 + i * PER_WORD + q * 4, a[ROWS];
            UNROLL for (int r = 0; r < ROWS; r++) a[r] = a_qvalues(min(m0 + r, M - 1), k);
            UNROLL for (int c = 0; c < COLS; c++) {
                int b = qvalue_bytes(WORD(w[c], i) >> (16 * q));
                UNROLL for (int r = 0; r < ROWS; r++) part[r][c / 4][c % 4] += dot4(a[r], b);
            }
        }
    }
#else
    vec4 part[ROWS][COLS4];
    float a_sum[ROWS];
    UNROLL for (int r = 0; r < ROWS; r++) {
        UNROLL for (int j = 0; j < COLS4; j++) part[r][j] = vec4(0.0);
        a_sum[r] = 0.0;
    }
    UNROLL for (int i = 0; i < WORDS; i++) {
        UNROLL for (int q = 0; q < QUADS; q++) {
            int k = k0 + i * PER_WORD + q * 4;
            vec4 a[ROWS];
            UNROLL for (int r = 0; r < ROWS; r++) {
                a[r] = a_values(min(m0 + r, M - 1), k);
                a_sum[r] += dot(a[r], vec4(1.0));
            }
            UNROLL for (int c = 0; c < COLS; c++) {
                vec4 b = qvalues(WORD(w[c], i) >> (16 * q));
                UNROLL for (int r = 0; r < ROWS; r++) part[r][c / 4][c % 4] += dot(a[r], b);
            }
        }
    }
#endif
#if GROUPED
    int g = min(k0, K - 1) / group;
    UNROLL for (int j = 0; j < COLS4; j++) {
        int n = min(n0 + 4 * j, N - 1);
        vec4 scales = scale4(n, g);
#if ACT
        ivec4 sums = k0 == g * group ? sum4(n, g) : ivec4(0);
        UNROLL for (int r = 0; r < ROWS; r++) {
            total[r][j] += scales * vec4(part[r][j] - row_zero(min(m0 + r, M - 1)) * sums);
        }
#else
        UNROLL for (int r = 0; r < ROWS; r++) {
#if MINIMUM
            part[r][j] += OFFSET * a_sum[r];
            total[r][j] += minimum4(n, g) * a_sum[r];
#endif
            total[r][j] += scales * part[r][j];
        }
#endif
    }
#else
    UNROLL for (int j = 0; j < COLS4; j++) {
        UNROLL for (int r = 0; r < ROWS; r++) total[r][j] += part[r][j];
    }
#endif
}

void multiply(int lane, int m0, int n0) {
    int chunks = (K + CHUNK - 1) / CHUNK;
    for (int first = lane; first < chunks; first += LX * STEPS) {
        T_WORDS w[STEPS][COLS];
        UNROLL for (int s = 0; s < STEPS; s++) {
            int chunk = min(first + s * LX, chunks - 1);
            UNROLL for (int c = 0; c < COLS; c++) w[s][c] = W_AT(row_at(n0 + c) / WORDS + chunk);
        }
        UNROLL for (int s = 0; s < STEPS; s++) add_chunk(w[s], (first + s * LX) * CHUNK, m0, n0);
    }
}
#else
// An invocation needs CHUNK neighbours of A. If it read them itself, each invocation would read
// another cache line. So neighbours read neighbours, and exchange them in shared memory. An unused
// vector between the pieces keeps these in different banks.
#define CHUNK4 uint(CHUNK / 4)
#define PITCH (CHUNK / 4 + 1)
shared vec4 tile[ROWS * LX * PITCH];

#if NORM
#if SUBGROUP
#define NORM_PARTS (LX * TEAMS / SUBGROUP)
#else
#define NORM_PARTS (LX * TEAMS)
#endif
float squares[ROWS];  // of what an invocation reads of each row
shared float all_squares[ROWS * NORM_PARTS];

void add_squares() {
    UNROLL for (int r = 0; r < ROWS; r++) {
#if SUBGROUP
        float sum = subgroupAdd(squares[r]);
        if (subgroupElect()) all_squares[r * NORM_PARTS + int(gl_SubgroupID)] = sum;
#else
        all_squares[r * NORM_PARTS + int(gl_LocalInvocationIndex)] = squares[r];
#endif
    }
    barrier();
}

// What a row is divided by, as a factor.
float row_factor(int r) {
    float sum = 0.0;
    UNROLL for (int p = 0; p < NORM_PARTS; p++) sum += all_squares[r * NORM_PARTS + p];
    return NORM_FACTOR(sum);
}
#endif

// A[m0 + r][k .. k+3] as the other factor of spread_qvalues. Each is read once by a workgroup.
vec4 unspread(int m0, int r, int k) {
    vec4 a = a_values(min(m0 + r, M - 1), k);
#if NORM
    float square = dot(a, a);
    UNROLL for (int i = 0; i < ROWS; i++) squares[i] += i == r ? square : 0.0;
    if (k < K) a *= vec4(buf_norm[(offset_norm + k) >> 2]);
#endif
    return a * UNSPREAD;
}

void multiply(int lane, int m0, int n0) {
    int chunks = (K + CHUNK - 1) / CHUNK, rows[COLS];
    UNROLL for (int c = 0; c < COLS; c++) rows[c] = row_at(COLUMN(n0, c)) / WORDS;
    for (int first = 0; first < chunks; first += LX) {
        T_WORDS w[COLS];
        int chunk = min(first + lane, chunks - 1);
        UNROLL for (int c = 0; c < COLS; c++) w[c] = W_AT(rows[c] + chunk);
        barrier();
        UNROLL for (uint j = 0; j < (ROWS * CHUNK4 + TEAMS - 1) / TEAMS; j++) {
            uint at = gl_LocalInvocationIndex + j * (LX * TEAMS), e = at % (LX * CHUNK4), r = at / (LX * CHUNK4);
            if (r < ROWS) tile[(r * LX + e / CHUNK4) * PITCH + e % CHUNK4] = unspread(m0, int(r), first * CHUNK + int(e) * 4);
        }
        barrier();
        vec4 part[ROWS][COLS4];
        float excess[ROWS];
        UNROLL for (int r = 0; r < ROWS; r++) {
            UNROLL for (int j = 0; j < COLS4; j++) part[r][j] = vec4(0.0);
            excess[r] = 0.0;
        }
        UNROLL for (int i = 0; i < WORDS; i++) {
            UNROLL for (int q = 0; q < QUADS; q++) {
                vec4 a[ROWS];
                UNROLL for (int r = 0; r < ROWS; r++) {
                    a[r] = tile[(r * LX + lane) * PITCH + i * QUADS + q];
                    excess[r] += dot(a[r], OFFSET * SPREAD);
                }
                UNROLL for (int c = 0; c < COLS; c++) {
                    vec4 b = spread_qvalues(WORD(w[c], i) >> (16 * q));
                    UNROLL for (int r = 0; r < ROWS; r++) {
                        UNROLL for (int e = 0; e < 4; e++) part[r][c / 4][c % 4] += a[r][e] * b[e];
                    }
                }
            }
        }
        UNROLL for (int j = 0; j < COLS4; j++) {
#if GROUPED
            int n = min(COLUMN(n0, 4 * j), N - 1), g = chunk * CHUNK / group;
            vec4 scales = scale4(n, g);
#else
            vec4 scales = vec4(1.0);
#endif
#if MINIMUM
            vec4 minimums = minimum4(n, g) / OFFSET;
            UNROLL for (int r = 0; r < ROWS; r++) total[r][j] += scales * part[r][j] + minimums * excess[r];
#else
            UNROLL for (int r = 0; r < ROWS; r++) total[r][j] += scales * (part[r][j] - excess[r]);
#endif
        }
    }
}
#endif
#endif

// Results of columns n .. n+3 of row m from their sums.
vec4 finished(T_SUM sum, int r, int m, int n) {
#if NORM
    sum *= row_factor(r);
#endif
#if ACT && !GROUPED
    return finish_sums(sum, m, n);
#elif GROUPED
    return finish(sum, m, n);
#else
    return finish(sum * scale4(n, 0), m, n);
#endif
}

#if ANY_GROUP
LOOPS(loop(ceil(groups, LX), COLS4 * ROWS * loop(group)))
#else
LOOPS(loop(ceil(K, LX)))
#endif
LOOPS(ROWS * COLS4 * loop(log2(LX)))


void main() {
    int lane = int(gl_LocalInvocationID.x), m0 = int(WORKGROUP_ID.y) * ROWS;
    int n0 = int(WORKGROUP_ID.x * TEAMS + gl_LocalInvocationID.y) * COLS;
#if PAIRED
    int column = n0 / 2;  // of the output
    n0 = PAIRED_COLUMN(column);
#endif
    UNROLL for (int r = 0; r < ROWS; r++) {
        UNROLL for (int j = 0; j < COLS4; j++) total[r][j] = T_SUM(0);
#if NORM
        squares[r] = 0.0;
#endif
    }
    multiply(lane, m0, n0);
#if NORM
    add_squares();
#endif
    UNROLL for (int r = 0; r < ROWS; r++) {
        UNROLL for (int j = 0; j < COLS4 / (1 + PAIRED); j++) {
            T_SUM sum = add_up(total[r][j]);
#if PAIRED
            T_SUM sum_second = add_up(total[r][j + COLS4 / 2]);
#endif
            int m = m0 + r, n = n0 + 4 * j;
            if (lane != (r * COLS4 + j) % LX || m >= M || n >= N) continue;
            vec4 v = finished(sum, r, m, n);
#if PAIRED
            vec4 w = finished(sum_second, r, m, n + pair);
            store_pair4(v, w, m, n, column + 4 * j);
#else
            store4(v, offset_o + m * ldo + n, m, n);
#endif
        }
    }
}
