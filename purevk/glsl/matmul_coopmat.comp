#version 450
#extension GL_GOOGLE_include_directive : enable
#extension GL_KHR_cooperative_matrix : require
#extension GL_KHR_memory_scope_semantics : require
// out[b, m, n] = EPILOGUE(sum_k A[b, m, k] * B[b, k, n] + bias[n]): half operands, float sums, on matrix units of
// subgroup scope (VK_KHR_cooperative_matrix). Needs a compiler that knows GL_KHR_cooperative_matrix, and target vulkan1.3.
//
// Bindings and parameters 0 to 18: as matmul_tiled.comp (SPLIT_K too).
// Macros: matmul_io.glslh with T_A = T_B = float16_t, VEC4_A = VEC4_B = 1 (their conditions hold), B_TRANSPOSED.
//   TILE_M, TILE_N, TILE_K          of a workgroup (128, 128, 16)
//   SUBGROUP_M, SUBGROUP_N          of a subgroup (64, 64)
//   FRAGMENT_M, _N, _K              sizes of the matrix unit (16, 16, 16): one of the device's, half x half + float
//   SG                              subgroup size (32), which the pipeline must require
// Local size: SG * (TILE_M / SUBGROUP_M) * (TILE_N / SUBGROUP_N) = LOCAL; both tiles, TILE_M * TILE_K / 4 and
//   TILE_N * TILE_K / 4, are multiples of LOCAL, and LOCAL of TILE_K / 4.
// Grid: (ceil(N / TILE_N), ceil(M / TILE_M), batches), or batches * splits
#ifndef T_A
#define T_A float16_t
#endif
#ifndef T_B
#define T_B float16_t
#endif
#ifndef VEC4_A
#define VEC4_A 1
#endif
#ifndef VEC4_B
#define VEC4_B 1
#endif
#include "common.glslh"
#ifndef B_TRANSPOSED
#define B_TRANSPOSED 0
#endif
#ifndef TILE_M
#define TILE_M 128
#endif
#ifndef TILE_N
#define TILE_N 128
#endif
#ifndef TILE_K
#define TILE_K 16
#endif
#ifndef SUBGROUP_M
#define SUBGROUP_M 64
#endif
#ifndef SUBGROUP_N
#define SUBGROUP_N 64
#endif
#ifndef FRAGMENT_M
#define FRAGMENT_M 16
#endif
#ifndef FRAGMENT_N
#define FRAGMENT_N 16
#endif
#ifndef FRAGMENT_K
#define FRAGMENT_K 16
#endif
#ifndef SG
#define SG 32
#endif
#ifndef SPLIT_K
#define SPLIT_K 0
#endif
#define SUBGROUPS_N (TILE_N / SUBGROUP_N)
#define SUBGROUPS ((TILE_M / SUBGROUP_M) * SUBGROUPS_N)
#define LOCAL (SG * SUBGROUPS)
#define K4 (TILE_K / 4)
#define A_SLOTS (TILE_M * K4 / LOCAL)
#define B_SLOTS (TILE_N * K4 / LOCAL)
#define ROWS_OF_FRAGMENTS (SUBGROUP_M / FRAGMENT_M)
#define COLUMNS_OF_FRAGMENTS (SUBGROUP_N / FRAGMENT_N)

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
layout(local_size_x = LOCAL, local_size_y = 1, local_size_z = 1) in;

// Lines are 8 halves longer than they need be, so that neighbouring lines lie in different banks.
#define LINE_A (TILE_K + 8)
#if B_TRANSPOSED
#define LINE_B (TILE_K + 8)
shared float16_t tile_b[TILE_N * LINE_B];
#else
#define LINE_B (TILE_N + 8)
shared float16_t tile_b[TILE_K * LINE_B];
#endif
shared float16_t tile_a[TILE_M * LINE_A];
// Results pass through here, a fragment of each subgroup at a time, because which invocation holds an element is the
// device's affair.
shared float staged[SUBGROUPS * FRAGMENT_M * FRAGMENT_N];

f16vec4 next_a[A_SLOTS], next_b[B_SLOTS];
int base_a, base_b, row0, col0, k_last;

void fetch(int k0) {
    int id = int(gl_LocalInvocationIndex);
    UNROLL for (int s = 0; s < A_SLOTS; s++) {
        int i = id + s * LOCAL, m = row0 + i / K4, k = k0 + (i % K4) * 4;
        next_a[s] = f16vec4(0.0);
        if (m < M && k < k_last) next_a[s] = buf_a[(base_a + m * lda + k) >> 2];
    }
    UNROLL for (int s = 0; s < B_SLOTS; s++) {
        int i = id + s * LOCAL;
#if B_TRANSPOSED
        int n = col0 + i / K4, k = k0 + (i % K4) * 4, at = base_b + n * ldb + k;
#else
        int k = k0 + i / (TILE_N / 4), n = col0 + (i % (TILE_N / 4)) * 4, at = base_b + k * ldb + n;
#endif
        next_b[s] = f16vec4(0.0);
        if (n < N && k < k_last) next_b[s] = buf_b[at >> 2];
    }
}

