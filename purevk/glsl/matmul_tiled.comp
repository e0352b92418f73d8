#version 450
#extension GL_GOOGLE_include_directive : enable
// out[b, m, n] = EPILOGUE(sum_k A[b, m, k] * B[b, k, n] + bias[n]) in float, by tiles in shared memory: for GPUs.
//
// Bindings and parameters 0 to 16: as matmul.comp. With SPLIT_K also:
//   17 splits  18 K of one split, a multiple of TILE_K
// Macros: matmul_sizes.glslh (TILE_M, TILE_N, TILE_K, THREAD_M, THREAD_N, SLICES), matmul_io.glslh, B_TRANSPOSED;
//   VEC4_* need what they need in matmul.comp.
//   SPLIT_K 1: each split's sums go to out, float [splits, batches, M, N] from offset p15 on, without bias or
//   epilogue, for matmul_reduce.comp (set T_OUT float, VEC4_OUT by N % 4).
// Local size: (TILE_M / THREAD_M) * (TILE_N / THREAD_N) * SLICES.
// Grid: (ceil(N / TILE_N), ceil(M / TILE_M), batches), or batches * splits (z = batch * splits + split)
#include "common.glslh"
#include "matmul_sizes.glslh"

PARAM_0(M)
PARAM_1(N)
PARAM_2(K)
PARAM_3(lda)
PARAM_4(ldb)
PARAM_5(ldo)
PARAM_6(batch_a)
PARAM_7(batch_b)
PARAM_8(batch_o)
PARAM_9(inner_batches)
PARAM_10(outer_a)
PARAM_11(outer_b)
PARAM_12(outer_o)
#undef PARAM_DEFAULT
#define PARAM_DEFAULT 0
PARAM_13(offset_a)
PARAM_14(offset_b)
PARAM_15(offset_o)
PARAM_16(offset_bias)
#undef PARAM_DEFAULT
#define PARAM_DEFAULT 1
PARAM_17(splits)
PARAM_18(split_size)

#include "matmul_io.glslh"

int base_b, k_now, k_last;
int row_at[A_SLOTS];

void a_row(int slot, int m) {
    row_at[slot] += min(m, M - 1) * lda;
}

void a_column(int k) {
    k_now = k;
}

vec4 a_load(int slot) {
    vec4 v = vec4(0.0);
    int at = row_at[slot] + k_now;
#if VEC4_A
    if (k_now < k_last) v = READ4_A(at);
#else
    if (k_now < k_last) v.x = READ_A(at);
    if (k_now + 1 < k_last) v.y = READ_A(at + 1);
    if (k_now + 2 < k_last) v.z = READ_A(at + 2);
    if (k_now + 3 < k_last) v.w = READ_A(at + 3);
#endif
    return v;
}

vec4 load_b(int k, int n) {
    vec4 v = vec4(0.0);
    int at = base_b + k * ldb;
    if (k < k_last) {
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
    vec4 v = vec4(0.0);
    int at = base_b + min(n, N - 1) * ldb + k;
#if VEC4_B
    if (k < k_last) v = READ4_B(at);
#else
    if (k < k_last) v.x = READ_B(at);
    if (k + 1 < k_last) v.y = READ_B(at + 1);
    if (k + 2 < k_last) v.z = READ_B(at + 2);
    if (k + 3 < k_last) v.w = READ_B(at + 3);
#endif
    return v;
}

#include "matmul_shared.glslh"

void main() {
    int z = int(gl_WorkGroupID.z), k_first = 0;
    k_last = K;
#if SPLIT_K
    int batch = z / splits, part = z - batch * splits;
    k_first = part * split_size;
    k_last = min(K, k_first + split_size);
#else
    int batch = z;
#endif
    int outer = batch / inner_batches, inner = batch - outer * inner_batches;
    UNROLL for (int s = 0; s < A_SLOTS; s++) row_at[s] = offset_a + inner * batch_a + outer * outer_a;
    base_b = offset_b + inner * batch_b + outer * outer_b;
    int row0 = int(gl_WorkGroupID.y) * TILE_M, col0 = int(gl_WorkGroupID.x) * TILE_N;
    tile_multiply(row0, col0, k_first, k_last);
#if SPLIT_K
    int batches = int(gl_NumWorkGroups.z) / splits;
    int base_o = offset_o + (part * batches + batch) * M * N, pitch = N;
#else
    int base_o = offset_o + inner * batch_o + outer * outer_o, pitch = ldo;
#endif
    UNROLL for (int j = 0; j < OUT_COLUMNS; j++) {
        int n = col0 + OUT_COL(j);
        if (n >= N) continue;
        vec4 bias = bias4(n, N);
        UNROLL for (int i = 0; i < OUT_ROWS; i++) {
            int m = row0 + OUT_ROW(i, j);
            if (m < M) store4(OUT_VALUE(i, j) + bias, base_o + m * pitch + n, batch, m, n, N);
        }
    }
}
