#version 450
#extension GL_GOOGLE_include_directive : enable
// The second step of a matmul or convolution that was split along K: out = EPILOGUE(sum of the
// parts + bias).
//
// Buffers: a (the parts, float [batches, splits, M, N]), bias (if BIAS), out, and what EXTRA_BUFFERS
// declares.
// Macros: of matmul_io.glslh; VEC4_A (for the parts) needs N and offset_a that are multiples of 4.
//   LX: the local size (64).
// Grid: (ceil(M * ceil(N / 4) / LX), 1, batches)
#include "core/common.glslh"
#ifndef LX
#define LX 64
#endif
#define INPUTS 1

PARAM(0, M)
PARAM(1, N)
PARAM(2, splits)
PARAM(3, ldo)  // stride of the rows of out
PARAM(4, batch_o)  // stride of out from one batch to the next
PARAM(5, inner_batches)  // batch z is (z / inner_batches, z % inner_batches)
PARAM(6, outer_o)  // stride of out from one outer batch to the next
#undef PARAM_DEFAULT
#define PARAM_DEFAULT 0
PARAM(7, offset_a)  // of the parts in their buffer
PARAM(8, offset_o)  // of out
PARAM(9, offset_bias)  // of the bias

#include "matmul/matmul_io.glslh"
layout(local_size_x = LX, local_size_y = 1, local_size_z = 1) in;

vec4 load_part(int at, int n) {
#if VEC4_A
    return READ4_A(at + n);
#else
    int last = N - 1;
    return vec4(READ_A(at + min(n, last)), READ_A(at + min(n + 1, last)), READ_A(at + min(n + 2, last)),
                READ_A(at + min(n + 3, last)));
#endif
}

LOOPS(loop(splits))

void main() {
    int vectors = (N + 3) / 4, i = int(INVOCATION_ID.x);
    int m = i / vectors, n = (i - m * vectors) * 4;
    if (m >= M) return;
    int batch = int(WORKGROUP_ID.z);
    int outer = batch / inner_batches, inner = batch - outer * inner_batches;
    vec4 sum = vec4(0.0);
    for (int s = 0; s < splits; s++) sum += load_part(offset_a + ((batch * splits + s) * M + m) * N, n);
    store4(sum + bias4(n, N), offset_o + inner * batch_o + outer * outer_o + m * ldo + n, batch, m, n, N);
}