void put() {
    int id = int(gl_LocalInvocationIndex);
    UNROLL for (int s = 0; s < A_SLOTS; s++) {
        int i = id + s * LOCAL, at = (i / K4) * LINE_A + (i % K4) * 4;
        UNROLL for (int c = 0; c < 4; c++) tile_a[at + c] = next_a[s][c];
    }
    UNROLL for (int s = 0; s < B_SLOTS; s++) {
        int i = id + s * LOCAL;
#if B_TRANSPOSED
        int at = (i / K4) * LINE_B + (i % K4) * 4;
#else
        int at = (i / (TILE_N / 4)) * LINE_B + (i % (TILE_N / 4)) * 4;
#endif
        UNROLL for (int c = 0; c < 4; c++) tile_b[at + c] = next_b[s][c];
    }
}

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
    base_a = offset_a + inner * batch_a + outer * outer_a;
    base_b = offset_b + inner * batch_b + outer * outer_b;
    row0 = int(gl_WorkGroupID.y) * TILE_M;
    col0 = int(gl_WorkGroupID.x) * TILE_N;
    int subgroup = int(gl_SubgroupID), sub_m = (subgroup / SUBGROUPS_N) * SUBGROUP_M;
    int sub_n = (subgroup % SUBGROUPS_N) * SUBGROUP_N;

    coopmat<float, gl_ScopeSubgroup, FRAGMENT_M, FRAGMENT_N, gl_MatrixUseAccumulator>
        acc[ROWS_OF_FRAGMENTS][COLUMNS_OF_FRAGMENTS];
    UNROLL for (int i = 0; i < ROWS_OF_FRAGMENTS; i++) {
        UNROLL for (int j = 0; j < COLUMNS_OF_FRAGMENTS; j++) {
            acc[i][j] = coopmat<float, gl_ScopeSubgroup, FRAGMENT_M, FRAGMENT_N, gl_MatrixUseAccumulator>(0.0);
        }
    }
    fetch(k_first);
    for (int k = k_first; k < k_last; k += TILE_K) {
        barrier();
        put();
        barrier();
        if (k + TILE_K < k_last) fetch(k + TILE_K);
        UNROLL for (int q = 0; q < TILE_K; q += FRAGMENT_K) {
            coopmat<float16_t, gl_ScopeSubgroup, FRAGMENT_M, FRAGMENT_K, gl_MatrixUseA> a[ROWS_OF_FRAGMENTS];
            UNROLL for (int i = 0; i < ROWS_OF_FRAGMENTS; i++) {
                coopMatLoad(a[i], tile_a, (sub_m + i * FRAGMENT_M) * LINE_A + q, LINE_A,
                            gl_CooperativeMatrixLayoutRowMajor);
            }
            UNROLL for (int j = 0; j < COLUMNS_OF_FRAGMENTS; j++) {
                coopmat<float16_t, gl_ScopeSubgroup, FRAGMENT_K, FRAGMENT_N, gl_MatrixUseB> b;
#if B_TRANSPOSED
                coopMatLoad(b, tile_b, (sub_n + j * FRAGMENT_N) * LINE_B + q, LINE_B,
                            gl_CooperativeMatrixLayoutColumnMajor);
#else
                coopMatLoad(b, tile_b, q * LINE_B + sub_n + j * FRAGMENT_N, LINE_B, gl_CooperativeMatrixLayoutRowMajor);
#endif
                UNROLL for (int i = 0; i < ROWS_OF_FRAGMENTS; i++) acc[i][j] = coopMatMulAdd(a[i], b, acc[i][j]);
            }
        }
    }
#if SPLIT_K
    int batches = int(gl_NumWorkGroups.z) / splits;
    int base_o = offset_o + (part * batches + batch) * M * N, pitch = N;
#else
    int base_o = offset_o + inner * batch_o + outer * outer_o, pitch = ldo;
#endif
    int lane = int(gl_SubgroupInvocationID), mine = subgroup * FRAGMENT_M * FRAGMENT_N;
    UNROLL for (int i = 0; i < ROWS_OF_FRAGMENTS; i++) {
        UNROLL for (int j = 0; j < COLUMNS_OF_FRAGMENTS; j++) {
            coopMatStore(acc[i][j], staged, mine, FRAGMENT_N, gl_CooperativeMatrixLayoutRowMajor);
            subgroupBarrier();
            for (int e = lane; e < FRAGMENT_M * FRAGMENT_N / 4; e += SG) {
                int r = e / (FRAGMENT_N / 4), c = (e % (FRAGMENT_N / 4)) * 4, at = mine + r * FRAGMENT_N + c;
                int m = row0 + sub_m + i * FRAGMENT_M + r, n = col0 + sub_n + j * FRAGMENT_N + c;
                vec4 v = vec4(staged[at], staged[at + 1], staged[at + 2], staged[at + 3]);
                if (m < M && n < N) store4(v + bias4(n, N), base_o + m * pitch + n, batch, m, n, N);
            }
            subgroupBarrier();
        }
    }
}
