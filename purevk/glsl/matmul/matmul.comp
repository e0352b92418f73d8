#version 450
#extension GL_GOOGLE_include_directive : enable
// out[b, m, n] = EPILOGUE(sum_k A[b, m, k] * B[b, k, n] + bias[n]), in float. Each invocation has a
// tile in registers.
//
// Buffers: a, b, bias (if BIAS), out, and what EXTRA_BUFFERS declares.
// Strides and offsets are in elements; the last dim of each operand is contiguous.
// Macros: those of matmul_tile.glslh and of matmul_io.glslh, and
//   B_TRANSPOSED  1: B is [N, K] in memory
//   B_PANELS  1: B is [N / 8, K, 8] in memory: a CPU reads several pages side by side, and each in
//     order. ldb is 8; VEC4_A and VEC4_B are 1 and ROW_GROUPS 0.
//   VEC4_A  K is a multiple of 4
//   VEC4_B  N is a multiple of 4, or K if B_TRANSPOSED
//   VEC4_OUT  N is a multiple of 4
//   ROW_GROUPS  as in matmul_groups.glslh: the rows of a workgroup choose B
//   With each VEC4_*, the offset and the row and batch strides are multiples of 4 too.
// Grid:
//   LANES_M 0: (ceil(N / (LX * 4 * TN4)), ceil(M / (TM * WY)), batches); LX is SG, or 8 if SG is 1
//   LANES_M 1: (ceil(N / (4 * TN4)), ceil(M / (SG * TM * WY)), batches)
//   With ROW_GROUPS (the same, tiles of rows, 1).
#include "core/common.glslh"

PARAM(0, M)
PARAM(1, N)
PARAM(2, K)
PARAM(3, lda)  // stride of the rows of A
PARAM(4, ldb)  // of B, or of its columns if B_TRANSPOSED
PARAM(5, ldo)  // of out
PARAM(6, batch_a)  // stride of A from one batch to the next (0 broadcasts)
PARAM(7, batch_b)  // of B
PARAM(8, batch_o)  // of out
PARAM(9, inner_batches)  // batch z is (z / inner_batches, z % inner_batches)
PARAM(10, outer_a)  // stride of A from one outer batch to the next
PARAM(11, outer_b)  // of B
PARAM(12, outer_o)  // of out
#undef PARAM_DEFAULT
#define PARAM_DEFAULT 0
PARAM(13, offset_a)  // of A in its buffer
PARAM(14, offset_b)  // of B
PARAM(15, offset_o)  // of out
PARAM(16, offset_bias)  // of the bias

#include "matmul/matmul_io.glslh"
#include "matmul/matmul_groups.glslh"
#ifndef B_PANELS
#define B_PANELS 0
#endif

int base_a, base_b;

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
#if VEC4_A
    int at = base_b + k * ldb;
#else
    int at = base_b + min(k, K - 1) * ldb;
#endif
#if B_PANELS
    n = min(n, N - 4);
    vec4 v = READ4_B(at + (n >> 3) * (K * 8) + (n & 4));
#elif VEC4_B
    vec4 v = READ4_B(at + min(n, N - 4));
#else
    int last = N - 1;
    vec4 v = vec4(READ_B(at + min(n, last)), READ_B(at + min(n + 1, last)), READ_B(at + min(n + 2, last)),
                  READ_B(at + min(n + 3, last)));
#endif
#if !VEC4_A
    if (k >= K) v = vec4(0.0);
#endif
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

#include "matmul/matmul_tile.glslh"

void tile_sum(int start, int end) {
    for (int k = start; k < end; k += 4) {
        vec4 a[A_LOADS];
        UNROLL for (int g = 0; g < A_LOADS; g++) a[g] = load_a(A_ROW(g), k);
        tile_step(a, k);
    }
}

#if LONG_SUMS
#define FOLD 512  // terms of a sum that is added to others
LOOPS(loop(ceil(K, FOLD), loop(FOLD / 4)) + loop(TM / TURN) + FIND_ROWS_LOOPS)
#else
LOOPS(loop(ceil(K, 4)) + loop(TM / TURN) + FIND_ROWS_LOOPS)
#endif

void main() {
    int z = int(WORKGROUP_ID.z);
    int outer = z / inner_batches, inner = z - outer * inner_batches;
    base_a = offset_a + inner * batch_a + outer * outer_a;
    int m_end = M, depth = K;
    tile_row = TILE_ROW;
#if ROW_GROUPS
    // A workgroup has WY tiles, one below the other.
    int rows = TILE_ROWS * WY, tile = int(WORKGROUP_ID.y);
    if (!find_rows(tile, rows, LX * WY)) return;
    tile_row += group_row - tile * rows;
    m_end = group_end;
    depth = GROUP_DEPTH;
    base_b = offset_b + GROUP_OFFSET;
#else
    base_b = offset_b + inner * batch_b + outer * outer_b;
#endif
    tile_col = TILE_COL;
    tile_clear();
#if LONG_SUMS
    for (int start = 0; start < depth; start += FOLD) {
        tile_sum(start, min(start + FOLD, depth));
        tile_fold();
    }
#else
    tile_sum(0, depth);
#endif
    int base_o = offset_o + inner * batch_o + outer * outer_o;
    UNROLL for (int j = 0; j < TN4; j++) {
        vec4 bias = bias4(OUT_COL(j), N);
        UNROLL for (int i = 0; i < TM; i++) acc[i][j] = TILE_SUM(i, j) + bias;
    }
    // The code that stores is long, so that the rows of the tile take turns.
    ROLL for (int turn = 0; turn < TM; turn += TURN) {
        UNROLL for (int j = 0; j < TN4; j++) {
            int n = OUT_COL(j);
            UNROLL for (int i = 0; i < TURN; i++) {
                int m = OUT_ROW(turn + i);
                if (m < m_end && n < N) store4(acc[i][j], base_o + m * ldo + n, z, m, n, N);
            }
            UNROLL for (int i = TURN; i < TM; i++) acc[i - TURN][j] = acc[i][j];
        }
    }
}
