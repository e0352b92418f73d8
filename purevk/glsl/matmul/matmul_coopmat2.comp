#version 450
#extension GL_GOOGLE_include_directive : enable
#ifndef COOPMAT
#define COOPMAT 0
#endif
#if COOPMAT
#extension GL_KHR_cooperative_matrix : require
#extension GL_KHR_memory_scope_semantics : require
#extension GL_NV_cooperative_matrix2 : require
#if defined(BFLOAT16) && BFLOAT16
#extension GL_EXT_bfloat16 : require
#endif
#endif
// out[b, m, n] = EPILOGUE(sum_k A[b, m, k] * B[b, k, n] + bias[n]) of 16 bits with float sums, by
// cooperative matrices of a workgroup, which the driver distributes and stages itself
// (VK_NV_cooperative_matrix2).
//
// Buffers and parameters: as matmul_tiled.comp. M and N are at least those of a tile, K is a multiple
// of TILE_K, and N, the offsets, the strides of rows and the steps between batches are multiples of
// 8. With tests of bounds, which these conditions spare, it takes twice the time.
// Macros: those of matmul_io.glslh, with VEC4_* 0, and
//   TILE_M, TILE_N, TILE_K  the result of a workgroup, and the step along K (128, 128, 64)
//   LOCAL  invocations of a workgroup (256)
//   B_TRANSPOSED, SPLIT_K  as in matmul_tiled.comp
//   BFLOAT16  with COOPMAT, 1: A and B are bfloat16: T_A and T_B, and T_OUT if it is too, are
//     bfloat16_t (0: float16_t)
//   COOPMAT  0: the same element by element, for tests on devices without matrix cores
// Grid: as matmul_tiled.comp
#include "core/common.glslh"
#ifndef BFLOAT16
#define BFLOAT16 0
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
#ifndef B_TRANSPOSED
#define B_TRANSPOSED 0
#endif
#ifndef SPLIT_K
#define SPLIT_K 0
#endif

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
layout(local_size_x = LOCAL, local_size_y = 1, local_size_z = 1) in;

#define EIGHTS(size) (uint(size) / 8u * 8u)  // tells the compiler that it is a multiple of 8

// The value to store for a sum.
float finish(float sum, int b, int m, int n) {
#if BIAS && BIAS_OF_ROWS
    sum += READ_BIAS(offset_bias + m);
#elif BIAS
    sum += READ_BIAS(offset_bias + n);
#endif
    return EPILOGUE(sum, b, m, n);
}

#if COOPMAT
#define MATRIX(T, rows, columns, use) coopmat<T, gl_ScopeWorkgroup, rows, columns, gl_MatrixUse##use>

float finish_element(const in uint row, const in uint column, const in float sum, const in int b,
                     const in int row0, const in int column0) {
    int m = row0 + int(row), n = column0 + int(column);
    float value = ROUNDED(T_OUT, finish(sum, b, m, n));
#ifdef ELEMENT
    buf_out[offset_o + ELEMENT(b, m, n)] = T_OUT(value);
#endif
    return value;
}
#endif

#if SPLIT_K
#define DEPTH split_size
#else
#define DEPTH K
#endif
#if COOPMAT
LOOPS(loop(ceil(DEPTH, TILE_K)))
#else
LOOPS(loop(ceil(TILE_M * TILE_N, LOCAL), loop(DEPTH)))
#endif

