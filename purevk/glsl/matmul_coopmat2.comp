#version 450
#extension GL_GOOGLE_include_directive : enable
#extension GL_KHR_cooperative_matrix : require
#extension GL_KHR_memory_scope_semantics : require
#extension GL_NV_cooperative_matrix2 : require
// out[b, m, n] = EPILOGUE(sum_k A[b, m, k] * B[b, k, n] + bias[n]): half operands, float sums, on matrix units of
// workgroup scope (VK_NV_cooperative_matrix2: workgroup scope, flexible sizes, per-element operations, tensor
// addressing). Needs a compiler that knows GL_NV_cooperative_matrix2, and target vulkan1.3.
//
// Bindings and parameters 0 to 16: as matmul.comp; no condition on sizes or strides.
// Macros: matmul_io.glslh with T_A = T_B = float16_t and VEC4_* 0, B_TRANSPOSED; EPILOGUE only (EPILOGUE4 is not used).
//   TILE_M, TILE_N, TILE_K of a workgroup (128, 128, 64) and LOCAL, its size (256): multiples of the device's
//   granularity
// Grid: (ceil(N / TILE_N), ceil(M / TILE_M), batches)
#ifndef T_A
#define T_A float16_t
#endif
#ifndef T_B
#define T_B float16_t
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
#define TILE_K 64
#endif
#ifndef LOCAL
#define LOCAL 256
#endif

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

#include "matmul_io.glslh"
layout(local_size_x = LOCAL, local_size_y = 1, local_size_z = 1) in;

// The value to store from the sum at row r, column c of the tile.
float finish(const in uint r, const in uint c, const in float sum, const in int row0, const in int col0,
             const in int b) {
    int m = row0 + int(r), n = col0 + int(c);
    float v = sum;
#if BIAS
    v += READ_BIAS(offset_bias + min(n, N - 1));
#endif
    return EPILOGUE(v, b, m, n);
}

void main() {
    int batch = int(gl_WorkGroupID.z), outer = batch / inner_batches, inner = batch - outer * inner_batches;
    int row0 = int(gl_WorkGroupID.y) * TILE_M, col0 = int(gl_WorkGroupID.x) * TILE_N;
    tensorLayoutNV<2, gl_CooperativeMatrixClampModeConstantNV> layout_a =
        createTensorLayoutNV(2, gl_CooperativeMatrixClampModeConstantNV);
    tensorLayoutNV<2, gl_CooperativeMatrixClampModeConstantNV> layout_b =
        createTensorLayoutNV(2, gl_CooperativeMatrixClampModeConstantNV);
    tensorLayoutNV<2, gl_CooperativeMatrixClampModeConstantNV> layout_o =
        createTensorLayoutNV(2, gl_CooperativeMatrixClampModeConstantNV);
    layout_a = setTensorLayoutStrideNV(setTensorLayoutDimensionNV(layout_a, M, K), lda, 1);
#if B_TRANSPOSED
    layout_b = setTensorLayoutStrideNV(setTensorLayoutDimensionNV(layout_b, N, K), ldb, 1);
    tensorViewNV<2, false, 1, 0> turned = createTensorViewNV(2, false, 1, 0);
#else
    layout_b = setTensorLayoutStrideNV(setTensorLayoutDimensionNV(layout_b, K, N), ldb, 1);
#endif
    layout_o = setTensorLayoutStrideNV(setTensorLayoutDimensionNV(layout_o, M, N), ldo, 1);
    int base_a = offset_a + inner * batch_a + outer * outer_a;
    int base_b = offset_b + inner * batch_b + outer * outer_b;
    int base_o = offset_o + inner * batch_o + outer * outer_o;

    coopmat<float, gl_ScopeWorkgroup, TILE_M, TILE_N, gl_MatrixUseAccumulator> acc =
        coopmat<float, gl_ScopeWorkgroup, TILE_M, TILE_N, gl_MatrixUseAccumulator>(0.0);
    for (int k = 0; k < K; k += TILE_K) {
        coopmat<float16_t, gl_ScopeWorkgroup, TILE_M, TILE_K, gl_MatrixUseA> a;
        coopmat<float16_t, gl_ScopeWorkgroup, TILE_K, TILE_N, gl_MatrixUseB> b;
        coopMatLoadTensorNV(a, buf_a, base_a, sliceTensorLayoutNV(layout_a, row0, TILE_M, k, TILE_K));
#if B_TRANSPOSED
        coopMatLoadTensorNV(b, buf_b, base_b, sliceTensorLayoutNV(layout_b, col0, TILE_N, k, TILE_K), turned);
#else
        coopMatLoadTensorNV(b, buf_b, base_b, sliceTensorLayoutNV(layout_b, k, TILE_K, col0, TILE_N));
#endif
        acc = coopMatMulAdd(a, b, acc);
    }
    coopMatPerElementNV(acc, acc, finish, row0, col0, batch);
    coopmat<T_OUT, gl_ScopeWorkgroup, TILE_M, TILE_N, gl_MatrixUseAccumulator> result =
        coopmat<T_OUT, gl_ScopeWorkgroup, TILE_M, TILE_N, gl_MatrixUseAccumulator>(acc);
    coopMatStoreTensorNV(result, buf_out, base_o, sliceTensorLayoutNV(layout_o, row0, TILE_M, col0, TILE_N));
}
