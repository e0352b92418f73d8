#version 450
#extension GL_GOOGLE_include_directive : enable
// out[b, m, n] = EPILOGUE(sum_k A[b, m, k] * B[b, k, n] + bias[n]) for few rows, as in decoding: B
// is read once, at copy bandwidth. The invocations of a workgroup share K, and add up in shared
// memory.
//
// Buffers and parameters: as matmul.comp.
// Macros: those of matmul_io.glslh, and
//   B_TRANSPOSED, VEC4_*  as in matmul.comp
//   ROWS  rows of A that a workgroup takes (1): as many as M, up to 16 or so
//   CHUNK  rows that are added up together (1), a divisor of ROWS. Shared memory is 16 * CHUNK *
//     LANES * SLICES bytes.
//   DEPTH  (B_TRANSPOSED 0, ROWS above 8 and a multiple of 4 and of LANES) steps to read ahead, 2
//     or 4 (2). Shared memory is at least 16 * DEPTH * SLICES * (ROWS + 4) bytes.
//   LANES, SLICES
//     B_TRANSPOSED 0: LANES (8) invocations side by side with 4 columns each, SLICES (16) parts
//       of K
//     B_TRANSPOSED 1: 4 columns per workgroup, SLICES (64) parts of K; LANES is 1
//   ROW_GROUPS  as in matmul_groups.glslh: the rows of a workgroup choose B
//   NORM, PAIRED, STORE_PAIR  as in matmul_fused.glslh: a lane computes the columns n .. n+3 and those
//     `pair` behind. ROWS is at most 8, with PAIRED B_TRANSPOSED 0.
// Local size: LANES * SLICES; SLICES is a power of two.
// Grid: (ceil(N / (4 * LANES)), ceil(M / ROWS), batches); LANES is 1 with B_TRANSPOSED. With
//   ROW_GROUPS (the same, tiles of rows, 1). With PAIRED N / 2 instead of N.
#include "core/common.glslh"
#ifndef B_TRANSPOSED
#define B_TRANSPOSED 0
#endif
#ifndef ROWS
#define ROWS 1
#endif
#ifndef CHUNK
#define CHUNK 1
#endif
#ifndef DEPTH
#define DEPTH 2
#endif
#if B_TRANSPOSED
#ifndef SLICES
#define SLICES 64
#endif
#undef LANES
#define LANES 1
#else
#ifndef LANES
#define LANES 8
#endif
#ifndef SLICES
#define SLICES 16
#endif
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
#include "matmul/matmul_groups.glslh"
layout(local_size_x = LANES, local_size_y = SLICES, local_size_z = 1) in;

int base_a, base_b, depth;  // `depth` is how much of K there is
vec4 acc[ROWS];
#if PAIRED
vec4 acc_second[ROWS];
#define ROW_SUM(p, r) (p == 0 ? acc[r] : acc_second[r])
#else
#define ROW_SUM(p, r) acc[r]
#endif
#define LOCAL (LANES * SLICES)
// With many rows A goes through shared memory, in steps of 4 * SLICES of K. DEPTH buffers hold one
// step each. Row c * SLICES + s of a buffer holds k = 4 * s + c by 4 along the rows of A. Rows are
// padded so that what a subgroup reads is in different banks.
#define STAGED (ROWS > 8 && !B_TRANSPOSED)
#define A_LINE (ROWS / 4 + 1)
#define A_PLACE (4 * SLICES * A_LINE)
#if STAGED && DEPTH * A_PLACE > LOCAL * CHUNK
shared vec4 parts[DEPTH * A_PLACE];
#else
shared vec4 parts[LOCAL * CHUNK];
#endif
#define PART(slice, row, lane) parts[((slice) * CHUNK + (row)) * LANES + (lane)]

// Adds the slices up into slice 0, up to 8 together.
void add_up() {
    int id = int(gl_LocalInvocationIndex);
    UNROLL for (int left = SLICES; left > 1; left = (left + 7) / 8) {
        int kept = (left + 7) / 8;
        UNROLL for (int t = 0; t < kept * CHUNK * LANES; t += LOCAL) {
            int at = t + id;
            if (at < kept * CHUNK * LANES) {
                vec4 sum = parts[at];
                UNROLL for (int s = 1; s < left / kept; s++) sum += parts[at + s * kept * CHUNK * LANES];
                parts[at] = sum;
            }
        }
        barrier();
    }
}

vec4 load_a(int m, int k) {
    int at = base_a + min(m, M - 1) * lda + k;
#if VEC4_A
    return READ4_A(at);
#else
    vec4 v = vec4(0.0);
    v.x = READ_A(at);
    if (k + 1 < K) v.y = READ_A(at + 1);
    if (k + 2 < K) v.z = READ_A(at + 2);
    if (k + 3 < K) v.w = READ_A(at + 3);
    return v;
#endif
}

