#version 450
#extension GL_GOOGLE_include_directive : enable
// The input of conv2d_winograd.comp: for each block of 4 x 4 pixels d, of which neighbours overlap by
// two rows and columns, the 16 elements of B^T d B. One invocation takes 4 channels of a block.
//
// Buffers: a (the input [B, H, W, C]), out [16, BLOCKS, C].
// Macros:
//   TEXEL_A  1: the input is a uniform texel buffer of format R32G32B32A32_SFLOAT
//   LX  the local size (64)
// C, pixel_a and offset_a are multiples of 4.
// Grid: (ceil(BLOCKS * C / (4 * LX)), 1, 1)
#include "core/common.glslh"

PARAM(0, BLOCKS)  // of all images: batches * BLOCKS_Y * BLOCKS_X
PARAM(1, BLOCKS_Y)  // of an image
PARAM(2, BLOCKS_X)
PARAM(3, H)
PARAM(4, W)
PARAM(5, C)
PARAM(6, pixel_a)  // elements from one input pixel to the next
PARAM(7, pad_y)  // padding before
PARAM(8, pad_x)
#undef PARAM_DEFAULT
#define PARAM_DEFAULT 0
PARAM(9, offset_a)  // of the input in its buffer

#ifndef TEXEL_A
#define TEXEL_A 0
#endif
#ifndef LX
#define LX 64
#endif

#if TEXEL_A
TEXEL_BUFFER(0, a)
#define READ4_A(i) texelFetch(buf_a, (i) >> 2)
#else
READONLY_BUFFER(0, a, vec4)
#define READ4_A(i) buf_a[(i) >> 2]
#endif
WRITEONLY_BUFFER(1, out, vec4)

layout(local_size_x = LX, local_size_y = 1, local_size_z = 1) in;

void main() {
    int id = int(INVOCATION_ID.x), vectors = C >> 2, block = id / vectors;
    if (block >= BLOCKS) return;
    int c = (id - block * vectors) * 4;
    int row = block / BLOCKS_X, image = row / BLOCKS_Y;
    int y0 = (row - image * BLOCKS_Y) * 2 - pad_y, x0 = (block - row * BLOCKS_X) * 2 - pad_x;
    int at0 = ((image * H + y0) * W + x0) * pixel_a + c + offset_a;
    vec4 d[4][4];
    UNROLL for (int i = 0; i < 4; i++) {
        bool in_y = y0 + i >= 0 && y0 + i < H;
        UNROLL for (int j = 0; j < 4; j++) {
            bool inside = in_y && x0 + j >= 0 && x0 + j < W;
            vec4 v = READ4_A(inside ? at0 + (i * W + j) * pixel_a : 0);
            d[i][j] = inside ? v : vec4(0.0);
        }
    }
    // B^T d, then the same of its columns.
    UNROLL for (int j = 0; j < 4; j++) {
        vec4 d0 = d[0][j], d1 = d[1][j], d2 = d[2][j], d3 = d[3][j];
        d[0][j] = d0 - d2;
        d[1][j] = d1 + d2;
        d[2][j] = d2 - d1;
        d[3][j] = d1 - d3;
    }
    int at = id, step = BLOCKS * vectors;
    UNROLL for (int i = 0; i < 4; i++) {
        buf_out[at + (4 * i) * step] = d[i][0] - d[i][2];
        buf_out[at + (4 * i + 1) * step] = d[i][1] + d[i][2];
        buf_out[at + (4 * i + 2) * step] = d[i][2] - d[i][1];
        buf_out[at + (4 * i + 3) * step] = d[i][1] - d[i][3];
    }
}
