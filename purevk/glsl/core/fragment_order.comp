#version 450
#extension GL_GOOGLE_include_directive : enable
#ifndef COOPMAT
#define COOPMAT 0
#endif
#if COOPMAT
#extension GL_KHR_cooperative_matrix : require
#extension GL_KHR_memory_scope_semantics : require
#if defined(BFLOAT16) && BFLOAT16
#extension GL_EXT_bfloat16 : require
#endif
#endif
// Tests whether a device has the order of elements in fragments.glslh. Multiplies A, 16 x 16, by B,
// 16 x FRAGMENT_N. Fills A, and B of 8 columns, and stores the sums element by element, in this order.
// `out` is A B only if the device has it. B of 16 columns is loaded.
//
// COOPMAT  1: by cooperative matrices; 0: step by step, for comparison
// BFLOAT16  with COOPMAT, 1: of bfloat16 (0: of float16)
// FRAGMENT_N  8 or 16 (8)
//
// Buffer: out, float [16, FRAGMENT_N]. A[m][k] = (7 m + 13 k) % 17 - 8,
// B[k][n] = (5 k + 11 n) % 19 - 9.
// Grid: (1). The subgroup has 32 invocations.
#ifndef BFLOAT16
#define BFLOAT16 0
#endif
#if BFLOAT16
#define HALF bfloat16_t
#define PACK(v) (floatBitsToUint((v).x) >> 16 | floatBitsToUint((v).y))
#else
#define HALF float16_t
#define PACK(v) packHalf2x16(v)
#endif
#include "core/common.glslh"
#include "core/fragments.glslh"

layout(local_size_x = 32, local_size_y = 1, local_size_z = 1) in;
WRITEONLY_BUFFER(0, out, float)

float a_at(int m, int k) { return float((7 * m + 13 * k) % 17 - 8); }
float b_at(int k, int n) { return float((5 * k + 11 * n) % 19 - 9); }

#if COOPMAT && FRAGMENT_N == 16
shared uint tile[128];  // B, two neighbours of a row in each
#endif

void main() {
    int lane = int(gl_LocalInvocationIndex);
#if COOPMAT
    coopmat<HALF, gl_ScopeSubgroup, 16, FRAGMENT_N, gl_MatrixUseB> b;
#if FRAGMENT_N == 16
    for (int i = lane; i < 128; i += 32) tile[i] = PACK(vec2(b_at(i / 8, i % 8 * 2), b_at(i / 8, i % 8 * 2 + 1)));
    barrier();
    coopMatLoad(b, tile, 0, 8, gl_CooperativeMatrixLayoutRowMajor);
#else
    UNROLL for (int i = 0; i < 4; i++) b[i] = HALF(b_at(B_ROW(lane, i), B_COLUMN(lane)));
#endif
    coopmat<HALF, gl_ScopeSubgroup, 16, 16, gl_MatrixUseA> a;
    UNROLL for (int i = 0; i < 4; i++) {
        a[2 * i] = HALF(a_at(A_ROW(lane, i), A_COLUMN(lane, i)));
        a[2 * i + 1] = HALF(a_at(A_ROW(lane, i), A_COLUMN(lane, i) + 1));
    }
    coopmat<float, gl_ScopeSubgroup, 16, FRAGMENT_N, gl_MatrixUseAccumulator> sums =
        coopmat<float, gl_ScopeSubgroup, 16, FRAGMENT_N, gl_MatrixUseAccumulator>(0.0);
    sums = coopMatMulAdd(a, b, sums);
#endif
    UNROLL for (int i = 0; i < FRAGMENT_N / 2; i++) {
        int m = SUM_ROW(lane, i), n = SUM_COLUMN(lane, i);
#if COOPMAT
        bool fits = a.length() == 8 && sums.length() == FRAGMENT_N / 2 && (FRAGMENT_N == 16 || b.length() == 4);
        float sum = fits ? sums[i] : 0.0;
#else
        float sum = 0.0;
        for (int k = 0; k < 16; k++) sum += a_at(m, k) * b_at(k, n);
#endif
        buf_out[m * FRAGMENT_N + n] = sum;
    }
}
