#version 450
#extension GL_GOOGLE_include_directive : enable
// Depthwise 2-D convolution: one filter per channel, NHWC. One invocation makes PX neighbours along
// x, of 4 channels.
//
// Buffers: a (the input [B, H, W, C]), b (the weight [KH, KW, C]), bias [C] (if BIAS), out
//   [B, OH, OW, C], and what EXTRA_BUFFERS declares.
// Macros: those of matmul_io.glslh, and
//   PX  outputs per invocation (4)
//   WINDOW  1: each column of the window is read once instead of once per tap. Needs a dilation of
//     1 along x, and KW and the stride along x as specialization constants. (0)
//   ROLLED  how many loops over a large window are not unrolled: 1 (over y), or 2 (0)
//   LX  the local size (64)
//   VEC4_A, VEC4_B, VEC4_OUT  C, pixel_a, ldb, pixel_o and the offsets are multiples of 4
// The epilogue gets b = 0, m = output pixel (batch * OH + y) * OW + x, n = channel.
// Grid: (ceil(ceil(C / 4) * ceil(OW / PX) / LX), OH, batches)
#include "core/common.glslh"

PARAM(0, batches)
PARAM(1, H)
PARAM(2, W)
PARAM(3, C)
PARAM(4, OH)
PARAM(5, OW)
PARAM(6, pixel_a)  // elements from one input pixel to the next
PARAM(7, pixel_o)  // the same for out
PARAM(8, ldb)  // stride of the rows of the weight: C, or more if padded
PARAM(9, KH)
PARAM(10, KW)
PARAM(11, stride_y)
PARAM(12, stride_x)
PARAM(13, pad_y)  // padding before
PARAM(14, pad_x)
PARAM(15, dilation_y)
PARAM(16, dilation_x)
#undef PARAM_DEFAULT
#define PARAM_DEFAULT 0
PARAM(17, offset_a)  // of the input in its buffer
PARAM(18, offset_b)  // of the weight
PARAM(19, offset_o)  // of out
PARAM(20, offset_bias)  // of the bias

#ifndef PX
#define PX 4
#endif
#ifndef LX
#define LX 64
#endif
#ifndef WINDOW
#define WINDOW 0
#endif
#ifndef ROLLED
#define ROLLED 0
#endif
#include "matmul/matmul_io.glslh"

layout(local_size_x = LX, local_size_y = 1, local_size_z = 1) in;

vec4 load_a(int at, bool inside) {
    int from = inside ? at : 0;
#if VEC4_A
    vec4 v = READ4_A(from);
#else
    int last = offset_a + pixel_a * H * W * batches - 1;
    vec4 v = vec4(READ_A(from), READ_A(min(from + 1, last)), READ_A(min(from + 2, last)), READ_A(min(from + 3, last)));
#endif
    return inside ? v : vec4(0.0);
}

vec4 load_b(int tap, int c) {
#if VEC4_B
    return READ4_B(offset_b + tap * ldb + c);
#else
    int at = offset_b + tap * ldb, last = C - 1;
    return vec4(READ_B(at + c), READ_B(at + min(c + 1, last)), READ_B(at + min(c + 2, last)),
                READ_B(at + min(c + 3, last)));
#endif
}

#if ROLLED == 0
#define EACH_ROW UNROLL
#define EACH_TAP UNROLL
UNROLLED_CODE(KH * KW * PX)
#elif ROLLED == 1
#define EACH_ROW ROLL
#define EACH_TAP UNROLL
UNROLLED_CODE(KW * PX)
#else
#define EACH_ROW ROLL
#define EACH_TAP ROLL
UNROLLED_CODE(PX)
#endif
LOOPS(loop(KH, loop(KW)))
#if WINDOW && ROLLED < 2
const int COLUMNS = (PX - 1) * stride_x + KW;
#endif

void main() {
    int vectors = (C + 3) / 4, blocks = (OW + PX - 1) / PX;
    int i = int(INVOCATION_ID.x);
    int block = i / vectors;
    if (block >= blocks) return;
    int c = (i - block * vectors) * 4;
    int oy = int(WORKGROUP_ID.y), image = int(WORKGROUP_ID.z);
    int ox = block * PX;
    int y0 = oy * stride_y - pad_y, x0 = ox * stride_x - pad_x;
    int at0 = ((image * H + y0) * W + x0) * pixel_a + c + offset_a;
    vec4 acc[PX];
    UNROLL for (int p = 0; p < PX; p++) acc[p] = vec4(0.0);
    EACH_ROW for (int ky = 0; ky < KH; ky++) {
        int y = y0 + ky * dilation_y;
        bool row = y >= 0 && y < H;
        int at = at0 + ky * dilation_y * W * pixel_a;
#if WINDOW && ROLLED < 2
        vec4 a[COLUMNS];
        UNROLL for (int q = 0; q < COLUMNS; q++) a[q] = load_a(at + q * pixel_a, row && x0 + q >= 0 && x0 + q < W);
        EACH_TAP for (int kx = 0; kx < KW; kx++) {
            vec4 w = load_b(ky * KW + kx, c);
            UNROLL for (int p = 0; p < PX; p++) acc[p] += a[p * stride_x + kx] * w;
        }
#else
        EACH_TAP for (int kx = 0; kx < KW; kx++) {
            vec4 w = load_b(ky * KW + kx, c);
            UNROLL for (int p = 0; p < PX; p++) {
                int q = p * stride_x + kx * dilation_x;
                acc[p] += load_a(at + q * pixel_a, row && x0 + q >= 0 && x0 + q < W) * w;
            }
        }
#endif
    }
    vec4 bias = bias4(c, C);
    UNROLL for (int p = 0; p < PX; p++) {
        int x = ox + p;
        int m = (image * OH + oy) * OW + x;
        if (x < OW) store4(acc[p] + bias, offset_o + m * pixel_o + c, 0, m, c, C);
    }
}