vec4 load_b(int k, int n) {
    vec4 v = vec4(0.0);
    if (k < depth) {
        int at = base_b + k * ldb;
#if VEC4_B
        v = READ4_B(at + min(n, N - 4));
#else
        int last = N - 1;
        v = vec4(READ_B(at + min(n, last)), READ_B(at + min(n + 1, last)), READ_B(at + min(n + 2, last)),
                 READ_B(at + min(n + 3, last)));
#endif
    }
    return v;
}

vec4 load_bt(int n, int k) {
    int at = base_b + min(n, N - 1) * ldb + k;
#if VEC4_B
    return READ4_B(at);
#else
    vec4 v = vec4(0.0);
    v.x = READ_B(at);
    if (k + 1 < K) v.y = READ_B(at + 1);
    if (k + 2 < K) v.z = READ_B(at + 2);
    if (k + 3 < K) v.w = READ_B(at + 3);
    return v;
#endif
}

#if NORM
float squares[ROWS];  // sums over what an invocation reads of a row
shared float all_squares[SLICES * ROWS];

vec4 load_norm(int k) { return FLOATS_OF(T_NORM, buf_norm[(offset_norm + k) >> 2]); }

// What a row is divided by, as a factor.
float row_factor(int r) {
    float sum = 0.0;
    UNROLL for (int s = 0; s < SLICES; s++) sum += all_squares[s * ROWS + r];
    return NORM_FACTOR(sum);
}
#endif

#if STAGED
#define A_LOADS (ROWS / LANES)
vec4 next_a[DEPTH][A_LOADS], next_b[DEPTH][4];

void fetch(int d, int m0, int k0, int n) {
    int id = int(gl_LocalInvocationIndex), slice = int(gl_LocalInvocationID.y);
    UNROLL for (int c = 0; c < 4; c++) next_b[d][c] = load_b(k0 + slice * 4 + c, n);
    UNROLL for (int t = 0; t < A_LOADS; t++) {
        int i = id + t * LOCAL, k = k0 + i / ROWS * 4;
        next_a[d][t] = k < depth ? load_a(m0 + i % ROWS, k) : vec4(0.0);
    }
}

void put(int d) {
    UNROLL for (int t = 0; t < A_LOADS; t++) {
        int i = int(gl_LocalInvocationIndex) + t * LOCAL, r = i % ROWS, at = d * A_PLACE + i / ROWS * A_LINE + r / 4;
        UNROLL for (int c = 0; c < 4; c++) parts[at + c * (SLICES * A_LINE)][r % 4] = next_a[d][t][c];
    }
}

// Multiplies what is in buffer d, from k0 on, and fetches what goes there next. All invocations of
// a workgroup do it.
void multiply_step(int d, int m0, int k0, int n) {
    if (k0 >= depth) return;
    put(d);
    vec4 b[4];
    UNROLL for (int c = 0; c < 4; c++) b[c] = next_b[d][c];
    // There is a barrier for each buffer: nobody reads this one when it is written again.
    barrier();
    fetch(d, m0, k0 + DEPTH * 4 * SLICES, n);
    int slice = int(gl_LocalInvocationID.y);
    UNROLL for (int c = 0; c < 4; c++) {
        UNROLL for (int r = 0; r < ROWS / 4; r++) {
            vec4 a = parts[d * A_PLACE + (c * SLICES + slice) * A_LINE + r];
            UNROLL for (int e = 0; e < 4; e++) acc[4 * r + e] += a[e] * b[c];
        }
    }
}
#endif

LOOPS(loop(ceil(K, 4 * SLICES)) + loop(ceil(ROWS, CHUNK)) + FIND_ROWS_LOOPS)

