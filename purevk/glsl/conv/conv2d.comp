#version 450
#extension GL_GOOGLE_include_directive : enable
// 2-D convolution as an implicit matmul, with tiles in registers. Rows are output pixels, columns
// are output channels, and K runs over the taps and the input channels of a group. Images are NHWC.
// A 1-D convolution has H = KH = 1.
//
// Buffers: a (the input [B, H, W, C]), b (the weight [KH, KW, IC, OC_total]), bias [OC_total] (if
//   BIAS), out [B, OH, OW, OC_total], and what EXTRA_BUFFERS declares.
// Macros: those of matmul_tile.glslh (without B_TRANSPOSED) and of matmul_io.glslh.
//   VEC4_A    pixel_a and offset_a are multiples of 4, and so is IC, unless it is TERMS
//   VEC4_B    OC, ldb and offset_b are
//   VEC4_OUT  OC, pixel_o and offset_o are
// The epilogue gets b = 0, m = output pixel (batch * OH + y) * OW + x, and n = output channel among
// those of all groups.
// Grid: as matmul.comp with M = batches * OH * OW, N = OC, batches = groups.
#include "core/common.glslh"

PARAM(0, batches)
PARAM(1, H)
PARAM(2, W)
PARAM(3, IC)  // input channels of one group
PARAM(4, OH)
PARAM(5, OW)
PARAM(6, OC)  // output channels of one group
PARAM(7, pixel_a)  // elements from one input pixel to the next
PARAM(8, pixel_o)  // the same for out
PARAM(9, ldb)  // stride of the rows of the weight: OC_total, or more if padded
PARAM(10, KH)
PARAM(11, KW)
PARAM(12, stride_y)
PARAM(13, stride_x)
PARAM(14, pad_y)  // padding before
PARAM(15, pad_x)
PARAM(16, dilation_y)
PARAM(17, dilation_x)
#undef PARAM_DEFAULT
#define PARAM_DEFAULT 0
PARAM(18, offset_a)  // of the input in its buffer
PARAM(19, offset_b)  // of the weight
PARAM(20, offset_o)  // of out
PARAM(21, offset_bias)  // of the bias

#include "matmul/matmul_io.glslh"

int first_channel;

// `k` is the row of the weight; rows beyond the last input channel of a tap meet a zero of the
// input.
vec4 load_b(int k, int n) {
#if VEC4_A
    int at = offset_b + k * ldb + first_channel;
#else
    int at = offset_b + min(k, KH * KW * IC - 1) * ldb + first_channel;
#endif
#if VEC4_B
    return READ4_B(at + min(n, OC - 4));
#else
    int last = OC - 1;
    return vec4(READ_B(at + min(n, last)), READ_B(at + min(n + 1, last)), READ_B(at + min(n + 2, last)),
                READ_B(at + min(n + 3, last)));
#endif
}

// Channels c .. c+3 of the pixel at element `at`, zero outside of the input and beyond the group's
// channels.
vec4 load_a(int at, int c, bool inside) {
#if VEC4_A
    vec4 v = READ4_A(inside ? at + c : 0);
    return inside ? v : vec4(0.0);
#else
    vec4 v = vec4(0.0);
    if (inside) {
        v.x = READ_A(at + c);
        if (c + 1 < IC) v.y = READ_A(at + c + 1);
        if (c + 2 < IC) v.z = READ_A(at + c + 2);
        if (c + 3 < IC) v.w = READ_A(at + c + 3);
    }
    return v;
#endif
}

#define B_TRANSPOSED 0
#include "matmul/matmul_tile.glslh"

LOOPS(loop(KH, loop(KW, loop(ceil(IC, 4)))))

void main() {
    int group = int(WORKGROUP_ID.z);
    first_channel = group * OC;
    tile_row = TILE_ROW;
    tile_col = TILE_COL;
    int M = batches * OH * OW;
    // Input coordinates and address of tap (0, 0) for each row that this invocation loads.
    int y0[A_LOADS], x0[A_LOADS], at0[A_LOADS];
    UNROLL for (int g = 0; g < A_LOADS; g++) {
        int m = min(A_ROW(g), M - 1);
        int row = m / OW, image = row / OH;
        y0[g] = (row - image * OH) * stride_y - pad_y;
        x0[g] = (m - row * OW) * stride_x - pad_x;
        at0[g] = ((image * H + y0[g]) * W + x0[g]) * pixel_a + group * IC + offset_a;
    }
    tile_clear();
    for (int ky = 0; ky < KH; ky++) {
        for (int kx = 0; kx < KW; kx++) {
            bool inside[A_LOADS];
            int at[A_LOADS];
            UNROLL for (int g = 0; g < A_LOADS; g++) {
                int y = y0[g] + ky * dilation_y, x = x0[g] + kx * dilation_x;
                inside[g] = y >= 0 && y < H && x >= 0 && x < W;
                at[g] = at0[g] + (ky * dilation_y * W + kx * dilation_x) * pixel_a;
            }
            int k0 = (ky * KW + kx) * IC;
            for (int c = 0; c < IC; c += 4) {
                vec4 a[A_LOADS];
                UNROLL for (int g = 0; g < A_LOADS; g++) a[g] = load_a(at[g], c, inside[g]);
                tile_step(a, k0 + c);
            }
        }
    }
    UNROLL for (int j = 0; j < TN4; j++) {
        int n = OUT_COL(j);
        vec4 bias = bias4(first_channel + n, first_channel + OC);
        UNROLL for (int i = 0; i < TM; i++) {
            int m = OUT_ROW(i);
            if (m >= M || n >= OC) continue;
            int channel = first_channel + n;
            store4(acc[i][j] + bias, offset_o + m * pixel_o + channel, 0, m, channel, first_channel + OC);
        }
    }
}
