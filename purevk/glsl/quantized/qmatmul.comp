#version 450
#extension GL_GOOGLE_include_directive : enable
#if defined(COOPMAT) && COOPMAT
#extension GL_KHR_cooperative_matrix : require
#extension GL_KHR_memory_scope_semantics : require
#endif
// Matmul of float activations with a quantized weight, by tiles in shared memory: for GPUs and many
// rows.
//
// Buffers, macros: qmatmul_io.glslh (ACT 0, REQUANT 0). Parameters: qmatmul_params.glslh. Tiles:
// matmul_sizes.glslh, with those of COOPMAT for float16 activations.
//   BACKWARD  1: out[m, k] = sum_n A[m, n] W[n, k] instead; A is [M, N], out [M, K]. There is no
//             bias and no epilogue.
// The group is a multiple of 4. On matrix cores there are no groups.
// Grid: (ceil(N / TILE_N), ceil(M / TILE_M)), or ceil(K / TILE_N) first
#include "core/common.glslh"
#include "matmul/matmul_sizes.glslh"
#ifndef BACKWARD
#define BACKWARD 0
#endif

#include "quantized/qmatmul_params.glslh"

int row_of_slot[A_SLOTS], k_now;

void a_row(int slot, int m) { row_of_slot[slot] = min(m, M - 1); }

void a_column(int k) { k_now = k; }

int tile_rows() { return M; }

// Values k .. k+3 of row n of W, with their scale. A half represents a quantized value exactly, but
// not a scaled one. So the sums are scaled on matrix cores.
#define SCALE_SUMS (COOPMAT && !GROUPED && !BACKWARD)
LOADED_VECTOR weights(int n, int k) {
#if SCALE_SUMS
    return LOADED_VECTOR(qvalues(word_at(offset_w + n * ldw, k)));
#endif
    int at = n * groups + min(k / group, groups - 1);
    vec4 v = qvalues(word_at(offset_w + n * ldw, k));
#if MINIMUM
    return LOADED_VECTOR((v + OFFSET) * float(buf_scale[at]) + float(buf_minimum[at]));
#else
    return LOADED_VECTOR(v * float(buf_scale[at]));
#endif
}

#if BACKWARD
#define B_TRANSPOSED 0

LOADED_VECTOR a_load(int slot) {
    LOADED_VECTOR v = LOADED_VECTOR(0.0);
    int at = offset_a + row_of_slot[slot] * lda + k_now;
#if VEC4_A
    if (k_now < N) v = LOADED_VECTOR(buf_a[at >> 2]);
#else
    if (k_now < N) v.x = LOADED(buf_a[at]);
    if (k_now + 1 < N) v.y = LOADED(buf_a[at + 1]);
    if (k_now + 2 < N) v.z = LOADED(buf_a[at + 2]);
    if (k_now + 3 < N) v.w = LOADED(buf_a[at + 3]);
#endif
    return v;
}

LOADED_VECTOR load_b(int n, int k) { return n < N && k < K ? weights(n, k) : LOADED_VECTOR(0.0); }

int tile_columns() { return K; }

vec4 tile_bias(int n) { return vec4(0.0); }

void tile_store(int m, int k, vec4 v) {
    int at = offset_o + m * ldo + k;
#if VEC4_OUT
    buf_out[at >> 2] = VEC4_OF(T_OUT)(v);
#else
    UNROLL for (int c = 0; c < 4; c++) {
        if (k + c < K) buf_out[at + c] = T_OUT(v[c]);
    }
#endif
}
#else
#define B_TRANSPOSED 1

LOADED_VECTOR a_load(int slot) { return LOADED_VECTOR(a_values(row_of_slot[slot], k_now)); }

LOADED_VECTOR load_bt(int n, int k) { return k < K ? weights(min(n, N - 1), k) : LOADED_VECTOR(0.0); }

int tile_columns() { return N; }

#if SCALE_SUMS
vec4 tile_bias(int n) { return vec4(0.0); }

void tile_store(int m, int n, vec4 v) { store4(v * scale4(n, 0) + bias4(n), offset_o + m * ldo + n, m, n); }
#else
vec4 tile_bias(int n) { return bias4(n); }

void tile_store(int m, int n, vec4 v) { store4(v, offset_o + m * ldo + n, m, n); }
#endif
#endif

vec4 tile_value(int m, int n, vec4 v) { return v; }

int tile_extras(int m, int n) { return 0; }

vec4 tile_value(int m, int n, vec4 v, int extras) { return v; }

#if COOPMAT
#include "matmul/matmul_coopmat.glslh"
#else
#include "matmul/matmul_shared.glslh"
#endif

LOOPS(loop(ceil(K, 16), 2))

void main() {
    tile_multiply(int(WORKGROUP_ID.y) * TILE_M, int(WORKGROUP_ID.x) * TILE_N, 0, BACKWARD == 1 ? N : K);
}
