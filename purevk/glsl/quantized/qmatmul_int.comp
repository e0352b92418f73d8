#version 450
#extension GL_GOOGLE_include_directive : enable
#if defined(COOPMAT) && COOPMAT
#extension GL_KHR_cooperative_matrix : require
#extension GL_KHR_memory_scope_semantics : require
#extension GL_EXT_shader_explicit_arithmetic_types_int8 : require
#endif
#pragma purevk precise
// Matmul of int8 activations with a quantized weight, with integer sums, by tiles: for many rows.
//
// Buffers, macros: qmatmul_io.glslh (ACT 1). Parameters: qmatmul_params.glslh. Tiles: qtile.glslh,
// or with FRAGMENTS 1 qtile_coopmat.glslh.
// The group, if GROUPED, is a multiple of 16. With FRAGMENTS 1, GROUPED is 0, K, lda and offset_a are
// multiples of 16, and ldw and offset_w of 16 values.
// Grid: (ceil(N / TILE_N), ceil(M / TILE_M))
#include "core/common.glslh"
#define ACT 1
#include "quantized/qtile_sizes.glslh"
#include "quantized/qmatmul_params.glslh"

int row_of_slot[A_SLOTS], k_now;

void a_row(int slot, int m) { row_of_slot[slot] = min(m, M - 1); }

void a_column(int k) { k_now = k; }

#if WIDE
ivec4 a_load(int slot) {
    return k_now < K ? ivec4(buf_a[(offset_a + row_of_slot[slot] * lda + k_now) >> 4]) : ivec4(0);
}
#else
ivec4 a_load(int slot) {
    int m = row_of_slot[slot];
    return ivec4(a_qvalues(m, k_now), a_qvalues(m, k_now + 4), a_qvalues(m, k_now + 8), a_qvalues(m, k_now + 12));
}
#endif

ivec4 b_load(int n, int k) {
    int row = offset_w + min(n, N - 1) * ldw, last = ldw - 1;
#if WIDE && BITS == 8
    return ivec4(buf_w[(row + min(k >> 2, last - 3)) >> 2]);
#elif WIDE
    uvec2 words = buf_w[(row + min(k >> 3, last - 1)) >> 1];
    return ivec4(qvalue_bytes(words.x), qvalue_bytes(words.x >> 16), qvalue_bytes(words.y), qvalue_bytes(words.y >> 16));
#elif BITS == 8
    int at = k >> 2;
    return ivec4(buf_w[row + min(at, last)], buf_w[row + min(at + 1, last)], buf_w[row + min(at + 2, last)],
                 buf_w[row + min(at + 3, last)]);
#else
    int at = k >> 3;
    uint low = buf_w[row + min(at, last)], high = buf_w[row + min(at + 1, last)];
    return ivec4(qvalue_bytes(low), qvalue_bytes(low >> 16), qvalue_bytes(high), qvalue_bytes(high >> 16));
#endif
}

#if GROUPED
vec4 group_end(ivec4 sum, int m, int n, int g) {
    int column = min(n, N - 1);
    return scale4(column, g) * vec4(sum - row_zero(min(m, M - 1)) * sum4(column, g));
}
#define RESULT4 vec4
#define FINISH(v, m, n) finish(v, m, n)
#else
#define RESULT4 ivec4
#define FINISH(v, m, n) finish_sums(v, m, n)
#endif

void put_result(RESULT4 v, int m, int n) {
    if (m < M && n < N) store4(FINISH(v, m, n), offset_o + m * ldo + n, m, n);
}

#if FRAGMENTS
#include "quantized/qtile_coopmat.glslh"
#else
#include "quantized/qtile.glslh"
#endif

LOOPS(loop(ceil(K, 16), 2))

void main() {
    int row0 = int(WORKGROUP_ID.y) * TILE_M, col0 = int(WORKGROUP_ID.x) * TILE_N;
    tile_multiply(row0, col0, K);
}