void main() {
    int z = int(WORKGROUP_ID.z), k_first = 0, k_last = K;
    // Tiles at the lower and right end overlap their neighbours, with the same results. The compiler
    // reads and writes single elements of rows whose start it does not know to be aligned: it is not
    // to see the minimum where there is none.
    int row0 = int(WORKGROUP_ID.y) * TILE_M, column0 = int(WORKGROUP_ID.x) * TILE_N;
    if (M % TILE_M != 0) row0 = min(row0, M - TILE_M);
    if (N % TILE_N != 0) column0 = int(EIGHTS(min(column0, N - TILE_N)));
#if SPLIT_K
    int batch = z / splits, part = z - batch * splits;
    k_first = part * split_size;
    k_last = min(K, k_first + split_size);
#else
    int batch = z;
#endif
    int outer = batch / inner_batches, inner = batch - outer * inner_batches;
    uint base_a = EIGHTS(offset_a + inner * batch_a + outer * outer_a);
    uint base_b = EIGHTS(offset_b + inner * batch_b + outer * outer_b);
#if SPLIT_K
    uint base_o = uint(offset_o + z * M * N), pitch = uint(N);
#else
    uint base_o = uint(offset_o + inner * batch_o + outer * outer_o), pitch = uint(ldo);
#endif

#if COOPMAT
    tensorLayoutNV<2> layout_a = createTensorLayoutNV(2), layout_b = createTensorLayoutNV(2);
    layout_a = setTensorLayoutStrideNV(setTensorLayoutDimensionNV(layout_a, M, k_last), EIGHTS(lda), 1);
#if B_TRANSPOSED
    tensorViewNV<2, false, 1, 0> turned = createTensorViewNV(2, false, 1, 0);
    layout_b = setTensorLayoutStrideNV(setTensorLayoutDimensionNV(layout_b, N, k_last), EIGHTS(ldb), 1);
#else
    layout_b = setTensorLayoutStrideNV(setTensorLayoutDimensionNV(layout_b, k_last, N), EIGHTS(ldb), 1);
#endif
    MATRIX(float, TILE_M, TILE_N, Accumulator) sums = MATRIX(float, TILE_M, TILE_N, Accumulator)(0.0);
    for (int k = k_first; k < k_last; k += TILE_K) {
        MATRIX(T_A, TILE_M, TILE_K, A) a;
        MATRIX(T_B, TILE_K, TILE_N, B) b;
        coopMatLoadTensorNV(a, buf_a, base_a, sliceTensorLayoutNV(layout_a, row0, TILE_M, k, TILE_K));
#if B_TRANSPOSED
        coopMatLoadTensorNV(b, buf_b, base_b, sliceTensorLayoutNV(layout_b, column0, TILE_N, k, TILE_K), turned);
#else
        coopMatLoadTensorNV(b, buf_b, base_b, sliceTensorLayoutNV(layout_b, k, TILE_K, column0, TILE_N));
#endif
        sums = coopMatMulAdd(a, b, sums);
    }
#if !SPLIT_K
    coopMatPerElementNV(sums, sums, finish_element, batch, row0, column0);
#endif
#if SPLIT_K || !defined(ELEMENT)
    MATRIX(T_OUT, TILE_M, TILE_N, Accumulator) made = MATRIX(T_OUT, TILE_M, TILE_N, Accumulator)(sums);
    tensorLayoutNV<2> layout_o = createTensorLayoutNV(2);
    layout_o = setTensorLayoutStrideNV(setTensorLayoutDimensionNV(layout_o, M, N), EIGHTS(pitch), 1);
    coopMatStoreTensorNV(made, buf_out, EIGHTS(base_o), sliceTensorLayoutNV(layout_o, row0, TILE_M, column0, TILE_N));
#endif
#else
    for (int e = int(gl_LocalInvocationIndex); e < TILE_M * TILE_N; e += LOCAL) {
        int m = row0 + e / TILE_N, n = column0 + e % TILE_N;
        float sum = 0.0;
        for (int k = k_first; k < k_last; k++) {
#if B_TRANSPOSED
            float b = READ_B(int(base_b) + n * ldb + k);
#else
            float b = READ_B(int(base_b) + k * ldb + n);
#endif
            sum += READ_A(int(base_a) + m * lda + k) * b;
        }
#if SPLIT_K
        buf_out[int(base_o) + m * N + n] = ELEMENT_OF(T_OUT, sum);
#elif defined(ELEMENT)
        buf_out[offset_o + ELEMENT(batch, m, n)] = ELEMENT_OF(T_OUT, finish(sum, batch, m, n));
#else
        buf_out[int(base_o) + m * int(pitch) + n] = ELEMENT_OF(T_OUT, finish(sum, batch, m, n));
#endif
    }
#endif
}
