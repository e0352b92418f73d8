#version 450
#extension GL_GOOGLE_include_directive : enable
// 2-D convolution with a window of 3 x 3 by Winograd's algorithm F(2 x 2, 3 x 3): 16 products make a
// block of 2 x 2 output pixels, where the window needs 36. Tiles are in registers.
//
// The input and the weight are transformed before: each is 16 matrices. An invocation multiplies one
// pair after the other, and adds each product to the outputs of the block, by A^T m A. So products are
// never stored. Images are NHWC.
//
// Buffers: a (the input [16, BLOCKS, IC], which conv2d_winograd_input.comp makes), b (the weight
//   [16, PANELS, IC, 32], in panels of 32 output channels), bias [OC] (if BIAS), out [B, OH, OW, OC],
//   and what EXTRA_BUFFERS declares.
// Macros: those of matmul_tile.glslh (without B_TRANSPOSED) and of matmul_io.glslh. VEC4_A, VEC4_B and
//   VEC4_OUT are 1: IC, OC and the offsets are multiples of 4.
// The epilogue gets b = 0, m = output pixel (batch * OH + y) * OW + x, and n = output channel.
// Grid: as matmul.comp with M = BLOCKS, N = OC, batches = 1.
#include "core/common.glslh"

PARAM(0, BLOCKS)  // of all images: batches * BLOCKS_Y * BLOCKS_X
PARAM(1, BLOCKS_Y)  // of an image
PARAM(2, BLOCKS_X)
PARAM(3, IC)
PARAM(4, OH)
PARAM(5, OW)
PARAM(6, OC)
#undef PARAM_DEFAULT
#define PARAM_DEFAULT 0
PARAM(7, offset_b)  // of the weight in its buffer
PARAM(8, offset_o)  // of out
PARAM(9, offset_bias)  // of the bias

#define VEC4_A 1
#define VEC4_B 1
#define VEC4_OUT 1
#include "matmul/matmul_io.glslh"

const int PANEL = 32;
int panels, first_b;

vec4 load_b(int k, int n) {
    int column = min(n, panels * PANEL - 4), panel = column / PANEL;
    return READ4_B(first_b + (panel * IC + k) * PANEL + column % PANEL);
}

#define B_TRANSPOSED 0
#include "matmul/matmul_tile.glslh"

LOOPS(loop(16, loop(ceil(IC, 4))) + loop(4, loop(TM / TURN)))

void main() {
    tile_row = TILE_ROW;
    tile_col = TILE_COL;
    panels = (OC + PANEL - 1) / PANEL;
    int rows[A_LOADS];
    UNROLL for (int g = 0; g < A_LOADS; g++) rows[g] = min(A_ROW(g), BLOCKS - 1) * IC;
    vec4 sums[4][TM][TN4];
    UNROLL for (int q = 0; q < 4; q++) {
        UNROLL for (int i = 0; i < TM; i++) {
            UNROLL for (int j = 0; j < TN4; j++) sums[q][i][j] = vec4(0.0);
        }
    }
    ROLL for (int p = 0; p < 16; p++) {
        int first_a = p * BLOCKS * IC;
        first_b = offset_b + p * panels * IC * PANEL;
        tile_clear();
        for (int k = 0; k < IC; k += 4) {
            vec4 a[A_LOADS];
            UNROLL for (int g = 0; g < A_LOADS; g++) a[g] = READ4_A(first_a + rows[g] + k);
            tile_step(a, k);
        }
        // Column p / 4 of A^T times column p % 4.
        int y = p >> 2, x = p & 3;
        float y0 = y < 3 ? 1.0 : 0.0, y1 = y == 0 ? 0.0 : y == 1 ? 1.0 : -1.0;
        float x0 = x < 3 ? 1.0 : 0.0, x1 = x == 0 ? 0.0 : x == 1 ? 1.0 : -1.0;
        UNROLL for (int i = 0; i < TM; i++) {
            UNROLL for (int j = 0; j < TN4; j++) {
                sums[0][i][j] += y0 * x0 * acc[i][j];
                sums[1][i][j] += y0 * x1 * acc[i][j];
                sums[2][i][j] += y1 * x0 * acc[i][j];
                sums[3][i][j] += y1 * x1 * acc[i][j];
            }
        }
    }
    // The code that stores is long, so that the pixels of a block take turns, and so do the rows.
    ROLL for (int q = 0; q < 4; q++) {
        UNROLL for (int j = 0; j < TN4; j++) {
            vec4 bias = bias4(OUT_COL(j), OC);
            UNROLL for (int i = 0; i < TM; i++) {
                acc[i][j] = sums[0][i][j] + bias;
                sums[0][i][j] = sums[1][i][j];
                sums[1][i][j] = sums[2][i][j];
                sums[2][i][j] = sums[3][i][j];
            }
        }
        ROLL for (int turn = 0; turn < TM; turn += TURN) {
            UNROLL for (int j = 0; j < TN4; j++) {
                int n = OUT_COL(j);
                UNROLL for (int i = 0; i < TURN; i++) {
                    int block = OUT_ROW(turn + i), row = block / BLOCKS_X, image = row / BLOCKS_Y;
                    int y = (row - image * BLOCKS_Y) * 2 + (q >> 1), x = (block - row * BLOCKS_X) * 2 + (q & 1);
                    int m = (image * OH + y) * OW + x;
                    if (block < BLOCKS && n < OC && y < OH && x < OW) {
                        store4(acc[i][j], offset_o + m * OC + n, 0, m, n, OC);
                    }
                }
                UNROLL for (int i = TURN; i < TM; i++) acc[i - TURN][j] = acc[i][j];
            }
        }
    }
}
