#version 450
#extension GL_GOOGLE_include_directive : enable
#pragma purevk precise
// Matmul of int8 activations with a quantized weight, with integer sums, by tiles: for many rows.
//
// Buffers, macros: qmatmul_io.glslh (ACT 1). Parameters: qmatmul_params.glslh. Tiles: qtile.glslh.
// The group, if GROUPED, is a multiple of 16.
// Grid: (ceil(N / TILE_N), ceil(M / TILE_M))
#include "core/common.glslh"
#define ACT 1
#include "quantized/qtile_sizes.glslh"
#include "quantized/qmatmul_params.glslh"

int row_of_slot[A_SLOTS], k_now;

void a_row(int slot, int m) { row_of_slot[slot] = min(m, M - 1); }

void a_column(int k) { k_now = k; }

ivec4 a_load(int slot) {
    int m = row_of_slot[slot];
    return ivec4(a_qvalues(m, k_now), a_qvalues(m, k_now + 4), a_qvalues(m, k_now + 8), a_qvalues(m, k_now + 12));
}

ivec4 b_load(int n, int k) {
    int row = offset_w + min(n, N - 1) * ldw, last = ldw - 1;
#if BITS == 8
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
#endif

#include "quantized/qtile.glslh"

void main() {
    int row0 = int(gl_WorkGroupID.y) * TILE_M, col0 = int(gl_WorkGroupID.x) * TILE_N;
    tile_multiply(row0, col0, K);
    UNROLL for (int j = 0; j < THREAD_N / 4; j++) {
        UNROLL for (int i = 0; i < THREAD_M; i++) {
            int m = row0 + OUT_ROW(i), n = col0 + OUT_COL(j);
            if (m < M && n < N) {
#if GROUPED
                vec4 v = finish(total[i][j], m, n);
#else
                vec4 v = finish_sums(acc[i][j], m, n);
#endif
                store4(v, offset_o + m * ldo + n, m, n);
            }
        }
    }
}