void main() {
    int z = int(WORKGROUP_ID.z), outer = z / inner_batches, inner = z - outer * inner_batches;
    base_a = offset_a + inner * batch_a + outer * outer_a;
    int slice = int(gl_LocalInvocationID.y), lane = int(gl_LocalInvocationID.x);
    int n = int(INVOCATION_ID.x) * 4, m0 = int(WORKGROUP_ID.y) * ROWS, m_end = M;
#if PAIRED
    int column = n;  // of the output
    n = PAIRED_COLUMN(column);
#endif
#if ROW_GROUPS
    if (!find_rows(int(WORKGROUP_ID.y), ROWS, LOCAL)) return;
    m0 = group_row;
    m_end = group_end;
    base_b = offset_b + GROUP_OFFSET;
#else
    base_b = offset_b + inner * batch_b + outer * outer_b;
#endif
    depth = GROUP_DEPTH;
    UNROLL for (int r = 0; r < ROWS; r++) acc[r] = vec4(0.0);
#if PAIRED
    UNROLL for (int r = 0; r < ROWS; r++) acc_second[r] = vec4(0.0);
#endif
#if NORM
    UNROLL for (int r = 0; r < ROWS; r++) squares[r] = 0.0;
#endif
#if STAGED
    UNROLL for (int d = 0; d < DEPTH; d++) fetch(d, m0, d * 4 * SLICES, n);
    // Written out: the optimizer does not unroll a loop with barriers, and registers have no
    // indices.
    for (int k0 = 0; k0 < depth; k0 += DEPTH * 4 * SLICES) {
        multiply_step(0, m0, k0, n);
        multiply_step(1, m0, k0 + 4 * SLICES, n);
#if DEPTH == 4
        multiply_step(2, m0, k0 + 8 * SLICES, n);
        multiply_step(3, m0, k0 + 12 * SLICES, n);
#endif
    }
    barrier();
#else
#if B_TRANSPOSED && ROWS > 8
    // The arithmetic takes so long that the next step's loads have to be in flight meanwhile.
    vec4 next[4];
    UNROLL for (int c = 0; c < 4; c++) next[c] = slice * 4 < depth ? load_bt(n + c, slice * 4) : vec4(0.0);
#endif
    for (int k = slice * 4; k < depth; k += SLICES * 4) {
        vec4 b[4];
#if NORM
        vec4 factors = load_norm(k);
#endif
#if B_TRANSPOSED
#if ROWS > 8
        int after = k + SLICES * 4 < depth ? k + SLICES * 4 : k;
        UNROLL for (int c = 0; c < 4; c++) b[c] = next[c];
        UNROLL for (int c = 0; c < 4; c++) next[c] = load_bt(n + c, after);
#else
        UNROLL for (int c = 0; c < 4; c++) b[c] = load_bt(n + c, k);
#endif
        UNROLL for (int r = 0; r < ROWS; r++) {
            vec4 a = load_a(m0 + r, k);
#if NORM
            squares[r] += dot(a, a);
            a *= factors;
#endif
            UNROLL for (int c = 0; c < 4; c++) acc[r][c] += dot(a, b[c]);
        }
#else
        UNROLL for (int c = 0; c < 4; c++) b[c] = load_b(k + c, n);
#if PAIRED
        vec4 b_second[4];
        UNROLL for (int c = 0; c < 4; c++) b_second[c] = load_b(k + c, n + pair);
#endif
        UNROLL for (int r = 0; r < ROWS; r++) {
            vec4 a = load_a(m0 + r, k);
#if NORM
            squares[r] += dot(a, a);
            a *= factors;
#endif
            UNROLL for (int c = 0; c < 4; c++) acc[r] += a[c] * b[c];
#if PAIRED
            UNROLL for (int c = 0; c < 4; c++) acc_second[r] += a[c] * b_second[c];
#endif
        }
#endif
    }
#endif
    int base_o = offset_o + inner * batch_o + outer * outer_o;
#if NORM
    // All lanes of a slice have read the same part of K.
    if (lane == 0) UNROLL for (int r = 0; r < ROWS; r++) all_squares[slice * ROWS + r] = squares[r];
#endif
#define STORED_ROWS ((CHUNK + SLICES - 1) / SLICES)  // by one invocation, of a chunk
#if PAIRED
    vec4 first[STORED_ROWS];
#endif
    for (int r0 = 0; r0 < ROWS; r0 += CHUNK) {
        UNROLL for (int p = 0; p <= PAIRED; p++) {
            if (r0 > 0 || p > 0) barrier();
            // Sums stay in registers, which have no indices that are not constant.
            UNROLL for (int r = 0; r < CHUNK; r++) {
                vec4 sum = ROW_SUM(p, r);
#if ROWS > CHUNK
                UNROLL for (int c = 1; c < ROWS / CHUNK; c++) sum = r0 == c * CHUNK ? ROW_SUM(p, c * CHUNK + r) : sum;
#endif
                PART(slice, r, lane) = sum;
            }
            barrier();
            add_up();
            UNROLL for (int t = 0; t < STORED_ROWS; t++) {
                int r = t * SLICES + slice, m = m0 + r0 + r;
                if (r >= CHUNK || m >= m_end || n >= N) continue;
                vec4 sum = PART(0, r, lane);
#if NORM
                sum *= row_factor(r0 + r);
#endif
#if PAIRED
                sum += bias4(n + p * pair, N);
                if (p == 0) {
                    first[t] = sum;
                    continue;
                }
                store_pair4(first[t], sum, base_o + m * ldo + column, z, m, n, column);
#else
                store4(sum + bias4(n, N), base_o + m * ldo + n, z, m, n, N);
#endif
            }
        }
    }
}
