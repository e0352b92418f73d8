#version 450
#extension GL_GOOGLE_include_directive : enable
#pragma purevk precise
// Depthwise 2-D convolution of int8 images. An invocation computes 4 channels of PX pixels. The
// weight is [KH, KW, channels].
//
// Buffers, macros: qmatmul_io.glslh (ACT 1, BITS 8). Parameters: qconv2d_params.glslh; IC is 1, OC
// is not used, and ldw is the bytes from one tap of the weight to the next.
//   ALIGNED  4: channels, pixels, taps and offsets are at multiples of 4 bytes; 1: anything
//   PX       neighbours along x that an invocation computes (2)
// Grid: (ceil(ceil(channels / 4) * ceil(OW / PX) / 64), OH, batches)
#include "core/common.glslh"
#ifndef ALIGNED
#define ALIGNED 1
#endif
#ifndef PX
#define PX 2
#endif

#include "quantized/qconv2d_params.glslh"

layout(local_size_x = 64, local_size_y = 1, local_size_z = 1) in;

ivec4 bytes_of(uint word) { return ivec4(int(word << 24), int(word << 16), int(word << 8), int(word)) >> 24; }

ivec4 qvalues_a(int at, int c) {
#if ALIGNED == 4
    return bytes_of(buf_a[at >> 2]);
#else
    ivec4 v = ivec4(0);
    UNROLL for (int i = 0; i < 4; i++) {
        if (c + i < channels_out) v[i] = bitfieldExtract(int(buf_a[(at + i) >> 2]), ((at + i) & 3) * 8, 8);
    }
    return v;
#endif
}

ivec4 qvalues_w(int at, int c) {
#if ALIGNED == 4
    return bytes_of(buf_w[at >> 2]);
#else
    ivec4 v = ivec4(0);
    UNROLL for (int i = 0; i < 4; i++) {
        if (c + i < channels_out) v[i] = bitfieldExtract(int(buf_w[(at + i) >> 2]), ((at + i) & 3) * 8, 8);
    }
    return v;
#endif
}

LOOPS(loop(KH, loop(KW)))

void main() {
    column_end = channels_out;
    int quads = (channels_out + 3) / 4, id = int(INVOCATION_ID.x);
    int c = (id % quads) * 4, x0 = id / quads * PX, oy = int(WORKGROUP_ID.y), image = int(WORKGROUP_ID.z);
    if (x0 >= OW) return;
    ivec4 acc[PX];
    UNROLL for (int p = 0; p < PX; p++) acc[p] = ivec4(0);
    for (int ky = 0; ky < KH; ky++) {
        int y = tap_of(oy, ky, stride_y, pad_y, dilation_y, H);
        for (int kx = 0; kx < KW; kx++) {
            ivec4 w = qvalues_w(offset_w * 4 + (ky * KW + kx) * ldw + c, c);
            UNROLL for (int p = 0; p < PX; p++) {
                int x = tap_of(x0 + p, kx, stride_x, pad_x, dilation_x, W);
                ivec4 a = ivec4(x_zero);
                if (x >= 0 && y >= 0) a = qvalues_a(((image * H + y) * W + x) * pixel_a + offset_a + c, c);
                acc[p] += a * w;
            }
        }
    }
    UNROLL for (int p = 0; p < PX; p++) {
        int m = (image * OH + oy) * OW + x0 + p;
        if (x0 + p < OW) store4(finish_sums(acc[p], m, c), offset_o + m * channels_out + c, m, c);
    }
}
