#version 450
#extension GL_GOOGLE_include_directive : enable
// The product of float activations with a quantized weight, by tiles in shared memory: for GPUs and many rows.
//
// Bindings, macros: qmatmul_io.glslh (ACT 0, REQUANT 0). Parameters: qmatmul_params.glslh. Tiles: matmul_shared.glslh.
//   BACKWARD 1: out[m, k] = sum_n A[m, n] W[n, k] instead; A is [M, N], out [M, K]. There is no bias and no epilogue.
// The group is a multiple of 4.
// Grid: (ceil(N / TILE_N), ceil(M / TILE_M)), or ceil(K / TILE_N) first
#include "common.glslh"
#include "matmul_sizes.glslh"
#ifndef BACKWARD
#define BACKWARD 0
#endif

#include "qmatmul_params.glslh"

int row_of_slot[A_SLOTS], k_now;

void a_row(int slot, int m) { row_of_slot[slot] = min(m, M - 1); }

void a_column(int k) { k_now = k; }

// Codes k .. k+3 of row n of W times their scale.
vec4 weights(int n, int k) {
    return codes(word_at(offset_w + n * ldw, k)) * float(buf_scale[n * groups + k / group]);
}

#if BACKWARD
#define COLUMNS K
#define DEPTH N
#define B_TRANSPOSED 0

vec4 a_load(int slot) {
    vec4 v = vec4(0.0);
    int at = offset_a + row_of_slot[slot] * lda + k_now;
#if VEC4_A
    if (k_now < N) v = vec4(buf_a[at >> 2]);
#else
    if (k_now < N) v.x = float(buf_a[at]);
    if (k_now + 1 < N) v.y = float(buf_a[at + 1]);
    if (k_now + 2 < N) v.z = float(buf_a[at + 2]);
    if (k_now + 3 < N) v.w = float(buf_a[at + 3]);
#endif
    return v;
}

vec4 load_b(int n, int k) { return n < N && k < K ? weights(n, k) : vec4(0.0); }
#else
#define COLUMNS N
#define DEPTH K
#define B_TRANSPOSED 1

vec4 a_load(int slot) { return a_values(row_of_slot[slot], k_now); }

vec4 load_bt(int n, int k) { return k < K ? weights(min(n, N - 1), k) : vec4(0.0); }
#endif

#include "matmul_shared.glslh"

void main() {
    int row0 = int(gl_WorkGroupID.y) * TILE_M, col0 = int(gl_WorkGroupID.x) * TILE_N;
    tile_multiply(row0, col0, 0, DEPTH);
    UNROLL for (int j = 0; j < OUT_COLUMNS; j++) {
        int n = col0 + OUT_COL(j);
        if (n >= COLUMNS) continue;
        UNROLL for (int i = 0; i < OUT_ROWS; i++) {
            int m = row0 + OUT_ROW(i, j), at = offset_o + m * ldo + n;
            if (m >= M) continue;
#if BACKWARD
            vec4 v = OUT_VALUE(i, j);
#if VEC4_OUT
            buf_out[at >> 2] = VEC4_OF(T_OUT)(v);
#else
            UNROLL for (int c = 0; c < 4; c++) {
                if (n + c < K) buf_out[at + c] = T_OUT(v[c]);
            }
#endif
#else
            store4(finish(OUT_VALUE(i, j), m, n), at, m, n);
#endif
        }
    }
}
