#version 450
#extension GL_GOOGLE_include_directive : enable
#ifndef COOPMAT
#define COOPMAT 0
#endif
#ifndef BFLOAT16
#define BFLOAT16 0
#endif
#ifndef BYTES
#define BYTES 0
#endif
#if COOPMAT
#extension GL_KHR_cooperative_matrix : require
#extension GL_KHR_memory_scope_semantics : require
#if BFLOAT16
#extension GL_EXT_bfloat16 : require
#endif
#if BYTES
#extension GL_EXT_shader_explicit_arithmetic_types_int8 : require
#endif
#endif
// Tests whether a device has the order of elements in fragments.glslh. Multiplies A, 16 x DEPTH, by B,
// DEPTH x FRAGMENT_N. Fills A and B and stores the sums element by element, in this order. `out` is
// A B only if the device has it. Operands of bytes are loaded.
//
// COOPMAT  1: by cooperative matrices; 0: step by step, for comparison
// BFLOAT16  with COOPMAT, 1: of bfloat16 (0: of float16)
// BYTES  with COOPMAT, 1: of int8, with int sums, and DEPTH 32 (0: DEPTH 16)
// FRAGMENT_N  8 or 16 (8)
//
// Buffer: out, float [16, FRAGMENT_N]. A[m][k] = (7 m + 13 k) % 17 - 8,
// B[k][n] = (5 k + 11 n) % 19 - 9.
// Grid: (1). The subgroup has 32 invocations.
#include "core/common.glslh"
#include "core/fragments.glslh"
#if BYTES
#define DEPTH 32
#define ELEMENT int8_t
#define SUM int
#elif BFLOAT16
#define DEPTH 16
#define ELEMENT bfloat16_t
#define SUM float
#else
#define DEPTH 16
#define ELEMENT float16_t
#define SUM float
#endif

layout(local_size_x = 32, local_size_y = 1, local_size_z = 1) in;
WRITEONLY_BUFFER(0, out, float)

float a_at(int m, int k) { return float((7 * m + 13 * k) % 17 - 8); }
float b_at(int k, int n) { return float((5 * k + 11 * n) % 19 - 9); }

#if COOPMAT && BYTES
shared uint tile_a[16 * DEPTH / 4], tile_b[DEPTH * FRAGMENT_N / 4];

// Neighbours of a row as a word.
uint packed(vec4 v) {
    ivec4 i = ivec4(v) & 0xff;
    return uint(i.x | i.y << 8 | i.z << 16 | i.w << 24);
}

void fill_tiles(int lane) {
    for (int i = lane; i < 16 * DEPTH / 4; i += 32) {
        int m = i * 4 / DEPTH, k = i * 4 % DEPTH;
        tile_a[i] = packed(vec4(a_at(m, k), a_at(m, k + 1), a_at(m, k + 2), a_at(m, k + 3)));
    }
    for (int i = lane; i < DEPTH * FRAGMENT_N / 4; i += 32) {
        int k = i * 4 / FRAGMENT_N, n = i * 4 % FRAGMENT_N;
        tile_b[i] = packed(vec4(b_at(k, n), b_at(k, n + 1), b_at(k, n + 2), b_at(k, n + 3)));
    }
    barrier();
}
#endif

LOOPS(4 * DEPTH + 4 * loop(DEPTH * FRAGMENT_N))

void main() {
    int lane = int(gl_LocalInvocationIndex);
#if COOPMAT
    coopmat<ELEMENT, gl_ScopeSubgroup, 16, DEPTH, gl_MatrixUseA> a;
    coopmat<ELEMENT, gl_ScopeSubgroup, DEPTH, FRAGMENT_N, gl_MatrixUseB> b;
#if BYTES
    fill_tiles(lane);
    coopMatLoad(a, tile_a, 0, DEPTH / 4, gl_CooperativeMatrixLayoutRowMajor);
    bool fits = true;
#else
    UNROLL for (int i = 0; i < 4; i++) {
        a[2 * i] = ELEMENT(a_at(A_ROW(lane, i), A_COLUMN(lane, i)));
        a[2 * i + 1] = ELEMENT(a_at(A_ROW(lane, i), A_COLUMN(lane, i) + 1));
    }
    bool fits = a.length() == 8;
#endif
#if BYTES
    coopMatLoad(b, tile_b, 0, FRAGMENT_N / 4, gl_CooperativeMatrixLayoutRowMajor);
#else
    UNROLL for (int i = 0; i < FRAGMENT_N / 2; i++) b[i] = ELEMENT(b_at(B_ROW(lane, i), B_COLUMN(lane, i)));
    fits = fits && b.length() == FRAGMENT_N / 2;
#endif
    coopmat<SUM, gl_ScopeSubgroup, 16, FRAGMENT_N, gl_MatrixUseAccumulator> sums =
        coopmat<SUM, gl_ScopeSubgroup, 16, FRAGMENT_N, gl_MatrixUseAccumulator>(0);
    sums = coopMatMulAdd(a, b, sums);
    fits = fits && sums.length() == FRAGMENT_N / 2;
#endif
    UNROLL for (int i = 0; i < FRAGMENT_N / 2; i++) {
        int m = SUM_ROW(lane, i), n = SUM_COLUMN(lane, i);
#if COOPMAT
        float sum = fits ? float(sums[i]) : 0.0;
#else
        float sum = 0.0;
        for (int k = 0; k < DEPTH; k++) sum += a_at(m, k) * b_at(k, n);
#endif
        buf_out[m * FRAGMENT_N + n] = sum;
    }
}
