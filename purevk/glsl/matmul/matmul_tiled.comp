#version 450
#extension GL_GOOGLE_include_directive : enable
#if defined(COOPMAT) && COOPMAT
#extension GL_KHR_cooperative_matrix : require
#extension GL_KHR_memory_scope_semantics : require
#if defined(BFLOAT16) && BFLOAT16
#extension GL_EXT_bfloat16 : require
#endif
#endif
// out[b, m, n] = EPILOGUE(sum_k A[b, m, k] * B[b, k, n] + bias[n]) in float, by tiles in shared
// memory: for GPUs.
//
// Buffers and parameters: as matmul.comp, and with SPLIT_K how K is split.
// Macros: those of matmul_sizes.glslh and matmul_io.glslh, and
//   B_TRANSPOSED, VEC4_*  as in matmul.comp
//   VEC8_A, VEC8_B  both or none, with COOPMAT: K and, without B_TRANSPOSED, N are multiples of 8
//   SPLIT_K  1: the sums of each split go to out, float [batches, splits, M, N] from offset_o on,
//     without bias or epilogue, for matmul_reduce.comp. T_OUT is float then, and VEC4_OUT follows
//     from N % 4.
// Local size: LOCAL of matmul_sizes.glslh.
//   ROW_GROUPS  as in matmul_groups.glslh: the rows of a tile choose B; not with SPLIT_K
// Grid: (ceil(N / TILE_N), ceil(M / TILE_M), batches), or batches * splits
//   (z = batch * splits + split); with ROW_GROUPS (ceil(N / TILE_N), tiles of rows, 1)
#include "core/common.glslh"
#include "matmul/matmul_sizes.glslh"

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
#if SPLIT_K
#undef PARAM_DEFAULT
#define PARAM_DEFAULT 1
PARAM(17, splits)
PARAM(18, split_size)  // K of one split, a multiple of TILE_K
#endif

#include "matmul/matmul_io.glslh"
#include "matmul/matmul_groups.glslh"

int base_b, base_o, pitch, batch, k_now, k_last;
int row_at[A_SLOTS];

void a_row(int slot, int m) {
    row_at[slot] += min(m, M - 1) * lda;
}

void a_column(int k) {
    k_now = k;
}

LOADED_VECTOR a_load(int slot) {
    LOADED_VECTOR v = LOADED_VECTOR(0.0);
    int at = row_at[slot] + k_now;
#if WIDTH == 8
    if (k_now < k_last) v = buf_a[at >> 3];
#elif VEC4_A
    if (k_now < k_last) v = LOADED_VECTOR(QUAD_A(at));
#else
    vec4 four = vec4(0.0);
    if (k_now < k_last) four.x = READ_A(at);
    if (k_now + 1 < k_last) four.y = READ_A(at + 1);
    if (k_now + 2 < k_last) four.z = READ_A(at + 2);
    if (k_now + 3 < k_last) four.w = READ_A(at + 3);
    v = LOADED_FROM(four);
#endif
    return v;
}

LOADED_VECTOR load_b(int k, int n) {
    LOADED_VECTOR v = LOADED_VECTOR(0.0);
    int at = base_b + k * ldb;
    if (k < k_last) {
#if WIDTH == 8
        v = buf_b[(at + min(n, N - 8)) >> 3];
#elif VEC4_B
        v = LOADED_VECTOR(QUAD_B(at + min(n, N - 4)));
#else
        int last = N - 1;
        v = LOADED_FROM(vec4(READ_B(at + min(n, last)), READ_B(at + min(n + 1, last)),
                             READ_B(at + min(n + 2, last)), READ_B(at + min(n + 3, last))));
#endif
    }
    return v;
}

LOADED_VECTOR load_bt(int n, int k) {
    LOADED_VECTOR v = LOADED_VECTOR(0.0);
    int at = base_b + min(n, N - 1) * ldb + k;
#if WIDTH == 8
    if (k < k_last) v = buf_b[at >> 3];
#elif VEC4_B
    if (k < k_last) v = LOADED_VECTOR(QUAD_B(at));
#else
    vec4 four = vec4(0.0);
    if (k < k_last) four.x = READ_B(at);
    if (k + 1 < k_last) four.y = READ_B(at + 1);
    if (k + 2 < k_last) four.z = READ_B(at + 2);
    if (k + 3 < k_last) four.w = READ_B(at + 3);
    v = LOADED_FROM(four);
#endif
    return v;
}

int tile_rows() {
#if ROW_GROUPS
    return group_end;
#else
    return M;
#endif
}

int tile_columns() {
    return N;
}

vec4 tile_bias(int n) {
    return bias4(n, N);
}

vec4 tile_value(int m, int n, vec4 v) {
    return value4(v, batch, m, n);
}

EXTRAS tile_extras(int m, int n) {
    return extras4(batch, m, n);
}

vec4 tile_value(int m, int n, vec4 v, EXTRAS e) {
    return value4(v, e, batch, m, n);
}

void tile_store(int m, int n, vec4 v) {
    put4(v, base_o + m * pitch + n, batch, m, n, N);
}

#if COOPMAT
#include "matmul/matmul_coopmat.glslh"
#else
#include "matmul/matmul_shared.glslh"
#endif

#if SPLIT_K
LOOPS(loop(ceil(split_size, TILE_K)))
#else
LOOPS(loop(ceil(K, TILE_K)))
#endif
LOOPS(FIND_ROWS_LOOPS)

void main() {
    int z = int(WORKGROUP_ID.z), k_first = 0, row0 = int(WORKGROUP_ID.y) * TILE_M;
#if ROW_GROUPS
    if (!find_rows(int(WORKGROUP_ID.y), TILE_M, LOCAL)) return;
    row0 = group_row;
#endif
    k_last = GROUP_DEPTH;
#if SPLIT_K
    batch = z / splits;
    int part = z - batch * splits;
    k_first = part * split_size;
    k_last = min(K, k_first + split_size);
#else
    batch = z;
#endif
    int outer = batch / inner_batches, inner = batch - outer * inner_batches;
    UNROLL for (int s = 0; s < A_SLOTS; s++) row_at[s] = offset_a + inner * batch_a + outer * outer_a;
#if ROW_GROUPS
    base_b = offset_b + GROUP_OFFSET;
#else
    base_b = offset_b + inner * batch_b + outer * outer_b;
#endif
#if SPLIT_K
    base_o = offset_o + z * M * N;
    pitch = N;
#else
    base_o = offset_o + inner * batch_o + outer * outer_o;
    pitch = ldo;
#endif
    tile_multiply(row0, int(WORKGROUP_ID.x) * TILE_N, k_first, k_last);
}
