#version 450
#extension GL_GOOGLE_include_directive : enable
// The weight of conv2d_winograd.comp: for each window g of 3 x 3, the 16 elements of G g G^T, in panels
// of 32 output channels. Those behind the last channel are 0. One invocation takes 4 output channels of
// an input channel.
//
// Buffers: b (the weight [3, 3, IC, OC]), out [16, PANELS, IC, 32].
// Macros:
//   TEXEL_B  1: the weight is a uniform texel buffer of format R32G32B32A32_SFLOAT
//   LX  the local size (64)
// OC and offset_b are multiples of 4.
// Grid: (ceil(8 * PANELS * IC / LX), 1, 1)
#include "core/common.glslh"

PARAM(0, IC)
PARAM(1, OC)
#undef PARAM_DEFAULT
#define PARAM_DEFAULT 0
PARAM(2, offset_b)  // of the weight in its buffer

#ifndef TEXEL_B
#define TEXEL_B 0
#endif
#ifndef LX
#define LX 64
#endif

#if TEXEL_B
TEXEL_BUFFER(0, b)
#define READ4_B(i) texelFetch(buf_b, (i) >> 2)
#else
READONLY_BUFFER(0, b, vec4)
#define READ4_B(i) buf_b[(i) >> 2]
#endif
WRITEONLY_BUFFER(1, out, vec4)

layout(local_size_x = LX, local_size_y = 1, local_size_z = 1) in;

void main() {
    int id = int(INVOCATION_ID.x), count = (OC + 31) / 32 * IC * 8;
    if (id >= count) return;
    int row = id >> 3, panel = row / IC;
    int n = panel * 32 + (id & 7) * 4, at = offset_b + (row - panel * IC) * OC + n;
    bool inside = n < OC;
    vec4 u[4][3];
    UNROLL for (int x = 0; x < 3; x++) {
        vec4 g[3];
        UNROLL for (int y = 0; y < 3; y++) {
            vec4 v = READ4_B(inside ? at + (3 * y + x) * IC * OC : 0);
            g[y] = inside ? v : vec4(0.0);
        }
        u[0][x] = g[0];
        u[1][x] = 0.5 * (g[0] + g[1] + g[2]);
        u[2][x] = 0.5 * (g[0] - g[1] + g[2]);
        u[3][x] = g[2];
    }
    UNROLL for (int y = 0; y < 4; y++) {
        buf_out[id + (4 * y) * count] = u[y][0];
        buf_out[id + (4 * y + 1) * count] = 0.5 * (u[y][0] + u[y][1] + u[y][2]);
        buf_out[id + (4 * y + 2) * count] = 0.5 * (u[y][0] - u[y][1] + u[y][2]);
        buf_out[id + (4 * y + 3) * count] = u[y][2];
    }
}
